/* How a call begins: each rank says what it has called, all meet, and each sees whether that fits together. */
#include "rounds.h"

#include <string.h>

#define SMALL (256u << 10) /* bytes that are rather copied twice than read by way of the kernel, with a meeting more */

static const struct phx_part NOTHING = {NULL, 0};

struct phx_part phx_gives(const phx_group *g, const struct phx_call *c, int to) {
    int root = g->rank == c->root;
    switch (c->kind) {
    case PHX_ALL_GATHER: return c->in[0];
    case PHX_GATHER: return to == c->root ? c->in[0] : NOTHING;
    case PHX_BROADCAST: return root && to != c->root ? c->out[0] : NOTHING;
    case PHX_SCATTER: return root ? c->in[to] : NOTHING;
    default: return c->in[to];
    }
}

struct phx_part phx_takes(const phx_group *g, const struct phx_call *c, int from) {
    int root = g->rank == c->root;
    switch (c->kind) {
    case PHX_GATHER: return root ? c->out[from] : NOTHING;
    case PHX_BROADCAST: return !root && from == c->root ? c->out[0] : NOTHING;
    case PHX_SCATTER: return from == c->root ? c->out[0] : NOTHING;
    case PHX_REDUCE_SCATTER: return c->out[0];
    default: return c->out[from];
    }
}

int phx_alike(int kind) { return kind == PHX_ALL_GATHER || kind == PHX_GATHER || kind == PHX_BROADCAST; }

static int in_place(int kind) { return kind == PHX_ALL_REDUCE || kind == PHX_REDUCE || kind == PHX_BARRIER; }

static int reduces(int kind) { return kind == PHX_ALL_REDUCE || kind == PHX_REDUCE || kind == PHX_REDUCE_SCATTER; }

static int rooted(int kind) { return kind == PHX_REDUCE || kind == PHX_BROADCAST || kind == PHX_GATHER || kind == PHX_SCATTER; }

/* -- what is said of a call */

/* Bytes that a message speaks of; of those that are in place they are the same everywhere. */
static uint64_t size_of(const phx_group *g, const struct phx_call *c) {
    uint64_t all = 0;
    if (c->kind == PHX_ALL_GATHER || c->kind == PHX_GATHER) return c->in[0].bytes;
    if (c->kind != PHX_ALL_TO_ALL && c->kind != PHX_REDUCE_SCATTER) return c->outs ? c->out[0].bytes : 0;
    for (int r = 0; r < g->ranks; r++) all += c->in[r].bytes;
    return all;
}

static void tell(phx_group *g, const struct phx_call *c, uint32_t turn, int placed) {
    *notice_of(g, g->rank, turn) = (struct notice){
        .address = in_place(c->kind) && c->outs ? (uint64_t)(uintptr_t)c->out[0].at : 0,
        .said = {c->kind, c->kind == PHX_BARRIER ? 0 : c->dtype, reduces(c->kind) ? c->op : 0, rooted(c->kind) ? c->root : 0,
                 reduces(c->kind) && c->average, size_of(g, c), reduces(c->kind) ? c->before : 1.0},
        .placed = (uint32_t)placed,
        .region = c->kind == PHX_ALL_REDUCE ? phx_region_of(g, c->out[0].at, c->out[0].bytes) : 0,
    };
    for (int r = 0; !in_place(c->kind) && r < g->ranks; r++) {
        struct phx_part gives = phx_gives(g, c, r), takes = phx_takes(g, c, r);
        *share_of(g, g->rank, r, turn) = (struct share){(uint64_t)(uintptr_t)gives.at, gives.bytes, takes.bytes};
    }
}

static int same(const struct notice *a, const struct notice *b) {
    const struct phx_said *x = &a->said, *y = &b->said;
    return x->kind == y->kind && x->dtype == y->dtype && x->op == y->op && x->root == y->root && x->average == y->average &&
           !memcmp(&x->before, &y->before, sizeof x->before) && (x->bytes == y->bytes || !(in_place(x->kind) || x->kind == PHX_BROADCAST));
}

/* Between two ranks: what one gives is what the other takes. */
static int fits(const phx_group *g, int a, int b, uint32_t turn) {
    return share_of(g, a, b, turn)->gives == share_of(g, b, a, turn)->takes && share_of(g, b, a, turn)->gives == share_of(g, a, b, turn)->takes;
}

