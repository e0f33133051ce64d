/* Collectives that reduce. Ranks share the work: each has a part of the tensor, which it reduces for all of them. */
#include "rounds.h"

#include <string.h>

#define FLAT (128u << 10) /* bytes of all ranks up to which each reduces everything by itself: one meeting */
#define SHARE (64u << 10) /* bytes of each rank in a piece of what is larger */

static void reduce(const struct phx_call *c, void *out, const void *const *inputs, int ranks, size_t count) {
    phx_reduce(out, inputs, ranks, count, c->dtype, c->op, c->before, c->average);
}

/* Where the part of a rank begins, of `count` elements. */
static size_t begins(const phx_group *g, size_t count, int part) {
    size_t each = count / (size_t)g->ranks, more = count % (size_t)g->ranks;
    return each * (size_t)part + less((size_t)part, more);
}

/* Some elements of all ranks, from their memory: `at` says where in each. The result may be where the own ones are. */
static int reduce_from_memory(phx_group *g, const struct phx_call *c, uint8_t *out, const uint64_t *at, size_t count) {
    const void *inputs[PHX_MOST];
    size_t item = phx_itemsize(c->dtype), most = g->piece / item;
    for (size_t done = 0; done < count; done += most) {
        size_t some = less(count - done, most);
        for (int r = 0; r < g->ranks; r++) {
            uint8_t *copy = g->scratch + (size_t)r * g->piece;
            uint64_t from = at[r] + done * item;
            int result = r == g->rank ? PHX_OK : phx_read(g, r, copy, from, some * item);
            if (result != PHX_OK) return result;
            inputs[r] = r == g->rank ? (const void *)(uintptr_t)from : copy;
        }
        reduce(c, out + done * item, inputs, g->ranks, some);
    }
    return PHX_OK;
}

/* -- all_reduce, and reduce, which differs from it only in who takes the result */

/* Parts that have met their reduction lie at the beginning of slots. */
static void take_parts(phx_group *g, const struct phx_call *c, size_t at, size_t count, uint32_t turn) {
    size_t item = phx_itemsize(c->dtype);
    uint8_t *data = c->out[0].at;
    for (int step = 0; step < g->ranks; step++) {
        int r = (g->rank + step) % g->ranks;
        size_t first = begins(g, count, r), last = begins(g, count, r + 1);
        if (last > first) memcpy(data + (at + first) * item, slot_of(g, r, turn), (last - first) * item);
    }
}

/* Two ranks, and more than fits into slots: the result stays where it is, and the other reads it there. That is a copy less, and for more ranks
   it does not pay. */
static int fold_in_place(phx_group *g, const struct phx_call *c, uint32_t opened) {
    size_t item = phx_itemsize(c->dtype), count = c->out[0].bytes / item;
    size_t from = begins(g, count, g->rank), to = begins(g, count, g->rank + 1);
    uint64_t at[2], other = notice_of(g, !g->rank, opened)->address;
    uint8_t *data = c->out[0].at;
    for (int r = 0; r < 2; r++) at[r] = notice_of(g, r, opened)->address + from * item;
    int result = reduce_from_memory(g, c, data + from * item, at, to - from);
    if (result == PHX_OK) result = phx_meet(g);
    if (result == PHX_OK && g->rank == 0) result = phx_read(g, 1, data + to * item, other + to * item, (count - to) * item);
    else if (result == PHX_OK) result = phx_read(g, 0, data, other, from * item);
    return result == PHX_OK ? phx_meet(g) : result; /* until both have read, the memory is the other's too */
}

/* Through slots: one for what is given, and the other for the results of the same. In pieces that stay in the caches, so
   that memory is gone through once: for more than two ranks that is faster than to read each other's. */
