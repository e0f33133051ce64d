/* Collectives that move memory as it is: from slots, from the others' memory, or through slots bit by bit. */
#include "rounds.h"

#include <string.h>

/* Where parts are too large for slots and the kernel lets nobody read another's memory. `waits`: whose. */
static int through_slots(phx_group *g, const struct phx_call *c, uint32_t opened, const uint8_t *waits) {
    int alike = phx_alike(c->kind);
    size_t share = alike ? g->slot : g->slot / (size_t)g->ranks & ~(size_t)(LINE - 1), most = 0; /* a share for each rank */
    for (int s = 0; s < g->ranks; s++)
        for (int r = 0; waits[s] && r < g->ranks; r++)
            if (r != s && share_of(g, s, r, opened)->gives > most) most = share_of(g, s, r, opened)->gives;
    for (size_t done = 0; done < most; done += share) {
        uint32_t turn = ++g->turn;
        for (int r = 0; waits[g->rank] && r < g->ranks; r++) {
            struct phx_part part = r == g->rank ? (struct phx_part){NULL, 0} : phx_gives(g, c, r);
            if (part.bytes <= done) continue;
            memcpy(slot_of(g, g->rank, turn) + (alike ? 0 : (size_t)r * share), (uint8_t *)part.at + done, less(part.bytes - done, share));
            if (alike) break;
        }
        phx_fault(g);
        int result = phx_meet(g);
        if (result != PHX_OK) return result;
        for (int s = 0; s < g->ranks; s++) {
            struct phx_part part = s == g->rank || !waits[s] ? (struct phx_part){NULL, 0} : phx_takes(g, c, s);
            if (part.bytes <= done) continue;
            memcpy((uint8_t *)part.at + done, slot_of(g, s, turn) + (alike ? 0 : (size_t)g->rank * share), less(part.bytes - done, share));
        }
    }
    return PHX_OK;
}

static int from_memory(phx_group *g, const struct phx_call *c, uint32_t opened, const uint8_t *waits) {
    for (int step = 1; step < g->ranks; step++) { /* each begins with another, so that not all read from one */
        int s = (g->rank + step) % g->ranks;
        struct phx_part part = phx_takes(g, c, s);
        if (!waits[s] || !part.bytes) continue;
        int result = phx_read(g, s, part.at, share_of(g, s, g->rank, opened)->address, part.bytes);
        if (result != PHX_OK) return result;
    }
    return phx_meet(g); /* until all have read, the memory is theirs too */
}

int phx_move(phx_group *g, const struct phx_call *c) {
    uint8_t waits[PHX_MOST] = {0};
    int any = 0;
    uint32_t turn = ++g->turn;
    int result = phx_open(g, c, turn, phx_place(g, c, turn));
    if (result != PHX_OK) return result;
    for (int s = 0; s < g->ranks; s++) any |= waits[s] = !notice_of(g, s, turn)->placed;
    for (int step = 0; step < g->ranks; step++) {
        int s = (g->rank + step) % g->ranks;
        struct phx_part to = phx_takes(g, c, s);
        if (!to.bytes || (waits[s] && s != g->rank)) continue;
        const void *from = s == g->rank ? phx_gives(g, c, s).at : phx_placed(g, c, s, turn);
        if (from != to.at) memmove(to.at, from, to.bytes);
    }
    phx_fault(g);
    if (!any) return PHX_OK;
    /* Where more than one would read the same memory, the kernel lets them in one by one. */
    int direct = g->direct && !(c->kind == PHX_BROADCAST && g->ranks > 2);
    return direct ? from_memory(g, c, turn, waits) : through_slots(g, c, turn, waits);
}
