/* Ranks of one machine that work together in memory they share.

   Every collective is made of rounds: each rank fills its slot, all meet, each takes what it needs from the slots of the
   others. Slots are double, so that the next round may be filled while a slow rank still reads this one: who has met the
   others in round k knows that they are through with round k-1. What is large goes through slots in pieces that stay in
   the caches; or only addresses are exchanged, where the kernel lets a rank read the memory of another
   (process_vm_readv) and that is faster.

   Nothing here knows of Python or PyTorch. */
#ifndef PHX_H
#define PHX_H

#include <stddef.h>
#include <stdint.h>

#define PHX_MOST 256 /* ranks of a machine */

enum phx_result {
    PHX_OK,
    PHX_DEAD,     /* a rank has ended, or left the group */
    PHX_TIMEOUT,  /* a rank has not come in time */
    PHX_ABORTED,  /* somebody said so */
    PHX_MISMATCH, /* ranks called different things */
    PHX_FAILED,   /* the kernel refused something */
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

/* One collective. Of parts there are none, one, or one for each rank:

                     in                         out
   ALL_REDUCE        -                          1: in place
   REDUCE            -                          1: in place at the root, untouched elsewhere
   BROADCAST         -                          1: read at the root, written elsewhere
   ALL_GATHER        1                          one for each rank
   GATHER            1                          one for each rank at the root, else none
   SCATTER           one for each at the root   1
   REDUCE_SCATTER    one for each rank          1
   ALL_TO_ALL        one for each rank          one for each rank; all may differ in size
   BARRIER           -                          -                                                        */
struct phx_call {
    int kind;
    int dtype, op;  /* of reductions; dtype elsewhere: for the message where ranks differ */
    int root;
    double before;  /* times each input: 1 unless a factor is asked for */
    int average;    /* the result divided by the number of ranks */
    int64_t patience; /* milliseconds; 0: for ever */
    int ins, outs;  /* how many */
    const struct phx_part *in, *out;
};

/* Bytes of shared memory for so many ranks, each with two slots of so many bytes. */
size_t phx_memory(int ranks, size_t slot);

/* Map the memory (zeroed, from whoever made it), take a seat and meet the others. `pids`: of all ranks. `direct`: they read
   each other's memory if the kernel lets all of them. `interrupted`, if any, is asked now and then by a thread that waits in a function of this header; not 0: the group is aborted.
   NULL: errno says why. */
phx_group *phx_join(int fd, int rank, int ranks, size_t slot, const int32_t *pids, int direct, int64_t patience,
                    int (*interrupted)(void));

/* The others learn that this rank has left, and whoever of it is in a call returns. From any thread. */
void phx_depart(phx_group *);

/* The end, also of a group's copy in a forked process: nobody may be in a call. */
void phx_leave(phx_group *);

/* Who waits, in any rank, returns PHX_ABORTED from now on. From any thread. */
void phx_abort(phx_group *);

/* Whether this process has joined it, and is not a fork of one that has. */
int phx_own(const phx_group *);

int phx_ranks(const phx_group *);

/* Whether ranks read the memory of others. */
int phx_direct(const phx_group *);

/* After PHX_DEAD or PHX_TIMEOUT: which ranks, a byte each. */
void phx_culprits(phx_group *, uint8_t *ranks);

/* After PHX_MISMATCH: what this rank had called. */
struct phx_said {
    int32_t kind, dtype, op, root, average;
    uint64_t bytes;
    double before;
};
void phx_said(phx_group *, int rank, struct phx_said *);

/* What is wrong with a call, in words; NULL: nothing. Whoever calls has asked this. */
const char *phx_wrong(const phx_group *, const struct phx_call *);

/* -- collectives: in the order of the calls, whichever thread they come from */

int phx_run(phx_group *, const struct phx_call *);

/* In a thread of the group's own. The call is copied; the memory it speaks of has to stay. Returns a ticket, from 1;
   0: there is no memory or no thread for it. */
uint64_t phx_start(phx_group *, const struct phx_call *);
int phx_done(phx_group *, uint64_t ticket);

/* Its result; -1: not over after so many milliseconds (0: for ever). */
int phx_wait(phx_group *, uint64_t ticket, int64_t milliseconds);

/* -- memory that all ranks have mapped: what lies in it is reduced where it is */

#define PHX_REGION (1u << 20) /* bytes: less goes through slots as fast */

/* By all ranks, each at the same place among its calls. `number`: from 1, the same everywhere. `here`: the memory of each
   rank in this process; `there`: in its own. 0, or -1: no memory. */
int phx_lend(phx_group *, uint32_t number, size_t bytes, void *const *here, const uint64_t *there);

/* By one alone: nothing is under way in it. */
void phx_withdraw(phx_group *, uint32_t number);

/* -- from rank to rank: in the order they were sent, by tag; they neither wait for collectives nor keep them waiting */

uint64_t phx_send(phx_group *, const void *data, size_t bytes, int to, int64_t tag, int64_t patience);
uint64_t phx_recv(phx_group *, void *data, size_t bytes, int from, int64_t tag, int64_t patience); /* from -1: anyone */
int phx_parcel_done(phx_group *, uint64_t ticket);

/* Its result, once: the ticket is void then. `from` and `bytes`: of what has come. -1: not over in time. */
int phx_parcel_wait(phx_group *, uint64_t ticket, int64_t milliseconds, int *from, size_t *bytes);

#endif
