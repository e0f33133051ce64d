/* What the collectives have in common: slots, and the opening of a call, in which ranks tell what they have called. */
#ifndef PHX_ROUNDS_H
#define PHX_ROUNDS_H

#include "group.h"

static inline uint8_t *slot_of(const phx_group *g, int rank, uint32_t turn) {
    return g->slots + ((size_t)rank * 2 + (turn & 1)) * g->slot;
}

static inline struct notice *notice_of(const phx_group *g, int rank, uint32_t turn) { return &g->seats[rank].notice[turn & 1]; }

static inline struct share *share_of(const phx_group *g, int rank, int other, uint32_t turn) {
    return &g->shares[((size_t)rank * 2 + (turn & 1)) * (size_t)g->ranks + (size_t)other];
}

static inline size_t less(size_t a, size_t b) { return a < b ? a : b; }

/* What this rank gives to another, and takes from it, by the table in phx.h; reductions in place are not of this kind. */
struct phx_part phx_gives(const phx_group *, const struct phx_call *, int to);
struct phx_part phx_takes(const phx_group *, const struct phx_call *, int from);

/* Whether all others get the same of a rank. */
int phx_alike(int kind);

/* The first meeting of a call, whose slots are filled already if `placed`. Ranks that have called different things end the
   group by it. Notices and shares are valid until the next meeting but one. */
int phx_open(phx_group *, const struct phx_call *, uint32_t turn, int placed);

/* What this rank gives lies in its slot, one part after the other: where it is small enough. Whether it does. */
int phx_place(phx_group *, const struct phx_call *, uint32_t turn);

/* Where a part of another lies then. */
const uint8_t *phx_placed(const phx_group *, const struct phx_call *, int from, uint32_t turn);

int phx_move(phx_group *, const struct phx_call *);           /* moves.c */
int phx_fold(phx_group *, const struct phx_call *);           /* folds.c: all_reduce, reduce */
int phx_fold_scatter(phx_group *, const struct phx_call *);

/* An all_reduce that was opened. -1: tensors are not all in one region, and nothing was done (regions.c). */
int phx_fold_mapped(phx_group *, const struct phx_call *, uint32_t turn);

#endif
