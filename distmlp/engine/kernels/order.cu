// The index table of an epoch.
#include "order.cuh"

// out[i] = row of this rank's position number i of `epoch`, counted from the first row of its streams.
extern "C" __global__ void fill_index(
    long long rows, unsigned long long seed, int streams, int shuffle, int first_stream, int own_streams,
    unsigned epoch, long long count, unsigned* out) {
    const Order order = {rows, seed, streams, shuffle, first_stream, own_streams};
    const long long first_row = order_stream_start(order, first_stream);
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        out[i] = (unsigned)(order_row(order, epoch, order_own_position(order, i)) - first_row);
}

// The index table of a window, the same as `Windows` makes on the host: position p of it is row p / own_streams of
// stream p % own_streams in the order of window `place`; streams lie `stride` rows apart in the window's arrays, which
// begin at row `base` of the place on the device. Written to `out` and, for windows that follow one another, to `again`.
extern "C" __global__ void fill_window(
    long long rows, unsigned long long seed, int streams, int shuffle, int first_stream, int own_streams,
    unsigned epoch, long long place, long long count, long long stride, long long base, unsigned* out,
    unsigned* again) {
    const Order order = {rows, seed, streams, shuffle, first_stream, own_streams};
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long p = (long long)blockIdx.x * blockDim.x + threadIdx.x; p < count; p += step) {
        const int lane = (int)(p % own_streams);
        const unsigned row =
            (unsigned)(base + lane * stride + order_window_place(order, epoch, first_stream + lane, place, p / own_streams));
        out[p] = row;
        again[p] = row;
    }
}
