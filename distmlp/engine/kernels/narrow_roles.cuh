// The two roles of warpgroups within a step: chains take tiles of 64 rows each through the network, one more warpgroup
// sums the weight gradients of all their tiles in its registers.
//
// They meet at gates of (chain, layer). Through `full` a chain says that the operands of a layer's weight gradient lie
// in its tile; through `done` it learns that their places are free:
//   dZ `i` takes the place of activation i + 1 when layer i + 1's gradient of this tile is done;
//   activation 1 is written when layer 1's of the tile before is done, all others when its layer 0's is, the last.
// The summing warpgroup takes layers from the last to the first and chains in turn, so sums have a fixed order.
#pragma once
#include "narrow_gates.cuh"
#include "narrow_tags.cuh"

#ifdef PROFILE
__device__ long long PROFILE_AT[128];
#define MARK(i) if ((threadIdx.x & 127) == 0 && blockIdx.x == 0 && PROFILE_STEP) PROFILE_AT[i] = clock64();
#else
#define MARK(i) ;
#endif

namespace narrow {

__device__ __forceinline__ u32 full_gate(int chain, int layer) {
    return shared_address(dynamic_shared) + GATES_AT + (chain * LAYERS + layer) * 8;
}
__device__ __forceinline__ u32 done_gate(int chain, int layer) { return full_gate(CHAINS + chain, layer); }
__device__ __forceinline__ void open_gates() {
    if (threadIdx.x < 2 * CHAINS * LAYERS) open_gate(full_gate(0, threadIdx.x), 4);  // a lane of every warp arrives
}

// The two rows of a thread: all that is kept of a tile to come beside its inputs. Their numbers come by way of shared
// memory, so that nothing waits for them.
struct RowNumbers {
    i64 first;  // place of the first one in the batches
    u32 there;  // a bit each

    static __device__ __forceinline__ u32 place() {
        return shared_address(dynamic_shared) + NUMBERS_AT + 8 * threadIdx.x;
    }
    __device__ __forceinline__ void ask(const Raw& raw, const StepInfo& info, int at) {
        there = (at < info.rows) | (at + 8 < info.rows) << 1;
        first = info.first + at;
        if (raw.index) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (there >> half & 1)
                    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place() + 4 * half),
                                 "l"(raw.index + first + 8 * half)
                                 : "memory");
        }
    }
    __device__ __forceinline__ RowPair pair(const Raw& raw) const {
        RowPair rows;
        u32 number[2] = {0, 0};
        if (raw.index) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(number[0]), "=r"(number[1]) : "r"(place()) : "memory");
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.there[half] = there >> half & 1;
            rows.row[half] = raw.index ? (i64)number[half] : first + 8 * half;
            rows.weight[half] = rows.there[half];
            rows.label[half] = 0;
        }
        return rows;
    }
};

// One chain, over all steps.
struct ChainRole {
    const Raw& raw;
    Chain chain;
    int number;
    u32 gates;  // its first
    u32 turn;   // parity of its tiles so far
    RowNumbers rows;
    Chain::Inputs inputs;  // of the tile to come

    __device__ __forceinline__ explicit ChainRole(const Raw& raw_, int group) : raw(raw_), number(group), turn(0) {
        const u32 shared = shared_address(dynamic_shared);
        chain = {
            shared, shared + TILES_AT + group * TILE_BYTES, (const float*)(dynamic_shared + SCALES_AT),
            2 * (int)(threadIdx.x >> 5 & 3)};
        gates = full_gate(group, 0);
    }
    __device__ __forceinline__ int first_tile() const { return blockIdx.x + number * gridDim.x; }
    __device__ __forceinline__ int first_row(int tile) const {
        return tile * TILE + 8 * chain.row_block + ((threadIdx.x & 31) >> 2);
    }
    // The first tile of a launch.
    __device__ __forceinline__ void stage(const StepInfo& info) {
        rows.ask(raw, info, first_row(first_tile()));
        chain.load_inputs(raw, rows.pair(raw), inputs);
    }

    // What happens along the way of a tile.
    struct Way {
        const Raw& raw;
        const RowPair& rows;
        const RowNumbers& next_rows;
        const Chain::Targets& targets;
        Chain::Inputs& inputs;
        const u32 (&first)[2 * columns(0)];
        u32 full, turn;

