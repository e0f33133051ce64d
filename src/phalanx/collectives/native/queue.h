/* The queue of a group's collectives. */
#ifndef PHX_QUEUE_H
#define PHX_QUEUE_H

#include "phx.h"

/* Return 0, or -1: no memory. */
int phx_queue_open(phx_group *);

void phx_queue_close(phx_group *);

#endif
