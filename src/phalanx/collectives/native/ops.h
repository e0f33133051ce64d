/* The collectives. Each is called by all ranks, in the same order. */
#ifndef PHX_OPS_H
#define PHX_OPS_H

#include "phx.h"

/* copy_ops.c: broadcast, all_gather, gather, scatter, all_to_all */
int phx_op_copy(phx_group *, const struct phx_call *);

/* reduce_ops.c: all_reduce and reduce */
int phx_op_reduce(phx_group *, const struct phx_call *);
int phx_op_reduce_scatter(phx_group *, const struct phx_call *);

#endif
