// The index table of a stretch of steps.
#include "order.cuh"

// out[i] = row of this rank's position number first + i of `epoch`, counted from the first row of its streams.
extern "C" __global__ void fill_index(
    Order order, unsigned epoch, long long first, long long count, long long first_row, unsigned* out) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        out[i] = (unsigned)(order_row(order, epoch, order_own_position(order, first + i)) - first_row);
}
