/* The start of a call: each rank publishes its call, and after a barrier each checks whether the calls match. */
#include "call.h"

#include <string.h>

#include "kernels.h"
#include "regions.h"

#define SMALL (256u << 10) /* bytes up to which two copies are cheaper than a read through the kernel and another barrier */

static const struct phx_part NOTHING = {NULL, 0};

struct phx_part phx_send_part(const phx_group *g, const struct phx_call *c, int to) {
    int root = g->rank == c->root;
    switch (c->kind) {
    case PHX_ALL_GATHER: return c->in[0];
    case PHX_GATHER: return to == c->root ? c->in[0] : NOTHING;
    case PHX_BROADCAST: return root && to != c->root ? c->out[0] : NOTHING;
    case PHX_SCATTER: return root ? c->in[to] : NOTHING;
    default: return c->in[to];
    }
}

struct phx_part phx_recv_part(const phx_group *g, const struct phx_call *c, int from) {
    int root = g->rank == c->root;
    switch (c->kind) {
    case PHX_GATHER: return root ? c->out[from] : NOTHING;
    case PHX_BROADCAST: return !root && from == c->root ? c->out[0] : NOTHING;
    case PHX_SCATTER: return from == c->root ? c->out[0] : NOTHING;
    case PHX_REDUCE_SCATTER: return c->out[0];
    default: return c->out[from];
    }
}

int phx_same_for_all(int kind) { return kind == PHX_ALL_GATHER || kind == PHX_GATHER || kind == PHX_BROADCAST; }

static int in_place(int kind) { return kind == PHX_ALL_REDUCE || kind == PHX_REDUCE || kind == PHX_BARRIER; }

static int reduces(int kind) { return kind == PHX_ALL_REDUCE || kind == PHX_REDUCE || kind == PHX_REDUCE_SCATTER; }

static int rooted(int kind) { return kind == PHX_REDUCE || kind == PHX_BROADCAST || kind == PHX_GATHER || kind == PHX_SCATTER; }

/* -- publish and compare calls */

/* The size that an error message reports. It is the same in all ranks if the call is in place. */
static uint64_t size_of(const phx_group *g, const struct phx_call *c) {
    uint64_t all = 0;
    if (c->kind == PHX_ALL_GATHER || c->kind == PHX_GATHER) return c->in[0].bytes;
    if (c->kind != PHX_ALL_TO_ALL && c->kind != PHX_REDUCE_SCATTER) return c->outs ? c->out[0].bytes : 0;
    for (int r = 0; r < g->ranks; r++) all += c->in[r].bytes;
    return all;
}

static void publish_call(phx_group *g, const struct phx_call *c, uint32_t turn, int in_slot) {
    *call_info_of(g, g->rank, turn) = (struct call_info){
        .address = in_place(c->kind) && c->outs ? (uint64_t)(uintptr_t)c->out[0].at : 0,
        .signature = {c->kind, c->kind == PHX_BARRIER ? 0 : c->dtype, reduces(c->kind) ? c->op : 0, rooted(c->kind) ? c->root : 0,
                 reduces(c->kind) && c->average, size_of(g, c), reduces(c->kind) ? c->scale : 1.0},
        .in_slot = (uint32_t)in_slot,
        .region = c->kind == PHX_ALL_REDUCE ? phx_region_of(g, c->out[0].at, c->out[0].bytes) : 0,
    };
    for (int r = 0; !in_place(c->kind) && r < g->ranks; r++) {
        struct phx_part send_bytes = phx_send_part(g, c, r), recv_bytes = phx_recv_part(g, c, r);
        *transfer_of(g, g->rank, r, turn) = (struct transfer){(uint64_t)(uintptr_t)send_bytes.at, send_bytes.bytes, recv_bytes.bytes};
    }
}

static int same(const struct call_info *a, const struct call_info *b) {
    const struct phx_signature *x = &a->signature, *y = &b->signature;
    return x->kind == y->kind && x->dtype == y->dtype && x->op == y->op && x->root == y->root && x->average == y->average &&
           !memcmp(&x->scale, &y->scale, sizeof x->scale) && (x->bytes == y->bytes || !(in_place(x->kind) || x->kind == PHX_BROADCAST));
}

/* Whether two ranks agree on the data that they exchange. */
static int sizes_match(const phx_group *g, int a, int b, uint32_t turn) {
    return transfer_of(g, a, b, turn)->send_bytes == transfer_of(g, b, a, turn)->recv_bytes && transfer_of(g, b, a, turn)->send_bytes == transfer_of(g, a, b, turn)->recv_bytes;
}

