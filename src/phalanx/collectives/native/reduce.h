/* Sums, products, minima of what several ranks have, always in the order of the ranks: the same bits whoever computes. */
#ifndef PHX_REDUCE_H
#define PHX_REDUCE_H

#include <stddef.h>
#include <stdint.h>

enum phx_dtype {
    PHX_U8, PHX_I8, PHX_I16, PHX_I32, PHX_I64, PHX_F16, PHX_BF16, PHX_F32, PHX_F64, PHX_BOOL, PHX_U16, PHX_U32, PHX_U64,
    PHX_DTYPES
};

enum phx_op { PHX_SUM, PHX_PRODUCT, PHX_MIN, PHX_MAX, PHX_BAND, PHX_BOR, PHX_BXOR, PHX_OPS };

/* Bytes of one element. */
size_t phx_itemsize(int dtype);

/* Whether there is such a reduction. */
int phx_reduces(int dtype, int op);

/* out[i] = op over all inputs[.][i], each times `before`; divided by n if it is to be the average (whole numbers: towards
   zero). `out` may be one of them. 16-bit floats are added up as 32-bit ones, and rounded once. */
void phx_reduce(void *out, const void *const *inputs, int n, size_t count, int dtype, int op, double before, int average);

#endif
