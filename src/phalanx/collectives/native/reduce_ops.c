/* Collectives that reduce. Ranks share the work: each reduces one part of the tensor for all. */
#include <string.h>

#include "call.h"
#include "kernels.h"
#include "ops.h"
#include "regions.h"

#define ONE_ROUND_BYTES (128u << 10) /* total bytes up to which every rank reduces everything itself: one barrier */
#define REGION_PIECE (32u << 10) /* bytes that are reduced at a time in a region: inputs and result stay in the L1 cache */
#define PIECE_SHARE (64u << 10) /* bytes per rank in each piece of a larger tensor */

static void reduce(const struct phx_call *c, void *out, const void *const *inputs, int ranks, size_t count) {
    phx_reduce(out, inputs, ranks, count, c->dtype, c->op, c->scale, c->average);
}

/* First element of a rank's part of `count` elements. */
static size_t part_begin(const phx_group *g, size_t count, int part) {
    size_t each = count / (size_t)g->ranks, more = count % (size_t)g->ranks;
    return each * (size_t)part + min_size((size_t)part, more);
}

/* Reduce elements of all ranks, read from their memory at `at`. `out` may be this rank's own input. */
static int reduce_from_memory(phx_group *g, const struct phx_call *c, uint8_t *out, const uint64_t *at, size_t count) {
    const void *inputs[PHX_MAX_RANKS];
    size_t item = phx_itemsize(c->dtype), most = g->piece / item;
    for (size_t done = 0; done < count; done += most) {
        size_t some = min_size(count - done, most);
        for (int r = 0; r < g->ranks; r++) {
            uint8_t *copy = g->scratch + (size_t)r * g->piece;
            uint64_t from = at[r] + done * item;
            int result = r == g->rank ? PHX_OK : phx_read_or_fail(g, r, copy, from, some * item);
            if (result != PHX_OK) return result;
            inputs[r] = r == g->rank ? (const void *)(uintptr_t)from : copy;
        }
        reduce(c, out + done * item, inputs, g->ranks, some);
    }
    return PHX_OK;
}

/* -- all_reduce and reduce, which differ only in which ranks need the result */

/* Copy the reduced parts, which are at the beginning of each slot. */
static void gather_results(phx_group *g, const struct phx_call *c, size_t at, size_t count, uint32_t turn) {
    size_t item = phx_itemsize(c->dtype);
    uint8_t *data = c->out[0].at;
    for (int step = 0; step < g->ranks; step++) {
        int r = (g->rank + step) % g->ranks;
        size_t first = part_begin(g, count, r), last = part_begin(g, count, r + 1);
        if (last > first) memcpy(data + (at + first) * item, slot_of(g, r, turn), (last - first) * item);
    }
}

/* For two ranks and tensors larger than slots: each leaves its result in place and the other reads it there, which saves
   a copy. Not faster for more ranks. */
static int all_reduce_in_place(phx_group *g, const struct phx_call *c, uint32_t opened) {
    size_t item = phx_itemsize(c->dtype), count = c->out[0].bytes / item;
    size_t from = part_begin(g, count, g->rank), to = part_begin(g, count, g->rank + 1);
    uint64_t at[2], other = call_info_of(g, !g->rank, opened)->address;
    uint8_t *data = c->out[0].at;
    for (int r = 0; r < 2; r++) at[r] = call_info_of(g, r, opened)->address + from * item;
    int result = reduce_from_memory(g, c, data + from * item, at, to - from);
    if (result == PHX_OK) result = phx_barrier(g);
    if (result == PHX_OK && g->rank == 0) result = phx_read_or_fail(g, 1, data + to * item, other + to * item, (count - to) * item);
    else if (result == PHX_OK) result = phx_read_or_fail(g, 0, data, other, from * item);
    return result == PHX_OK ? phx_barrier(g) : result; /* a rank must not reuse its memory before the other has read it */
}

/* Through slots: one for the inputs and the other for the results. The pieces stay in the caches, so main memory is read
   only once. For more than two ranks this is faster than reading peer memory. */
static int reduce_staged(phx_group *g, const struct phx_call *c, int wants_result) {
    const void *inputs[PHX_MAX_RANKS];
    size_t item = phx_itemsize(c->dtype), count = c->out[0].bytes / item, most = min_size(g->slot, PIECE_SHARE * (size_t)g->ranks) / item;
    uint8_t *data = c->out[0].at;
    for (size_t done = 0; done < count; done += most) {
        size_t some = min_size(count - done, most), from = part_begin(g, some, g->rank), to = part_begin(g, some, g->rank + 1);
        uint32_t given = ++g->turn, reduced = ++g->turn;
        memcpy(slot_of(g, g->rank, given), data + done * item, some * item);
        phx_fault(g);
        int result = phx_barrier(g);
        if (result != PHX_OK) return result;
        for (int r = 0; r < g->ranks; r++) inputs[r] = slot_of(g, r, given) + from * item;
        reduce(c, slot_of(g, g->rank, reduced), inputs, g->ranks, to - from);
        phx_fault(g);
        if ((result = phx_barrier(g)) != PHX_OK) return result;
        if (wants_result) gather_results(g, c, done, some, reduced);
    }
    return PHX_OK;
}

