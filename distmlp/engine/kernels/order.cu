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
