// Everything a kernel finds in device memory: one structure in constant memory, written once when the engine opens.
// layout.py builds the same structures with NumPy; sizes are checked against each other when a module is loaded.
#pragma once
#include "optimizers.cuh"

#define MAX_LAYERS 64
#define MAX_GROUPS 32  // of blocks that own rows
#define TALLY 8  // numbers behind the gradient, see tally.py
enum TallySlot { TALLY_LOSS, TALLY_WEIGHT, TALLY_ROWS, TALLY_STOP };

struct Layer {
    i64 weight_offset, bias_offset;  // into the flat buffers, elements
    Element* weight;                 // copy for the products (fan_in, ld_out), columns from fan_out on are zero
    Element* output;                 // (rows, ld_out), columns from fan_out on are zero
    Element* error;                  // derivative by the pre-activation (rows, ld_out); before it, the slope
    float* column_sums;              // of `error`: (row tiles, ld_out)
    int fan_in, fan_out, ld_in, ld_out;
    int activation;
    int tiles_n;                     // of the weight gradient, across
    int splits;                      // of the batch in the weight gradient, added up in this order
    int first_task, first_tile;      // of this layer in the list of all weight gradients
    int tile_columns;                // of the weight gradient: what of a tile's columns is used
};

// A batch as the products want it. Two of them: one is filled while the other is used.
struct Batch {
    Element* inputs;  // (rows, ld_in of layer 0), columns from the features on are zero
    int* labels;      // (rows,) or null
    float* weights;   // (rows,) or null: every row counts 1
};

// What the finiteness of gradients is told from, and the sums of the step; one for each parity of steps.
struct Flags {
    u32 output[MAX_LAYERS + 1];  // largest magnitude of the inputs and of every layer's output, as bits
    u32 error[MAX_LAYERS];       // and of every layer's error
    u32 loss;                    // of any partial sum of the loss
    u32 gradient_not_finite;     // of the gradient, where update.cuh looks at it: the largest magnitude
    float weight;                // sum of the sample weights
};

// What outlives a launch.
struct Control {
    u64 barrier;          // of training, and of the forward kernel: their grids may differ
    u64 forward_barrier;
    u64 step;     // updates applied so far
    u32 frozen;   // policy stop: a step was not finite, nothing happens any more
    u32 skipped;  // steps left out
    Flags flags[2];
    u64 rows_done[4 * MAX_GROUPS];  // arrivals of a group of blocks, each in a sector of its own; see RowBarrier
};

struct StepInfo {  // host to device, one a step
    float rate;
    int rows;   // of this rank
    i64 first;  // of them in the index table, or in the raw rows where there is no table
};

enum BeforeUpdate { NOTHING, NORM, PEERS_SUM };
enum StepStatus { NOT_RUN, DONE, LEFT_OUT, NOT_FINITE };
struct StepResult {  // device to host, one a step
    double loss;     // weighted sum over the rows
    float weight;    // sum of the sample weights
    int status;
};

struct Lane {  // where a stream's sums, or a row of the message, go: see lanes.cuh
    int place, level, merges, padding;
};

struct Raw {  // rows as they were read
    const void* inputs;    // (any, features), of type `raw_type`
    const float* targets;  // (any, outputs)
    const int* labels;     // (any,)
    const float* weights;  // (any,)
    const u32* index;      // row of every position, or null: in order
};

struct Engine {
    float *parameters, *first_slot, *second_slot, *ema;  // flat, Network's layout; null where not kept
    float* gradient;                                     // flat, and the tally behind it
    i64 size;                                            // elements of a flat buffer
    float* partial_tiles;                                // of split weight gradients (tasks, tile)
    u32* tile_arrivals;                                  // of split weight gradients (tiles,), zero between uses
    float* logits;                                       // (rows, ld_out of the last layer), softmax only
    double* loss_partials;                               // (loss_parts,)
    double* norm_partials;                               // (2, tensors, blocks)
    const float *input_mean_high, *input_mean_low, *input_factor;     // (features,) or null: as they are
    const float *target_mean_high, *target_mean_low, *target_factor;  // (outputs,) or null
    Batch batches[2];
    Control* control;
    const StepInfo* steps;
    StepResult* results;
    int layers;
    int gradient_tasks, gradient_tiles;
    int raw_type;
    int stop_on_nonfinite;
    int needs_norm;   // of the whole gradient before any update, or the other ranks' part of it: see BeforeUpdate
    int deferred;     // other ranks: gradients are reduced between launches, the update begins the next one
    float clip_norm, huber_delta;
    float weight_decay, momentum, epsilon, ema_decay;
    double beta1, beta2, rho;
    const Lane* lanes;  // of every own stream, then of every row of the message
    float* lane_sums;   // the message, votes behind it, the stack
    int lane_stride;    // own streams: so far apart are the rows of one
    int lane_nodes;     // rows of the message
    Layer layer[MAX_LAYERS];
};

extern "C" {
__constant__ Engine ENGINE;
}

__device__ __forceinline__ int hidden_activation(const Layer& layer) {
    return HIDDEN_ACTIVATION == MIXED ? layer.activation : HIDDEN_ACTIVATION;
}

// Where phases look a layer up. A kernel may keep the table nearer: see wide.cu.
#ifndef LAYER
#define LAYER(l) ENGINE.layer[l]
#endif
