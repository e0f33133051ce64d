/* Ranks of one machine that work together in memory they share.

   Every collective is made of rounds: each rank fills its slot, all meet, each takes what it needs from the slots of the
   others. Slots are double, so that the next round may be filled while a slow rank still reads this one: who has met the
   others in round k knows that they are through with round k-1. Large tensors are not copied into slots where the kernel
   lets a rank read the memory of another (process_vm_readv): then only addresses are exchanged. */
#ifndef PHX_SHM_H
#define PHX_SHM_H

#include <stddef.h>
#include <stdint.h>

enum phx_result { PHX_OK, PHX_DEAD, PHX_TIMEOUT, PHX_ABORTED, PHX_MISMATCH, PHX_FAILED };

typedef struct phx_group phx_group;

/* Bytes of shared memory for so many ranks, each with two slots of so many bytes. */
size_t phx_memory(int ranks, size_t slot);

/* Map the memory (zeroed, from whoever made it) and take a seat. `pids`: of all ranks. NULL: errno says why. */
phx_group *phx_join(int fd, int rank, int ranks, size_t slot, const int32_t *pids);
void phx_leave(phx_group *);

/* Who waits, anywhere, returns PHX_ABORTED from now on. */
void phx_abort(phx_group *);

/* Milliseconds that a rank waits for the others; 0: for ever. */
void phx_patience(phx_group *, int64_t milliseconds);

/* After PHX_DEAD, PHX_TIMEOUT or PHX_MISMATCH: which ranks, a byte each. */
void phx_culprits(phx_group *, uint8_t *ranks);

int phx_barrier(phx_group *);
int phx_all_reduce(phx_group *, void *data, size_t count, int dtype, int op, double before, double after);
int phx_broadcast(phx_group *, void *data, size_t bytes, int root);
int phx_all_gather(phx_group *, void *out, const void *in, size_t bytes); /* `bytes` of each rank, by rank */
int phx_reduce_scatter(phx_group *, void *out, const void *in, size_t count, int dtype, int op, double before, double after);

#endif
