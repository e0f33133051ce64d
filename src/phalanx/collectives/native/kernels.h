/* Elementwise reductions over the tensors of several ranks, always in rank order: the result has the same bits on every rank. */
#ifndef PHX_KERNELS_H
#define PHX_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum phx_dtype {
    PHX_U8, PHX_I8, PHX_I16, PHX_I32, PHX_I64, PHX_F16, PHX_BF16, PHX_F32, PHX_F64, PHX_BOOL, PHX_U16, PHX_U32, PHX_U64,
    PHX_DTYPES
};

enum phx_op { PHX_SUM, PHX_PRODUCT, PHX_MIN, PHX_MAX, PHX_BAND, PHX_BOR, PHX_BXOR, PHX_OPS };

/* Bytes per element. */
size_t phx_itemsize(int dtype);

/* Whether this reduction is supported. */
int phx_has_reduction(int dtype, int op);

/* out[i] = op over all inputs[.][i], each multiplied by `scale`; divided by n if `average` (integers: towards zero). `out` may
   be one of the inputs. 16-bit floats are accumulated in 32 bits and rounded once. */
void phx_reduce(void *out, const void *const *inputs, int n, size_t count, int dtype, int op, double scale, int average);

#endif
