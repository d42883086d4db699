// A block's tiles one after another through a ring of stages, whatever main loop multiplies them.
#pragma once
#include "tile_copies.cuh"

// Asks for B of the first stages of this block's first tile, where it is there before A is: see for_each_tile.
template <class P, class Work>
__device__ __forceinline__ void fetch_ahead(void* shared, const Work& work) {
    TileWork tile;
    if (!work(0, tile)) return;
    typename P::Cursor cursor;
    cursor.begin(tile);
    u32 stage = (u32)__cvta_generic_to_shared(P::stages(shared));
#pragma unroll 1
    for (int s = 0; s < P::AHEAD && s < tile.steps; ++s) {
        cursor.copy_b(stage);
        cursor.next();
        stage += P::STAGE * (int)sizeof(Element);
    }
}

// Computes this block's tiles one after another: work(i, tile) describes the i-th, false behind the last;
// begin(i, tile, product) may ask for what finishing needs while the product runs; finish(i, tile, product) takes its results.
// Where the output tile lies apart from the stages, those of later tiles are fetched while a tile is finished.
// `fetched`: so is what fetch_ahead asks for.
template <class P, class Work, class Begin, class Finish>
__device__ __forceinline__ void for_each_tile(
    void* shared, const Work& work, bool fetched, const Begin& begin, const Finish& finish) {
    constexpr u32 STAGE_BYTES = P::STAGE * sizeof(Element), RING_BYTES = P::STAGES * STAGE_BYTES;
    Element* stages = P::stages(shared);
    const u32 base = (u32)__cvta_generic_to_shared(stages);
    typename P::Cursor cursor;
    TileWork tile;
    int next = 0, left = 0;  // the tile whose stages are fetched, and those left of it
    u32 fill = base, use = base;
    bool more = work(0, tile);
    if (more) {
        cursor.begin(tile);
        left = tile.steps;
    }
    const auto following = [](u32 stage, u32 base) { return stage + STAGE_BYTES == base + RING_BYTES ? base : stage + STAGE_BYTES; };
    const auto fetch = [&](bool with_b) {
        if (left > 0) {
            cursor.copy_a(fill);
            if (with_b) cursor.copy_b(fill);
            cursor.next();
            --left;
        }
        copy_commit();
        fill = following(fill, base);
    };
    const auto advance = [&](int i) {  // to the tile whose next stage is to be fetched
        while (left == 0 && more && (P::APART || next < i)) {
            TileWork ahead;
            more = work(++next, ahead);
            if (!more) break;
            cursor.begin(ahead);
            left = ahead.steps;
        }
    };
#pragma unroll 1
    for (int i = 0; work(i, tile); ++i) {
        if (i == 0 || !P::APART) {
            fill = use = base;
#pragma unroll 1
            for (int s = 0; s < P::AHEAD; ++s) {
                advance(i);
                fetch(!fetched || next > 0);
            }
        }
        P product;
        product.begin();
        begin(i, tile, product);
        advance(i);
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            copy_wait<P::AHEAD - 1>();
            P::arrived();
            __syncthreads();
            product.start(use);
            fetch(true);
            product.settle(stages + (use - base) / (u32)sizeof(Element));
            advance(i);
            use = following(use, base);
        }
        product.end();
        if (!P::APART) copy_wait<0>();
        if (!P::APART || !tile.steps) __syncthreads();  // all are done with the stages, or with the last results
        finish(i, tile, product);
        if (!P::APART) __syncthreads();
    }
    copy_wait<0>();
    __syncthreads();
}