        __device__ __forceinline__ void await_done(int layer, u32 parity) const {
            await(full + (CHAINS * LAYERS + layer) * 8, parity);
        }
        static constexpr int FIRST_STORED = LAYERS > 1 ? 1 : 0;
        template <int L>
        __device__ __forceinline__ void await_place() const {
            if (L == 0 && LAYERS > 1) await_done(1, turn ^ 1);
            if (L == FIRST_STORED) await_done(0, turn ^ 1);
        }
        // Behind layer FIRST_STORED all places are free: the inputs follow, and the next ones are asked for, to be
        // there before the first fence, which waits for loads under way.
        template <int L>
        __device__ __forceinline__ void passed(const Chain& chain) {
            if (L != FIRST_STORED) return;
            chain.store_fragments<columns(0), activation_stride(0)>(chain.activation_fragment<0>(), first);
            chain.load_inputs(raw, next_rows.pair(raw), inputs);
        }
        template <int L>
        __device__ __forceinline__ void ready() const {
            publish_operands();
            __syncwarp();
            if ((threadIdx.x & 31) == 0) arrive(full + 8 * L);
        }
        template <int L>
        __device__ __forceinline__ void await_error_place() const {
            if (shares_place(L)) await_done(L + 1, turn);
        }
    };

    // All tiles of a step. What follows its last is the first of `following`.
    __device__ __forceinline__ void run(const StepInfo& info, const StepInfo& following, Totals& totals) {
        const int tiles = (info.rows + TILE - 1) / TILE, stride = CHAINS * gridDim.x;
#pragma unroll 1
        for (int tile = first_tile(); tile < tiles; tile += stride) {
            const bool more = tile + stride < tiles;
            RowPair pair = rows.pair(raw);  // before the numbers of the next take their place
            RowNumbers next;
            next.ask(raw, more ? info : following, first_row(more ? tile + stride : first_tile()));
            if (NARROW_WEIGHTED || LABELS) pair.load(raw);
            Chain::Targets targets;
            chain.load_targets(raw, pair, targets);
            u32 a[2 * columns(0)];
            chain.pack_inputs(pair, inputs, a);
            if ((threadIdx.x & 3) == 0) totals.weight += pair.weight[0] + pair.weight[1];
            Way way = {raw, pair, next, targets, inputs, a, gates, turn};
            chain.forward<0>(a, way, totals);
            rows = next;
            turn ^= 1;
        }
        // Where there was no tile, the next step's still has to be staged.
        if (first_tile() >= tiles && first_tile() * TILE < following.rows) stage(following);
    }
};

// The warpgroup that sums.
struct SumRole {
    float sums[SUMS];
    u32 tile;   // the first chain's
    u32 turns;  // parity of every chain's tiles so far, a bit each

    template <int L, int I = 0>
    __device__ __forceinline__ void add_layer(u32 at) {
        if constexpr (I < ITEM_COUNT) {
            if constexpr (item(I).layer == L) add_item<I>(sums, at);
            add_layer<L, I + 1>(at);
        }
    }
    template <int L, int I = 0>
    __device__ __forceinline__ void write_layer(float* partial, Tagged& out) const {
        if constexpr (I < ITEM_COUNT) {
            if constexpr (item(I).layer == L) write_item<I>(sums, partial, out);
            write_layer<L, I + 1>(partial, out);
        }
    }
    // Layers L to 0 of a tile of each of the first `count` chains; the sums leave with the last.
    template <int L, bool LAST>
    __device__ __forceinline__ void take(int count, float* partial, Tagged& out) {
        int chain = 0;
        settle(sums);
#pragma unroll 1
        do {
            await(full_gate(chain, L), turns >> chain & 1);
            begin_products();
            add_layer<L>(tile + chain * TILE_BYTES);
            commit_products();
            wait_products();
            if ((threadIdx.x & 31) == 0) arrive(done_gate(chain, L));
        } while (++chain < count);
        settle(sums);
        if constexpr (LAST) write_layer<L>(partial, out);
        if constexpr (L > 0) take<L - 1, LAST>(count, partial, out);
    }
    __device__ __forceinline__ void run(int rows, float* partial, Tagged& out) {
        const int tiles = (rows + TILE - 1) / TILE;
        int left = (int)blockIdx.x < tiles ? (tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
#pragma unroll 1
        for (; left > CHAINS; left -= CHAINS) {
            take<LAYERS - 1, false>(CHAINS, partial, out);
            turns ^= (1 << CHAINS) - 1;
        }
        if (left > 0) {
            take<LAYERS - 1, true>(left, partial, out);
            turns ^= (1 << left) - 1;
        } else {
            for (int i = threadIdx.x & 127; i < PARTIAL_STRIDE; i += 128) out.store(partial + i, 0.f);
        }
    }
};

}  // namespace narrow
