// Numbers behind the names of the configuration, and defaults so that every source also compiles by itself.
// The host passes the names in capitals as macros; layout.py holds the numbers that go into memory.
#pragma once

enum Activation { RELU, LEAKY_RELU, ELU, GELU, SILU, TANH, SIGMOID, SOFTPLUS, SINE, IDENTITY };
enum Loss { MSE, MAE, HUBER, BINARY_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY };
enum Optimizer { SGD, MOMENTUM, NESTEROV, RMSPROP, ADAM, ADAMW, LAMB };
enum RawType { RAW_U8, RAW_I8, RAW_U16, RAW_I16, RAW_U32, RAW_I32, RAW_U64, RAW_I64, RAW_F16, RAW_F32, RAW_F64 };

// Product: what multiplies matrices. Elements are what activations, errors and weight copies are stored as.
#define FMA 0     // float32, plain multiply-add
#define TF32 1    // float32 elements rounded to TF32, tensor cores
#define BF16 2    // bfloat16 elements, tensor cores
#define TF32X3 3  // float32, three tensor-core products of what TF32 holds of an operand and what is left of it

#ifndef PRODUCT
#define PRODUCT FMA
#endif
#define MIXED -1  // hidden layers differ: looked up per layer
#ifndef HIDDEN_ACTIVATION
#define HIDDEN_ACTIVATION RELU
#endif
#ifndef OUTPUT_ACTIVATION
#define OUTPUT_ACTIVATION IDENTITY
#endif
#ifndef LOSS
#define LOSS MSE
#endif
#ifndef LABELS  // targets are class labels, one int32 a row
#define LABELS 0
#endif
#ifndef OPTIMIZER
#define OPTIMIZER ADAM
#endif
#ifndef SEVERAL_RANKS  // their gradients may be summed inside the kernel
#define SEVERAL_RANKS 0
#endif
#ifndef LANES  // every step is one stream's rows: reproducible = "ranks"
#define LANES 0
#endif
#ifndef RAW_TYPE  // of the training inputs
#define RAW_TYPE RAW_F32
#endif
