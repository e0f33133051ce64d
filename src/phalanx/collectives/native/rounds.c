/* Collectives, each of them some rounds of fill, meet, take. */
#define _GNU_SOURCE
#include "group.h"

#include <string.h>

#define FLAT (64u << 10)   /* bytes up to which every rank reduces everything by itself: one meeting */

static uint8_t *slot_of(const phx_group *g, int rank, uint32_t turn) {
    return g->slots + ((size_t)rank * 2 + (turn & 1)) * g->slot;
}

static struct notice *notice_of(const phx_group *g, int rank, uint32_t turn) { return &g->seats[rank].notice[turn & 1]; }

static size_t less(size_t a, size_t b) { return a < b ? a : b; }


/* Where rank `part` of all begins, of `count` elements. */
static size_t begins(const phx_group *g, size_t count, int part) {
    size_t each = count / (size_t)g->ranks, more = count % (size_t)g->ranks;
    return each * (size_t)part + less((size_t)part, more);
}

/* Every rank reduces everything. */
static int reduce_flat(phx_group *g, void *data, size_t count, int dtype, int op, double before, int average) {
    const void *inputs[256];
    uint32_t turn = ++g->turn;
    memcpy(slot_of(g, g->rank, turn), data, count * phx_itemsize(dtype));
    int result = phx_meet(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++) inputs[r] = slot_of(g, r, turn);
    phx_reduce(data, inputs, g->ranks, count, dtype, op, before, average);
    return PHX_OK;
}

/* Every rank reduces its part of what lies in the slots, in its own; then all take all parts. */
static int reduce_staged(phx_group *g, uint8_t *data, size_t count, int dtype, int op, double before, int average) {
    const void *inputs[256];
    size_t item = phx_itemsize(dtype), most = g->slot / item;
    for (size_t at = 0; at < count; at += most) {
        size_t some = less(count - at, most), from = begins(g, some, g->rank), to = begins(g, some, g->rank + 1);
        uint32_t turn = ++g->turn;
        memcpy(slot_of(g, g->rank, turn), data + at * item, some * item);
        int result = phx_meet(g);
        if (result != PHX_OK) return result;
        for (int r = 0; r < g->ranks; r++) inputs[r] = slot_of(g, r, turn) + from * item;
        phx_reduce(slot_of(g, g->rank, turn) + from * item, inputs, g->ranks, to - from, dtype, op, before, average);
        if ((result = phx_meet(g)) != PHX_OK) return result;
        for (int r = 0; r < g->ranks; r++) {
            size_t first = begins(g, some, r), last = begins(g, some, r + 1);
            memcpy(data + (at + first) * item, slot_of(g, r, turn) + first * item, (last - first) * item);
        }
    }
    return PHX_OK;
}

/* The same without slots: every rank reads its part from the memory of the others, and later theirs. */
static int reduce_direct(phx_group *g, uint8_t *data, size_t count, int dtype, int op, double before, int average) {
    const void *inputs[256];
    size_t item = phx_itemsize(dtype), most = PIECE / item;
    size_t from = begins(g, count, g->rank), to = begins(g, count, g->rank + 1);
    uint32_t turn = ++g->turn;
    notice_of(g, g->rank, turn)->address = (uint64_t)(uintptr_t)data;
    int result = phx_meet(g);
    if (result != PHX_OK) return result;
    uint64_t where[256];
    for (int r = 0; r < g->ranks; r++) where[r] = notice_of(g, r, turn)->address;
    for (size_t at = from; at < to; at += most) {
        size_t some = less(to - at, most);
        for (int r = 0; r < g->ranks; r++) {
            inputs[r] = r == g->rank ? data + at * item : g->scratch + (size_t)r * PIECE;
            if (r != g->rank && (result = phx_read(g, r, g->scratch + (size_t)r * PIECE, where[r] + at * item, some * item)))
                return result;
        }
        phx_reduce(data + at * item, inputs, g->ranks, some, dtype, op, before, average);
    }
    if ((result = phx_meet(g)) != PHX_OK) return result;
    for (int step = 1; step < g->ranks; step++) { /* each begins with another, so that not all read from one */
        int r = (g->rank + step) % g->ranks;
        size_t first = begins(g, count, r), last = begins(g, count, r + 1);
        if ((result = phx_read(g, r, data + first * item, where[r] + first * item, (last - first) * item))) return result;
    }
    return phx_meet(g); /* until all have read, the tensor is theirs too */
}

static int all_reduce(phx_group *g, void *data, size_t count, int dtype, int op, double before, int average) {
    size_t bytes = count * phx_itemsize(dtype);
    if (bytes <= FLAT && bytes <= g->slot) return reduce_flat(g, data, count, dtype, op, before, average);
    if (g->direct) return reduce_direct(g, data, count, dtype, op, before, average);
    return reduce_staged(g, data, count, dtype, op, before, average);
}

static int broadcast(phx_group *g, void *data, size_t bytes, int root) {
    for (size_t at = 0; at < bytes || at == 0; at += g->slot) {
        size_t some = less(bytes - at, g->slot);
        uint32_t turn = ++g->turn;
        if (g->rank == root) memcpy(slot_of(g, root, turn), (uint8_t *)data + at, some);
        int result = phx_meet(g);
        if (result != PHX_OK) return result;
        if (g->rank != root) memcpy((uint8_t *)data + at, slot_of(g, root, turn), some);
    }
    return PHX_OK;
}

static int all_gather(phx_group *g, const struct phx_part *out, const void *in, size_t bytes) {
    for (size_t at = 0; at < bytes || at == 0; at += g->slot) {
        size_t some = less(bytes - at, g->slot);
        uint32_t turn = ++g->turn;
        memcpy(slot_of(g, g->rank, turn), (const uint8_t *)in + at, some);
        int result = phx_meet(g);
        if (result != PHX_OK) return result;
        for (int r = 0; r < g->ranks; r++) memcpy((uint8_t *)out[r].at + at, slot_of(g, r, turn), some);
    }
    return PHX_OK;
}

void phx_said(phx_group *g, int rank, struct phx_said *said) { *said = notice_of(g, rank, g->turn)->said; }

const char *phx_wrong(const phx_group *g, const struct phx_call *c) {
    (void)g;
    return c->kind == PHX_BARRIER || c->outs ? NULL : "nothing to work on";
}

int phx_execute(phx_group *g, const struct phx_call *c) {
    switch (c->kind) {
    case PHX_ALL_REDUCE:
        return all_reduce(g, c->out->at, c->out->bytes / phx_itemsize(c->dtype), c->dtype, c->op, c->before, c->average);
    case PHX_BROADCAST: return broadcast(g, c->out->at, c->out->bytes, c->root);
    case PHX_ALL_GATHER: return all_gather(g, c->out, c->in->at, c->in->bytes);
    case PHX_BARRIER: return phx_meet(g);
    default: return PHX_FAILED;
    }
}
