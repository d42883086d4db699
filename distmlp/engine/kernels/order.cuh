// The sample order on the device: the same rows as distmlp/order.py, bit for bit.
#pragma once
#ifndef __CUDACC__  // host compilation for tests
#define __host__
#define __device__
#endif
#define ORDER_FN __host__ __device__ inline

#define BLOCK_ROWS 256
#define WINDOW_ROWS 4096
#define ROUNDS 6

struct Order {
    long long rows;
    unsigned long long seed;
    int streams;
    int shuffle;
    int first_stream;  // this rank's streams
    int own_streams;
};

ORDER_FN unsigned order_mix(unsigned value, unsigned key) {
    unsigned x = value ^ key;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

ORDER_FN unsigned order_key(unsigned long long seed, unsigned epoch, unsigned stream, unsigned window) {
    unsigned key = order_mix((unsigned)seed, 0x9E3779B9u);
    const unsigned parts[4] = {(unsigned)(seed >> 32), epoch, stream, window};
    for (int i = 0; i < 4; ++i) key = order_mix(key, parts[i] * 0x9E3779B9u + 0x7F4A7C15u);
    return key;
}

// ceil(sqrt(size)) as NumPy computes it in float64; at least 1.
ORDER_FN long long order_side(long long size) {
    const double root = sqrt((double)size);
    long long side = (long long)root;
    if ((double)side < root) ++side;
    return side < 1 ? 1 : side;
}

// Keyed bijection of [0, size): a Feistel network with cycle walking, see order.py.
ORDER_FN long long order_permute(long long index, long long size, unsigned key) {
    const long long a = order_side(size);
    const long long b = (size + a - 1) / a > 1 ? (size + a - 1) / a : 1;
    do {
        long long left = index / b, right = index % b;
        for (unsigned turn = 0; turn < ROUNDS; turn += 2) {
            left = (left + order_mix((unsigned)right, key + turn * 0x632BE5ABu)) % a;
            right = (right + order_mix((unsigned)left, key + (turn + 1) * 0x632BE5ABu)) % b;
        }
        index = left * b + right;
    } while (index >= size);
    return index;
}

ORDER_FN long long order_stream_start(const Order& o, long long stream) {
    const long long base = o.rows / o.streams, extra = o.rows % o.streams;
    return stream * base + (stream < extra ? stream : extra);
}

// Which of the rows that window `window` of `stream` reads stands at its place `within`.
ORDER_FN long long order_window_place(
    const Order& o, unsigned epoch, long long stream, long long window, long long within) {
    if (!o.shuffle) return within;
    const long long left = order_stream_start(o, stream + 1) - order_stream_start(o, stream) - window * WINDOW_ROWS;
    const unsigned key = order_key(o.seed, epoch, (unsigned)stream, (unsigned)(window + 1));
    return order_permute(within, left < WINDOW_ROWS ? left : WINDOW_ROWS, key);
}

// Global row at `position` of `epoch`.
ORDER_FN long long order_row(const Order& o, unsigned epoch, long long position) {
    const long long stream = position % o.streams;
    long long place = position / o.streams;
    const long long start = order_stream_start(o, stream);
    const long long length = order_stream_start(o, stream + 1) - start;
    if (!o.shuffle) return start + place;
    const long long window = place / WINDOW_ROWS;
    place = window * WINDOW_ROWS + order_window_place(o, epoch, stream, window, place % WINDOW_ROWS);
    const long long block = place / BLOCK_ROWS, offset = place % BLOCK_ROWS, full_blocks = length / BLOCK_ROWS;
    if (block >= full_blocks) return start + place;  // a short last block keeps its place at the end
    const long long moved = order_permute(block, full_blocks, order_key(o.seed, epoch, (unsigned)stream, 0));
    return start + moved * BLOCK_ROWS + offset;
}

// Positions below `position` that belong to this rank's streams: how many rows it has had by then.
ORDER_FN long long order_own_before(const Order& o, long long position) {
    const long long within = position % o.streams - o.first_stream;
    const long long partial = within < 0 ? 0 : within > o.own_streams ? o.own_streams : within;
    return position / o.streams * o.own_streams + partial;
}

// Epoch position of this rank's row number `number`.
ORDER_FN long long order_own_position(const Order& o, long long number) {
    return number / o.own_streams * o.streams + o.first_stream + number % o.own_streams;
}
