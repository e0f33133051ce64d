/* Point-to-point messages: the functions for joining and leaving a group. */
#ifndef PHX_P2P_H
#define PHX_P2P_H

#include "phx.h"

/* Bytes of shared memory. Pages that no message has touched take no memory. */
size_t phx_p2p_memory(int ranks);

/* `memory` is zeroed and page-aligned. Call this after the pidfds are open. Return 0, or -1 with errno. */
int phx_p2p_open(phx_group *, void *memory);

void phx_p2p_close(phx_group *);

#endif
