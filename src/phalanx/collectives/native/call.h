/* Common parts of all collectives: slots, and the start of a call, in which ranks publish and compare their calls. */
#ifndef PHX_CALL_H
#define PHX_CALL_H

#include "group.h"

static inline uint8_t *slot_of(const phx_group *g, int rank, uint32_t turn) {
    return g->slots + ((size_t)rank * 2 + (turn & 1)) * g->slot;
}

static inline struct call_info *call_info_of(const phx_group *g, int rank, uint32_t turn) { return &g->members[rank].call_info[turn & 1]; }

static inline struct transfer *transfer_of(const phx_group *g, int rank, int other, uint32_t turn) {
    return &g->transfers[((size_t)rank * 2 + (turn & 1)) * (size_t)g->ranks + (size_t)other];
}

/* The part that this rank sends to another, and receives from it, by the table in phx.h. Not for in-place reductions. */
struct phx_part phx_send_part(const phx_group *, const struct phx_call *, int to);
struct phx_part phx_recv_part(const phx_group *, const struct phx_call *, int from);

/* Whether a rank sends the same part to all others. */
int phx_same_for_all(int kind);

/* Publish this rank's call, wait for the others, and fail the group if the calls do not match. `in_slot`: the slot
   already contains the data. Call infos and transfers stay valid until the barrier after the next. */
int phx_open_call(phx_group *, const struct phx_call *, uint32_t turn, int in_slot);

/* Copy the parts that this rank sends into its slot, one after the other, if they are small enough. Return whether they were. */
int phx_fill_slot(phx_group *, const struct phx_call *, uint32_t turn);

/* The part for this rank in the slot of another one. */
const uint8_t *phx_slot_part(const phx_group *, const struct phx_call *, int from, uint32_t turn);

#endif
