/* Elementwise reductions. */
#include "kernels.h"

#include <string.h>

#define BLOCK 1024 /* elements that are reduced over all ranks at a time: they stay in the L1 cache */

typedef uint16_t bf16;
typedef uint16_t f16;

static inline float from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline bf16 to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    return (bf16)((int32_t)(bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

/* Subnormals are computed from two normal numbers, because a thread may flush 32-bit subnormals to zero. No branches, so
   that the compiler vectorizes it. */
static inline float from_f16(f16 h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13, exponent = rest & 0x0f800000;
    uint32_t bits = rest + 0x38000000 + (exponent == 0x0f800000 ? 0x38000000 : 0), above = bits + 0x00800000, low;
    float f;
    memcpy(&f, &above, 4);
    f -= 0x1p-14f;
    memcpy(&low, &f, 4);
    uint32_t subnormal = -(uint32_t)(exponent == 0);
    bits = (bits & ~subnormal) | (low & subnormal) | sign;
    memcpy(&f, &bits, 4);
    return f;
}

/* Computes all cases and selects one, also without branches. */
static inline f16 to_f16(float f) {
    uint32_t bits, low;
    memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    int32_t magnitude = (int32_t)rest;
    float small;
    memcpy(&small, &rest, 4);
    small += 0.5f; /* the addition rounds numbers that are subnormal in 16 bits */
    memcpy(&low, &small, 4);
    uint32_t half = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
    half = magnitude < 0x38800000 ? low - 0x3f000000 : half;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half; /* overflow: would round to more than 65504 */
    half = magnitude > 0x7f800000 ? 0x7e00 : half;  /* NaN */
    return (f16)(sign | half);
}

#define SAME(x) (x)
#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))
#define LESS(a, b) ((b) < (a) ? (b) : (a))
#define MORE(a, b) ((a) < (b) ? (b) : (a))
/* NaN wins, as in torch. */
#define FLESS(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define FMORE(a, b) ((a) < (b) || (b) != (b) ? (b) : (a))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))

/* A scale factor, converted to the type; integers truncate it. */
#define FACTOR_F(type, x) ((type)(x))
#define FACTOR_I(type, x) ((type)whole(x))

static int64_t whole(double x) { return x > -0x1p63 && x < 0x1p63 ? (int64_t)x : 0; }

/* `out` may be an input, but elements do not depend on each other. */
#define EACH(some) _Pragma("GCC ivdep") for (size_t i = 0; i < (some); i++)

/* Reduces one cache-sized block at a time: one loop for the first input, one for each other input, one for the result.
   Two inputs without scale or average, the most common case, take a single loop, unless they must be widened and
   narrowed. */
#define REDUCTION(how, name, type, acc_type, load, store, combine, factor)                                     \
    how static void name(void *out_, const void *const *in, int n, size_t count, double scale_, int average) { \
        acc_type scale = factor(acc_type, scale_), acc[BLOCK];                                                 \
        int scales = scale_ != 1.0;                                                                            \
        for (size_t at = 0; at < count; at += BLOCK) {                                                         \
            size_t some = count - at < BLOCK ? count - at : BLOCK;                                             \
            type *out = (type *)out_ + at;                                                                     \
            const type *first = (const type *)in[0] + at;                                                      \
            if (n == 2 && !scales && !average && sizeof(type) == sizeof(acc_type)) {                           \
                const type *next = (const type *)in[1] + at;                                                   \
                EACH(some) {                                                                                   \
                    acc_type x = load(first[i]), y = load(next[i]);                                            \
                    out[i] = store((acc_type)combine(x, y));                                                   \
                }                                                                                              \
                continue;                                                                                      \
            }                                                                                                  \
            if (scales) EACH(some) acc[i] = (acc_type)(load(first[i]) * scale);                                \
            else EACH(some) acc[i] = load(first[i]);                                                           \
            for (int r = 1; r < n; r++) {                                                                      \
                const type *next = (const type *)in[r] + at;                                                   \
                if (scales) EACH(some) {                                                                       \
                    acc_type x = (acc_type)(load(next[i]) * scale);                                            \
                    acc[i] = (acc_type)combine(acc[i], x);                                                     \
                }                                                                                              \
                else EACH(some) {                                                                              \
                    acc_type x = load(next[i]);                                                                \
                    acc[i] = (acc_type)combine(acc[i], x);                                                     \
                }                                                                                              \
            }                                                                                                  \
            if (average) EACH(some) out[i] = store((acc_type)(acc[i] / n));                                    \
            else EACH(some) out[i] = store(acc[i]);                                                            \
        }                                                                                                      \
    }

typedef void reduction(void *, const void *const *, int, size_t, double, int);

#define FLOATS(how, tag, type, acc, load, store)                         \
    REDUCTION(how, sum_##tag, type, acc, load, store, ADD, FACTOR_F)     \
    REDUCTION(how, product_##tag, type, acc, load, store, MUL, FACTOR_F) \
    REDUCTION(how, min_##tag, type, acc, load, store, FLESS, FACTOR_F)   \
    REDUCTION(how, max_##tag, type, acc, load, store, FMORE, FACTOR_F)

#define INTEGERS(tag, type)                                           \
    REDUCTION(, sum_##tag, type, type, SAME, SAME, ADD, FACTOR_I)     \
    REDUCTION(, product_##tag, type, type, SAME, SAME, MUL, FACTOR_I) \
    REDUCTION(, min_##tag, type, type, SAME, SAME, LESS, FACTOR_I)    \
    REDUCTION(, max_##tag, type, type, SAME, SAME, MORE, FACTOR_I)    \
    REDUCTION(, band_##tag, type, type, SAME, SAME, AND, FACTOR_I)    \
    REDUCTION(, bor_##tag, type, type, SAME, SAME, OR, FACTOR_I)      \
    REDUCTION(, bxor_##tag, type, type, SAME, SAME, XOR, FACTOR_I)

FLOATS(, f32, float, float, SAME, SAME)
FLOATS(, f64, double, double, SAME, SAME)
FLOATS(, f16, f16, float, from_f16, to_f16)
FLOATS(, bf16, bf16, float, from_bf16, to_bf16)
INTEGERS(u8, uint8_t)
INTEGERS(i8, int8_t)
INTEGERS(i16, int16_t)
INTEGERS(i32, int32_t)
INTEGERS(i64, int64_t)
INTEGERS(u16, uint16_t)
INTEGERS(u32, uint32_t)
INTEGERS(u64, uint64_t)

#define TRUTH(x) ((uint8_t)((x) != 0))
REDUCTION(, or_bool, uint8_t, uint8_t, TRUTH, SAME, OR, FACTOR_I)
REDUCTION(, and_bool, uint8_t, uint8_t, TRUTH, SAME, AND, FACTOR_I)
REDUCTION(, xor_bool, uint8_t, uint8_t, TRUTH, SAME, XOR, FACTOR_I)

#define ROW_F(tag) {sum_##tag, product_##tag, min_##tag, max_##tag, NULL, NULL, NULL}
#define ROW_I(tag) {sum_##tag, product_##tag, min_##tag, max_##tag, band_##tag, bor_##tag, bxor_##tag}

static reduction *const table[PHX_DTYPES][PHX_OPS] = {
    [PHX_U8] = ROW_I(u8),   [PHX_I8] = ROW_I(i8),   [PHX_I16] = ROW_I(i16), [PHX_I32] = ROW_I(i32),
    [PHX_I64] = ROW_I(i64), [PHX_F16] = ROW_F(f16), [PHX_BF16] = ROW_F(bf16), [PHX_F32] = ROW_F(f32),
    [PHX_F64] = ROW_F(f64), [PHX_U16] = ROW_I(u16), [PHX_U32] = ROW_I(u32), [PHX_U64] = ROW_I(u64),
    [PHX_BOOL] = {or_bool, and_bool, and_bool, or_bool, and_bool, or_bool, xor_bool},
};

/* AVX2 converts 16-bit floats twice as fast, with the same result. */
#if defined(__x86_64__)
FLOATS(__attribute__((target("avx2"))), wide_f16, f16, float, from_f16, to_f16)
FLOATS(__attribute__((target("avx2"))), wide_bf16, bf16, float, from_bf16, to_bf16)

static reduction *const wide[PHX_DTYPES][PHX_OPS] = {[PHX_F16] = ROW_F(wide_f16), [PHX_BF16] = ROW_F(wide_bf16)};

static reduction *chosen(int dtype, int op) { return wide[dtype][op] && __builtin_cpu_supports("avx2") ? wide[dtype][op] : table[dtype][op]; }
#else
static reduction *chosen(int dtype, int op) { return table[dtype][op]; }
#endif

static const size_t sizes[PHX_DTYPES] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 2, 4, 8};

size_t phx_itemsize(int dtype) { return dtype < 0 || dtype >= PHX_DTYPES ? 0 : sizes[dtype]; }

int phx_has_reduction(int dtype, int op) {
    return dtype >= 0 && dtype < PHX_DTYPES && op >= 0 && op < PHX_OPS && table[dtype][op] != NULL;
}

void phx_reduce(void *out, const void *const *in, int n, size_t count, int dtype, int op, double scale, int average) {
    chosen(dtype, op)(out, in, n, count, scale, average && dtype != PHX_BOOL);
}
