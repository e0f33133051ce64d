/* Messages from rank to rank: what group.c has to do for them. */
#ifndef PHX_PARCELS_H
#define PHX_PARCELS_H

#include "phx.h"

/* Bytes of shared memory; pages that no message has touched cost nothing. */
size_t phx_parcels_memory(int ranks);

/* `memory` is zeroed, and begins at a page. After the pidfds are open. 0, or -1 with errno. */
int phx_parcels_open(phx_group *, void *memory);

void phx_parcels_close(phx_group *);

/* The group has ended, or this rank has left it: whoever waits, in any rank, has to look. */
void phx_parcels_wake(phx_group *);

#endif