static int fold_staged(phx_group *g, const struct phx_call *c, int takes) {
    const void *inputs[PHX_MOST];
    size_t item = phx_itemsize(c->dtype), count = c->out[0].bytes / item, most = less(g->slot, SHARE * (size_t)g->ranks) / item;
    uint8_t *data = c->out[0].at;
    for (size_t done = 0; done < count; done += most) {
        size_t some = less(count - done, most), from = begins(g, some, g->rank), to = begins(g, some, g->rank + 1);
        uint32_t given = ++g->turn, reduced = ++g->turn;
        memcpy(slot_of(g, g->rank, given), data + done * item, some * item);
        phx_fault(g);
        int result = phx_meet(g);
        if (result != PHX_OK) return result;
        for (int r = 0; r < g->ranks; r++) inputs[r] = slot_of(g, r, given) + from * item;
        reduce(c, slot_of(g, g->rank, reduced), inputs, g->ranks, to - from);
        phx_fault(g);
        if ((result = phx_meet(g)) != PHX_OK) return result;
        if (takes) take_parts(g, c, done, some, reduced);
    }
    return PHX_OK;
}

int phx_fold(phx_group *g, const struct phx_call *c) {
    size_t bytes = c->out[0].bytes, item = phx_itemsize(c->dtype);
    int flat = bytes <= less(FLAT / (size_t)g->ranks, g->slot), takes = c->kind == PHX_ALL_REDUCE || g->rank == c->root;
    uint32_t turn = ++g->turn;
    if (flat && bytes) memcpy(slot_of(g, g->rank, turn), c->out[0].at, bytes);
    phx_fault(g);
    int result = phx_open(g, c, turn, flat);
    if (result != PHX_OK) return result;
    if (!flat && (result = phx_fold_mapped(g, c, turn)) >= 0) return result;
    if (!flat && g->direct && g->ranks == 2 && c->kind == PHX_ALL_REDUCE && bytes > g->slot + g->slot / 2) return fold_in_place(g, c, turn);
    if (!flat) return fold_staged(g, c, takes);
    if (!takes || !bytes) return PHX_OK;
    const void *inputs[PHX_MOST];
    for (int r = 0; r < g->ranks; r++) inputs[r] = r == g->rank ? c->out[0].at : slot_of(g, r, turn);
    reduce(c, c->out[0].at, inputs, g->ranks, bytes / item);
    return PHX_OK;
}

/* -- reduce_scatter */

static int scatter_staged(phx_group *g, const struct phx_call *c) {
    const void *inputs[PHX_MOST];
    size_t share = g->slot / (size_t)g->ranks & ~(size_t)(LINE - 1), most = 0, item = phx_itemsize(c->dtype);
    for (int r = 0; r < g->ranks; r++)
        if (c->in[r].bytes > most) most = c->in[r].bytes;
    for (size_t done = 0; done < most; done += share) {
        uint32_t turn = ++g->turn;
        for (int r = 0; r < g->ranks; r++)
            if (c->in[r].bytes > done && r != g->rank)
                memcpy(slot_of(g, g->rank, turn) + (size_t)r * share, (uint8_t *)c->in[r].at + done, less(c->in[r].bytes - done, share));
        phx_fault(g);
        int result = phx_meet(g);
        if (result != PHX_OK) return result;
        if (c->out[0].bytes <= done) continue;
        for (int r = 0; r < g->ranks; r++) inputs[r] = slot_of(g, r, turn) + (size_t)g->rank * share;
        inputs[g->rank] = (uint8_t *)c->in[g->rank].at + done;
        reduce(c, (uint8_t *)c->out[0].at + done, inputs, g->ranks, less(c->out[0].bytes - done, share) / item);
    }
    return PHX_OK;
}

int phx_fold_scatter(phx_group *g, const struct phx_call *c) {
    size_t count = c->out[0].bytes / phx_itemsize(c->dtype);
    uint32_t turn = ++g->turn;
    int placed = phx_place(g, c, turn), result = phx_open(g, c, turn, placed); /* the same sizes, so placed by all or none */
    if (result != PHX_OK) return result;
    if (placed) {
        const void *inputs[PHX_MOST];
        for (int r = 0; r < g->ranks; r++) inputs[r] = r == g->rank ? c->in[r].at : phx_placed(g, c, r, turn);
        if (count) reduce(c, c->out[0].at, inputs, g->ranks, count);
        return PHX_OK;
    }
    if (!g->direct) return scatter_staged(g, c);
    uint64_t at[PHX_MOST];
    for (int r = 0; r < g->ranks; r++) at[r] = share_of(g, r, g->rank, turn)->address;
    result = reduce_from_memory(g, c, c->out[0].at, at, count);
    return result == PHX_OK ? phx_meet(g) : result;
}
