/* What the parts of the library share: seats, meetings, liveness. */
#ifndef PHX_GROUP_H
#define PHX_GROUP_H

#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "phx.h"
#include "reduce.h"

#define LINE 64
#define LOOK_MS 20 /* how often who waits looks whether the others live */
#define MOST 256   /* ranks of a machine */
#define PIECE (128u << 10) /* bytes that are read from another's memory at once: they stay in the second cache */

typedef _Atomic uint32_t word;

/* What a rank says of the round that it has filled. */
struct notice {
    uint64_t address; /* of its tensor, in its own memory */
    uint64_t bytes;
    uint32_t kind;    /* operation, type, root: they have to be the same everywhere */
    uint32_t unused;
};

struct seat {
    _Alignas(2 * LINE) word posted; /* rounds that it has filled: who is missing is seen from that */
    int32_t pid;
    uint64_t token; /* where others try whether they may read our memory */
    struct notice notice[2];
};

struct header {
    _Alignas(2 * LINE) word arrived; /* of all rounds together */
    _Alignas(2 * LINE) word met;     /* rounds that all ranks have filled: who waits sleeps here */
    _Alignas(2 * LINE) word sleepers;
    _Alignas(2 * LINE) word broken;  /* 1 + phx_result: nothing works any more, and why */
    word joined;
    word unreadable;                 /* ranks that cannot read another's memory */
    word lost[8];                    /* who is to blame, a bit each; more than 256 ranks share no machine */
};

struct phx_group {
    int rank, ranks;
    size_t slot, size;
    uint32_t round; /* meetings */
    uint32_t turn;  /* times that slots were filled: each is followed by a meeting before the next but one */
    int spins, direct;
    int64_t patience;
    struct header *head;
    struct seat *seats;
    uint8_t *slots;
    void *memory;
    uint8_t *scratch;
    struct pollfd *peers; /* pidfds */
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

/* What the group has ended by; PHX_OK: it has not. */
int phx_broken(const phx_group *);

/* End it for all ranks, and wake whoever waits. Returns how it has ended, which may be another's reason. */
int phx_give_up(phx_group *, int how);
void phx_blame(phx_group *, int rank);

/* Whether one that has not come to this round is dead, or the time is over: then the group has ended. */
int phx_look(phx_group *, int64_t until);

/* What a rank has written before is seen by all of them after. */
int phx_meet(phx_group *);

/* Bytes of another rank's memory, without its doing. 0, or -1 with errno. */
int phx_read_peer(const phx_group *, int rank, void *to, uint64_t from, size_t bytes);

#endif
