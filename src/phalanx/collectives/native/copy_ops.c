/* Collectives that copy data unchanged: from slots, from peer memory, or through slots in pieces. */
#include <string.h>

#include "call.h"
#include "ops.h"

/* Copy in pieces, for parts that are larger than slots and cannot be read directly. `waits`: the ranks that send such parts. */
static int through_slots(phx_group *g, const struct phx_call *c, uint32_t opened, const uint8_t *waits) {
    int same = phx_same_for_all(c->kind);
    size_t share = same ? g->slot : g->slot / (size_t)g->ranks & ~(size_t)(CACHE_LINE - 1), most = 0; /* each receiver has a share of the slot */
    for (int s = 0; s < g->ranks; s++)
        for (int r = 0; waits[s] && r < g->ranks; r++)
            if (r != s && transfer_of(g, s, r, opened)->send_bytes > most) most = transfer_of(g, s, r, opened)->send_bytes;
    for (size_t done = 0; done < most; done += share) {
        uint32_t turn = ++g->turn;
        for (int r = 0; waits[g->rank] && r < g->ranks; r++) {
            struct phx_part part = r == g->rank ? (struct phx_part){NULL, 0} : phx_send_part(g, c, r);
            if (part.bytes <= done) continue;
            memcpy(slot_of(g, g->rank, turn) + (same ? 0 : (size_t)r * share), (uint8_t *)part.at + done, min_size(part.bytes - done, share));
            if (same) break;
        }
        phx_fault(g);
        int result = phx_barrier(g);
        if (result != PHX_OK) return result;
        for (int s = 0; s < g->ranks; s++) {
            struct phx_part part = s == g->rank || !waits[s] ? (struct phx_part){NULL, 0} : phx_recv_part(g, c, s);
            if (part.bytes <= done) continue;
            memcpy((uint8_t *)part.at + done, slot_of(g, s, turn) + (same ? 0 : (size_t)g->rank * share), min_size(part.bytes - done, share));
        }
    }
    return PHX_OK;
}

static int from_memory(phx_group *g, const struct phx_call *c, uint32_t opened, const uint8_t *waits) {
    for (int step = 1; step < g->ranks; step++) { /* each rank starts with another peer, so that not all read from the same one */
        int s = (g->rank + step) % g->ranks;
        struct phx_part part = phx_recv_part(g, c, s);
        if (!waits[s] || !part.bytes) continue;
        int result = phx_read_or_fail(g, s, part.at, transfer_of(g, s, g->rank, opened)->address, part.bytes);
        if (result != PHX_OK) return result;
    }
    return phx_barrier(g); /* a rank must not reuse its memory before all have read it */
}

int phx_op_copy(phx_group *g, const struct phx_call *c) {
    uint8_t waits[PHX_MAX_RANKS] = {0};
    int any = 0;
    uint32_t turn = ++g->turn;
    int result = phx_open_call(g, c, turn, phx_fill_slot(g, c, turn));
    if (result != PHX_OK) return result;
    for (int s = 0; s < g->ranks; s++) any |= waits[s] = !call_info_of(g, s, turn)->in_slot;
    for (int step = 0; step < g->ranks; step++) {
        int s = (g->rank + step) % g->ranks;
        struct phx_part to = phx_recv_part(g, c, s);
        if (!to.bytes || (waits[s] && s != g->rank)) continue;
        const void *from = s == g->rank ? phx_send_part(g, c, s).at : phx_slot_part(g, c, s, turn);
        if (from != to.at) memmove(to.at, from, to.bytes);
    }
    phx_fault(g);
    if (!any) return PHX_OK;
    /* The kernel serializes reads of the same memory by several ranks. */
    int direct = g->direct && !(c->kind == PHX_BROADCAST && g->ranks > 2);
    return direct ? from_memory(g, c, turn, waits) : through_slots(g, c, turn, waits);
}
