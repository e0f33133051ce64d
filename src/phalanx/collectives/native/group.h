/* The core of a group, on which everything else builds: its shared memory, barriers, failure and peer memory. It calls
   no layer above it; see `wake_queue` and `wake_mailbox`. */
#ifndef PHX_GROUP_H
#define PHX_GROUP_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "phx.h"

#define CACHE_LINE 64
#define MAX_CORES 1024
#define POLL_MS 20 /* interval in which a waiting thread checks whether its peers are alive */

typedef _Atomic uint32_t atomic_u32;

/* The data that a rank publishes about the call that it starts. */
struct call_info {
    uint64_t address; /* of its tensor, in its own address space */
    struct phx_signature signature;
    uint32_t in_slot; /* whether its data is already in its slot */
    uint32_t region;  /* number of the region that contains its tensor; 0: none */
};

/* The data that a rank publishes about its exchange with one other rank. */
struct transfer {
    uint64_t address; /* of the data that it sends */
    uint64_t send_bytes, recv_bytes;
};

/* The state of one rank, in shared memory. */
struct member {
    _Alignas(2 * CACHE_LINE) atomic_u32 round; /* the last barrier that it has entered: shows which ranks are missing */
    atomic_u32 left;
    int32_t pid;
    uint64_t token; /* address of a known value: peers read it to test whether they may read our memory */
    struct call_info call_info[2];
};

/* The state of the group, in shared memory. */
struct header {
    _Alignas(2 * CACHE_LINE) atomic_u32 arrived;   /* arrivals at all barriers so far */
    _Alignas(2 * CACHE_LINE) atomic_u32 completed; /* barriers that all ranks have entered; waiting ranks sleep on it */
    _Alignas(2 * CACHE_LINE) atomic_u32 sleepers;
    _Alignas(2 * CACHE_LINE) atomic_u32 error;   /* 1 + phx_result once the group has failed */
    atomic_u32 unreadable[2];                    /* a rank cannot read a peer's memory: first attempt, second attempt */
    atomic_u32 failed_ranks[PHX_MAX_RANKS / 32]; /* ranks to blame for the failure, one bit each */
    atomic_u32 cores[MAX_CORES / 32];            /* cores that any of the ranks may run on, one bit each */
};

struct queue;   /* queue.c */
struct region;  /* regions.c */
struct mailbox; /* mailbox.h */

struct phx_group {
    int rank, ranks;
    size_t slot, size, piece;
    uint32_t round;                         /* barriers so far */
    uint32_t turn;                          /* how often slots were filled; a slot is reused two turns later, after a barrier */
    int spins, spins_background, spins_min; /* polls before sleeping: in a caller's thread, in our own, and at least */
    int tries, waits;
    int direct;
    int64_t timeout_ms, deadline; /* of the current call; the deadline is set when it first waits */
    int interruptible;            /* whether the call runs in the caller's thread */
    int (*interrupted)(void);
    _Atomic int leaving;
    unsigned forks;
    struct header *head;
    struct member *members;
    struct transfer *transfers; /* [rank][turn & 1][peer] */
    uint8_t *slots;
    void *memory;
    uint8_t *scratch;
    struct pollfd *peers; /* pidfds */
    struct queue *queue;
    struct region *regions;
    struct mailbox *mailbox;
    /* Called when the group fails or this rank leaves. Set by the queue and the mailbox, which are layers above. */
    void (*wake_queue)(phx_group *);
    void (*wake_mailbox)(phx_group *);
};

long phx_futex(atomic_u32 *at, int op, uint32_t value, const struct timespec *timeout);
int64_t phx_now_ms(void);

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether a counter that wraps around has reached a value. */
static inline int reached(uint32_t count, uint32_t wanted) { return (int32_t)(count - wanted) >= 0; }

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* The error of the group, as seen by this rank; PHX_OK: none. */
int phx_error(const phx_group *);

/* Fail the group for all ranks and wake all waiting threads. Return the error, which may be an earlier one. */
int phx_fail(phx_group *, int error);

/* Fail the group because this rank needs one that has exited or left. */
int phx_fail_lost(phx_group *, int rank);

/* Whether a rank has exited or left. */
int phx_is_gone(const phx_group *, int rank);

/* Wait for all ranks. Writes before the barrier are visible to all ranks after it. */
int phx_barrier(phx_group *);

/* Read another rank's memory. Return 0, or -1 with errno. */
int phx_read_peer(const phx_group *, int rank, void *to, uint64_t from, size_t bytes);

/* Read another rank's memory; fail the group if that is not possible. */
int phx_read_or_fail(phx_group *, int rank, void *to, uint64_t from, size_t bytes);

/* Number of forks of this process and its ancestors since the first group was joined. */
unsigned phx_fork_count(void);

/* Fault injection, for tests: a point at which a rank may be made to exit. */
#ifdef PHX_FAULTS
extern _Atomic long phx_fault_in; /* exit at this many points from now; 0: never */
void phx_fault(const phx_group *);
#else
#define phx_fault(g) ((void)(g))
#endif

#endif