/* The number of the region that contains the tensors of all ranks; 0: none. All ranks get the same answer. */
static uint32_t common_region(const phx_group *g, uint32_t turn) {
    uint32_t number = call_info_of(g, 0, turn)->region;
    for (int r = 1; r < g->ranks; r++)
        if (call_info_of(g, r, turn)->region != number) return 0;
    return number;
}

/* An all_reduce of tensors that are all in one region: each rank reduces its part of all tensors and writes the result to
   all of them. Every byte is read once and written once, by one rank. */
static int reduce_mapped(phx_group *g, const struct phx_call *c, uint32_t turn, uint32_t region) {
    uint64_t remote[PHX_MAX_RANKS];
    uint8_t *at[PHX_MAX_RANKS];
    size_t item = phx_itemsize(c->dtype), count = c->out[0].bytes / item, most = min_size(g->piece, REGION_PIECE) / item;
    for (int r = 0; r < g->ranks; r++) remote[r] = call_info_of(g, r, turn)->address;
    if (phx_region_find(g, region, remote, c->out[0].bytes, at)) return phx_fail(g, PHX_FAILED);
    size_t from = part_begin(g, count, g->rank), to = part_begin(g, count, g->rank + 1);
    for (size_t i = from; i < to; i += most) {
        const void *inputs[PHX_MAX_RANKS];
        size_t some = min_size(to - i, most);
        for (int r = 0; r < g->ranks; r++) inputs[r] = at[r] + i * item;
        phx_reduce(g->scratch, inputs, g->ranks, some, c->dtype, c->op, c->scale, c->average);
        for (int r = 0; r < g->ranks; r++) memcpy(at[r] + i * item, g->scratch, some * item);
        phx_fault(g);
    }
    return phx_barrier(g);
}

int phx_op_reduce(phx_group *g, const struct phx_call *c) {
    size_t bytes = c->out[0].bytes, item = phx_itemsize(c->dtype);
    int one_round = bytes <= min_size(ONE_ROUND_BYTES / (size_t)g->ranks, g->slot), wants_result = c->kind == PHX_ALL_REDUCE || g->rank == c->root;
    uint32_t turn = ++g->turn;
    if (one_round && bytes) memcpy(slot_of(g, g->rank, turn), c->out[0].at, bytes);
    phx_fault(g);
    int result = phx_open_call(g, c, turn, one_round);
    if (result != PHX_OK) return result;
    uint32_t region = one_round ? 0 : common_region(g, turn);
    if (region) return reduce_mapped(g, c, turn, region);
    if (!one_round && g->direct && g->ranks == 2 && c->kind == PHX_ALL_REDUCE && bytes > g->slot + g->slot / 2) return all_reduce_in_place(g, c, turn);
    if (!one_round) return reduce_staged(g, c, wants_result);
    if (!wants_result || !bytes) return PHX_OK;
    const void *inputs[PHX_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++) inputs[r] = r == g->rank ? c->out[0].at : slot_of(g, r, turn);
    reduce(c, c->out[0].at, inputs, g->ranks, bytes / item);
    return PHX_OK;
}

/* -- reduce_scatter */

static int reduce_scatter_staged(phx_group *g, const struct phx_call *c) {
    const void *inputs[PHX_MAX_RANKS];
    size_t share = g->slot / (size_t)g->ranks & ~(size_t)(CACHE_LINE - 1), most = 0, item = phx_itemsize(c->dtype);
    for (int r = 0; r < g->ranks; r++)
        if (c->in[r].bytes > most) most = c->in[r].bytes;
    for (size_t done = 0; done < most; done += share) {
        uint32_t turn = ++g->turn;
        for (int r = 0; r < g->ranks; r++)
            if (c->in[r].bytes > done && r != g->rank)
                memcpy(slot_of(g, g->rank, turn) + (size_t)r * share, (uint8_t *)c->in[r].at + done, min_size(c->in[r].bytes - done, share));
        phx_fault(g);
        int result = phx_barrier(g);
        if (result != PHX_OK) return result;
        if (c->out[0].bytes <= done) continue;
        for (int r = 0; r < g->ranks; r++) inputs[r] = slot_of(g, r, turn) + (size_t)g->rank * share;
        inputs[g->rank] = (uint8_t *)c->in[g->rank].at + done;
        reduce(c, (uint8_t *)c->out[0].at + done, inputs, g->ranks, min_size(c->out[0].bytes - done, share) / item);
    }
    return PHX_OK;
}

int phx_op_reduce_scatter(phx_group *g, const struct phx_call *c) {
    size_t count = c->out[0].bytes / phx_itemsize(c->dtype);
    uint32_t turn = ++g->turn;
    int in_slot = phx_fill_slot(g, c, turn), result = phx_open_call(g, c, turn, in_slot); /* sizes are equal, so all ranks fill their slots or none does */
    if (result != PHX_OK) return result;
    if (in_slot) {
        const void *inputs[PHX_MAX_RANKS];
        for (int r = 0; r < g->ranks; r++) inputs[r] = r == g->rank ? c->in[r].at : phx_slot_part(g, c, r, turn);
        if (count) reduce(c, c->out[0].at, inputs, g->ranks, count);
        return PHX_OK;
    }
    if (!g->direct) return reduce_scatter_staged(g, c);
    uint64_t at[PHX_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++) at[r] = transfer_of(g, r, g->rank, turn)->address;
    result = reduce_from_memory(g, c, c->out[0].at, at, count);
    return result == PHX_OK ? phx_barrier(g) : result;
}