/* Everybody looks at enough of it that all see that something is wrong, or nobody. */
static int agreed(const phx_group *g, const struct phx_call *c, uint32_t turn) {
    const struct notice *own = notice_of(g, g->rank, turn);
    for (int r = 0; r < g->ranks; r++)
        if (r != g->rank && !same(own, notice_of(g, r, turn))) return 0;
    if (in_place(c->kind)) return 1;
    int all = !rooted(c->kind);
    for (int r = 0; r < g->ranks; r++) {
        if (!fits(g, g->rank, r, turn) || (rooted(c->kind) && !fits(g, c->root, r, turn))) return 0;
        for (int other = r; all && other < g->ranks; other++)
            if (!fits(g, r, other, turn)) return 0;
    }
    return 1;
}

void phx_said(phx_group *g, int rank, struct phx_said *said) { *said = notice_of(g, rank, g->turn)->said; }

int phx_open(phx_group *g, const struct phx_call *c, uint32_t turn, int placed) {
    tell(g, c, turn, placed);
    int result = phx_meet(g);
    if (result != PHX_OK) return result;
    return agreed(g, c, turn) ? PHX_OK : phx_give_up(g, PHX_MISMATCH);
}

/* -- parts in slots */

int phx_place(phx_group *g, const struct phx_call *c, uint32_t turn) {
    size_t all = 0, most = g->direct ? less(SMALL, g->slot) : g->slot;
    for (int r = 0; r < g->ranks; r++) {
        size_t bytes = phx_gives(g, c, r).bytes;
        if (!phx_alike(c->kind)) all += bytes;
        else if (r != g->rank && bytes) all = bytes;
    }
    if (all > most) return 0;
    uint8_t *at = slot_of(g, g->rank, turn);
    for (int r = 0; r < g->ranks; r++) {
        struct phx_part part = phx_gives(g, c, r);
        if (r != g->rank && part.bytes) {
            memcpy(at, part.at, part.bytes);
            if (phx_alike(c->kind)) break;
        }
        at += phx_alike(c->kind) ? 0 : part.bytes;
    }
    phx_fault(g);
    return 1;
}

const uint8_t *phx_placed(const phx_group *g, const struct phx_call *c, int from, uint32_t turn) {
    const uint8_t *at = slot_of(g, from, turn);
    for (int r = 0; !phx_alike(c->kind) && r < g->rank; r++) at += share_of(g, from, r, turn)->gives;
    return at;
}

/* -- any call */

const char *phx_wrong(const phx_group *g, const struct phx_call *c) {
    static const struct { char in, out, in_root, out_root; } counts[] = { /* 'n': one for each rank */
        [PHX_ALL_REDUCE] = {0, 1, 0, 1}, [PHX_REDUCE] = {0, 1, 0, 1}, [PHX_BROADCAST] = {0, 1, 0, 1},
        [PHX_ALL_GATHER] = {1, 'n', 1, 'n'}, [PHX_GATHER] = {1, 0, 1, 'n'}, [PHX_SCATTER] = {0, 1, 'n', 1},
        [PHX_REDUCE_SCATTER] = {'n', 1, 'n', 1}, [PHX_ALL_TO_ALL] = {'n', 'n', 'n', 'n'}, [PHX_BARRIER] = {0, 0, 0, 0},
    };
    if (c->kind < 0 || c->kind > PHX_BARRIER) return "there is no such collective";
    if (c->root < 0 || c->root >= g->ranks) return "the root is no rank of this group";
    int root = c->root == g->rank, in = root ? counts[c->kind].in_root : counts[c->kind].in;
    int out = root ? counts[c->kind].out_root : counts[c->kind].out;
    if (c->ins != (in == 'n' ? g->ranks : in)) return "too few or too many tensors are given";
    if (c->outs != (out == 'n' ? g->ranks : out)) return "too few or too many tensors are there for the result";
    if (!reduces(c->kind)) return NULL;
    if (!phx_reduces(c->dtype, c->op)) return "there is no such reduction of this type";
    for (int i = 0; i < c->ins; i++)
        if (c->in[i].bytes % phx_itemsize(c->dtype)) return "part of an element";
    if (c->out[0].bytes % phx_itemsize(c->dtype)) return "part of an element";
    return NULL;
}

int phx_execute(phx_group *g, const struct phx_call *c) {
    switch (c->kind) {
    case PHX_BARRIER: return phx_open(g, c, ++g->turn, 1);
    case PHX_ALL_REDUCE:
    case PHX_REDUCE: return phx_fold(g, c);
    case PHX_REDUCE_SCATTER: return phx_fold_scatter(g, c);
    default: return phx_move(g, c);
    }
}
