/* What the parts of the library share: seats, meetings, liveness. */
#ifndef PHX_GROUP_H
#define PHX_GROUP_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "phx.h"
#include "reduce.h"

#define LINE 64
#define CORES 1024
#define LOOK_MS 20 /* how often who waits looks whether the others live */
#define PIECES (1u << 20) /* bytes that are read from the others' memory at once: few calls of the kernel, and they stay in the second cache */

typedef _Atomic uint32_t word;

/* What a rank says of the call that it begins. */
struct notice {
    uint64_t address; /* of its tensor, in its own memory */
    struct phx_said said;
    uint32_t placed;  /* what it gives lies in its slot already */
    uint32_t region;  /* in which its tensor lies; 0: in none */
};

/* And of what goes between it and another rank. */
struct share {
    uint64_t address; /* of what it gives */
    uint64_t gives, takes; /* bytes */
};

struct seat {
    _Alignas(2 * LINE) word posted; /* rounds that it has filled: who is missing is seen from that */
    word left;
    int32_t pid;
    uint64_t token; /* where others try whether they may read our memory */
    struct notice notice[2];
};

struct header {
    _Alignas(2 * LINE) word arrived; /* of all rounds together */
    _Alignas(2 * LINE) word met;     /* rounds that all ranks have filled: who waits sleeps here */
    _Alignas(2 * LINE) word sleepers;
    _Alignas(2 * LINE) word broken;  /* 1 + phx_result: nothing works any more, and why */
    word unreadable[2];              /* somebody cannot read another's memory, at the first try and at the second */
    word lost[PHX_MOST / 32];        /* who is to blame, a bit each */
    word cores[CORES / 32];          /* that one rank or another may run on, a bit each */
};

struct queue;    /* queue.c */
struct region;   /* regions.c */
struct phx_post; /* post.h */

struct phx_group {
    int rank, ranks;
    size_t slot, size, piece;
    uint32_t round; /* meetings */
    uint32_t turn;  /* times that slots were filled: each is followed by a meeting before the next but one */
    int spins, spins_beside, spins_least; /* how often one looks before it sleeps: at most in a caller's thread, in the own */
    int tries, waits;
    int direct;
    int64_t patience, until; /* of the call under way: how long it may wait, and from its first wait on until when */
    int asks;         /* whether it runs in a thread of the caller's, who may be interrupted */
    int (*interrupted)(void);
    _Atomic int departed;
    unsigned forks;
    struct header *head;
    struct seat *seats;
    struct share *shares; /* of each rank, for each turn of two, with each rank */
    uint8_t *slots;
    void *memory;
    uint8_t *scratch;
    struct pollfd *peers; /* pidfds */
    struct queue *queue;
    struct region *regions;
    struct phx_post *post;
};

long phx_futex(word *at, int op, uint32_t value, const struct timespec *timeout);
int64_t phx_now_ms(void);

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Counters go round. */
static inline int reached(uint32_t count, uint32_t wanted) { return (int32_t)(count - wanted) >= 0; }

/* What the group has ended by, for this rank; PHX_OK: it has not. */
int phx_broken(const phx_group *);

/* End it for all ranks, and wake whoever waits. Returns how it has ended, which may be another's reason. */
int phx_give_up(phx_group *, int how);

/* The same because a rank is gone that this one needs. */
int phx_lost(phx_group *, int rank);

/* Whether a rank has ended or left. */
int phx_gone(const phx_group *, int rank);

/* What a rank has written before is seen by all of them after. */
int phx_meet(phx_group *);

/* Bytes of another rank's memory, without its doing. 0, or -1 with errno. */
int phx_read_peer(const phx_group *, int rank, void *to, uint64_t from, size_t bytes);

/* The same; where that fails, the group has ended. */
int phx_read(phx_group *, int rank, void *to, uint64_t from, size_t bytes);

/* One collective, from its first meeting to its last (rounds.c). */
int phx_execute(phx_group *, const struct phx_call *);

/* Calls that wait for their turn (queue.c). */
int phx_queue_open(phx_group *);
void phx_queue_wake(phx_group *);
void phx_queue_close(phx_group *);

/* In which region all of it lies; 0: in none, or it is too small to be worth it (regions.c). */
uint32_t phx_region_of(phx_group *, const void *data, size_t bytes);
void phx_regions_close(phx_group *);

/* A point where a rank may be made to die: tests alone. */
#ifdef PHX_FAULTS
extern _Atomic long phx_fault_in; /* so many points from now; 0: never */
void phx_fault(const phx_group *);
#else
#define phx_fault(g) ((void)(g))
#endif

#endif
