/* Collectives and messages between the ranks of one host, through shared memory.

   A collective consists of rounds: each rank fills its slot, all ranks wait at a barrier, and each copies what it needs
   from the slots of the others. Slots are double-buffered, so that the next round can be filled while a slow rank still
   reads this one: a rank that has passed barrier k knows that all ranks are done with round k-1. Large data goes through
   slots in pieces that fit into the caches. Where the kernel allows ranks to read each other's memory
   (process_vm_readv) and that is faster, they exchange addresses instead.

   Nothing here depends on Python or PyTorch. Calls point in one direction:

       binding -> join -> p2p -> mailbox -> rings -> group
                       -> queue -> copy_ops, reduce_ops -> call -> regions -> group
                                   reduce_ops -> kernels */
#ifndef PHX_H
#define PHX_H

#include <stddef.h>
#include <stdint.h>

#define PHX_MAX_RANKS 256 /* per host */

enum phx_result {
    PHX_OK,
    PHX_DEAD,     /* a rank has exited or left the group */
    PHX_TIMEOUT,  /* a rank did not arrive in time */
    PHX_ABORTED,  /* the group was aborted */
    PHX_MISMATCH, /* ranks made different calls */
    PHX_FAILED,   /* a system call failed */
};

enum phx_kind {
    PHX_ALL_REDUCE, PHX_REDUCE, PHX_BROADCAST, PHX_ALL_GATHER, PHX_GATHER, PHX_SCATTER, PHX_REDUCE_SCATTER, PHX_ALL_TO_ALL,
    PHX_BARRIER,
};

typedef struct phx_group phx_group;

/* Memory of this rank. */
struct phx_part {
    void *at;
    size_t bytes;
};

/* One collective. The number of parts is zero, one, or one per rank:

                     in                         out
   ALL_REDUCE        -                          1: in place
   REDUCE            -                          1: in place at the root, untouched elsewhere
   BROADCAST         -                          1: read at the root, written elsewhere
   ALL_GATHER        1                          one per rank
   GATHER            1                          one per rank at the root, else none
   SCATTER           one per rank at the root   1
   REDUCE_SCATTER    one per rank               1
   ALL_TO_ALL        one per rank               one per rank; all may differ in size
   BARRIER           -                          -                                                        */
struct phx_call {
    int kind;
    int dtype, op; /* for reductions; elsewhere dtype is only used to report a mismatch */
    int root;
    double scale;       /* multiplies each input; 1: not scaled */
    int average;        /* whether to divide the result by the number of ranks */
    int64_t timeout_ms; /* 0: no timeout */
    int ins, outs;      /* number of parts */
    const struct phx_part *in, *out;
};

/* Bytes of shared memory for this many ranks, each with two slots of `slot` bytes. */
size_t phx_memory(int ranks, size_t slot);

/* Map the memory (zeroed by its creator), register this rank and wait for the others. `pids`: one per rank. `direct`: read
   each other's memory if the kernel allows it to all ranks. `interrupted`, if given, is called regularly by threads that
   wait in a function of this header; if it returns nonzero, the group is aborted. Return NULL on failure, with errno. */
phx_group *phx_join(int fd, int rank, int ranks, size_t slot, const int32_t *pids, int direct, int64_t timeout_ms,
                    int (*interrupted)(void));

/* Announce to the others that this rank leaves, and make its own calls return. Thread-safe. */
void phx_announce_leave(phx_group *);

/* Free the group, or the copy of it in a forked process. No thread may be in a call. */
void phx_leave(phx_group *);

/* Make all calls, in every rank, return PHX_ABORTED. Thread-safe. */
void phx_abort(phx_group *);

/* Whether this process has joined the group; false in a fork of such a process. */
int phx_is_owner(const phx_group *);

int phx_ranks(const phx_group *);

/* Whether ranks read each other's memory. */
int phx_direct(const phx_group *);

/* After PHX_DEAD or PHX_TIMEOUT: which ranks caused it, one byte per rank. */
void phx_failed_ranks(phx_group *, uint8_t *ranks);

/* After PHX_MISMATCH: the call of a rank. */
struct phx_signature {
    int32_t kind, dtype, op, root, average;
    uint64_t bytes;
    double scale;
};
void phx_signature(phx_group *, int rank, struct phx_signature *);

/* Return the error in a call, or NULL. The functions below expect a valid call. */
const char *phx_validate(const phx_group *, const struct phx_call *);

/* -- collectives: executed in the order of the calls, from any thread */

int phx_run(phx_group *, const struct phx_call *);

/* Start a call in the group's own thread. The call is copied; the memory it refers to must stay valid. Return a ticket,
   from 1, or 0: no memory or no thread. */
uint64_t phx_start(phx_group *, const struct phx_call *);
int phx_done(phx_group *, uint64_t ticket);

/* The result of a call; -1: not finished after this time (0: no timeout). */
int phx_wait(phx_group *, uint64_t ticket, int64_t milliseconds);

/* -- regions: memory that all ranks have mapped, in which tensors are reduced in place */

#define PHX_REGION (1u << 20) /* smallest size in bytes: below it, slots are as fast */

/* Add a region. Called by all ranks at the same point among their calls. `number`: from 1, the same in all ranks.
   `local`: the memory of each rank, mapped in this process; `remote`: its address in that rank's process. Return 0, or
   -1: no memory. */
int phx_add_region(phx_group *, uint32_t number, size_t bytes, void *const *local, const uint64_t *remote);

/* Remove a region, in this rank only. No call may be using it. */
void phx_remove_region(phx_group *, uint32_t number);

/* -- point-to-point messages: ordered per tag, independent of collectives */

uint64_t phx_send(phx_group *, const void *data, size_t bytes, int to, int64_t tag, int64_t timeout_ms);
uint64_t phx_recv(phx_group *, void *data, size_t bytes, int from, int64_t tag, int64_t timeout_ms); /* from -1: any source */
int phx_p2p_done(phx_group *, uint64_t ticket);

/* The result of a request, once: its ticket is invalid afterwards. `from` and `bytes` describe the received message.
   -1: not finished in time. */
int phx_p2p_wait(phx_group *, uint64_t ticket, int64_t milliseconds, int *from, size_t *bytes);

#endif