/* Whether all calls match. Each rank checks enough that either all ranks detect a mismatch or none does. */
static int calls_match(const phx_group *g, const struct phx_call *c, uint32_t turn) {
    const struct call_info *own = call_info_of(g, g->rank, turn);
    for (int r = 0; r < g->ranks; r++)
        if (r != g->rank && !same(own, call_info_of(g, r, turn))) return 0;
    if (in_place(c->kind)) return 1;
    int all = !rooted(c->kind);
    for (int r = 0; r < g->ranks; r++) {
        if (!sizes_match(g, g->rank, r, turn) || (rooted(c->kind) && !sizes_match(g, c->root, r, turn))) return 0;
        for (int other = r; all && other < g->ranks; other++)
            if (!sizes_match(g, r, other, turn)) return 0;
    }
    return 1;
}

void phx_signature(phx_group *g, int rank, struct phx_signature *signature) { *signature = call_info_of(g, rank, g->turn)->signature; }

int phx_open_call(phx_group *g, const struct phx_call *c, uint32_t turn, int in_slot) {
    publish_call(g, c, turn, in_slot);
    int result = phx_barrier(g);
    if (result != PHX_OK) return result;
    return calls_match(g, c, turn) ? PHX_OK : phx_fail(g, PHX_MISMATCH);
}

/* -- parts in slots */

int phx_fill_slot(phx_group *g, const struct phx_call *c, uint32_t turn) {
    size_t all = 0, most = g->direct ? min_size(SMALL, g->slot) : g->slot;
    for (int r = 0; r < g->ranks; r++) {
        size_t bytes = phx_send_part(g, c, r).bytes;
        if (!phx_same_for_all(c->kind)) all += bytes;
        else if (r != g->rank && bytes) all = bytes;
    }
    if (all > most) return 0;
    uint8_t *at = slot_of(g, g->rank, turn);
    for (int r = 0; r < g->ranks; r++) {
        struct phx_part part = phx_send_part(g, c, r);
        if (r != g->rank && part.bytes) {
            memcpy(at, part.at, part.bytes);
            if (phx_same_for_all(c->kind)) break;
        }
        at += phx_same_for_all(c->kind) ? 0 : part.bytes;
    }
    phx_fault(g);
    return 1;
}

const uint8_t *phx_slot_part(const phx_group *g, const struct phx_call *c, int from, uint32_t turn) {
    const uint8_t *at = slot_of(g, from, turn);
    for (int r = 0; !phx_same_for_all(c->kind) && r < g->rank; r++) at += transfer_of(g, from, r, turn)->send_bytes;
    return at;
}

/* -- validation */

const char *phx_validate(const phx_group *g, const struct phx_call *c) {
    static const struct { char in, out, in_root, out_root; } counts[] = { /* 'n': one per rank */
        [PHX_ALL_REDUCE] = {0, 1, 0, 1}, [PHX_REDUCE] = {0, 1, 0, 1}, [PHX_BROADCAST] = {0, 1, 0, 1},
        [PHX_ALL_GATHER] = {1, 'n', 1, 'n'}, [PHX_GATHER] = {1, 0, 1, 'n'}, [PHX_SCATTER] = {0, 1, 'n', 1},
        [PHX_REDUCE_SCATTER] = {'n', 1, 'n', 1}, [PHX_ALL_TO_ALL] = {'n', 'n', 'n', 'n'}, [PHX_BARRIER] = {0, 0, 0, 0},
    };
    if (c->kind < 0 || c->kind > PHX_BARRIER) return "unknown collective";
    if (c->root < 0 || c->root >= g->ranks) return "the root is not a rank of this group";
    int root = c->root == g->rank, in = root ? counts[c->kind].in_root : counts[c->kind].in;
    int out = root ? counts[c->kind].out_root : counts[c->kind].out;
    if (c->ins != (in == 'n' ? g->ranks : in)) return "wrong number of input tensors";
    if (c->outs != (out == 'n' ? g->ranks : out)) return "wrong number of output tensors";
    if (!reduces(c->kind)) return NULL;
    if (!phx_has_reduction(c->dtype, c->op)) return "unsupported reduction of this type";
    for (int i = 0; i < c->ins; i++)
        if (c->in[i].bytes % phx_itemsize(c->dtype)) return "size is not a multiple of the element size";
    if (c->out[0].bytes % phx_itemsize(c->dtype)) return "size is not a multiple of the element size";
    return NULL;
}
