/* Failure, barriers, and peer memory. */
#define _GNU_SOURCE
#include "group.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

long phx_futex(atomic_u32 *at, int op, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, at, op, value, timeout, NULL, 0);
}

int64_t phx_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

#ifdef PHX_FAULTS
_Atomic long phx_fault_in;

void phx_fault(const phx_group *g) {
    (void)g;
    if (atomic_load(&phx_fault_in) && atomic_fetch_sub(&phx_fault_in, 1) == 1) _exit(77);
}
#endif

/* -- failure */

int phx_error(const phx_group *g) {
    uint32_t how = atomic_load(&g->head->error);
    if (how) return (int)how - 1;
    return atomic_load(&g->leaving) ? PHX_ABORTED : PHX_OK;
}

/* Wake the threads of this process that wait; the mailbox wakes those of all ranks. */
static void wake_layers(phx_group *g) {
    phx_futex(&g->head->completed, FUTEX_WAKE, INT_MAX, NULL);
    if (g->wake_queue) g->wake_queue(g);
    if (g->wake_mailbox) g->wake_mailbox(g);
}

int phx_fail(phx_group *g, int how) {
    uint32_t none = 0;
    atomic_compare_exchange_strong(&g->head->error, &none, (uint32_t)how + 1);
    wake_layers(g);
    return phx_error(g);
}

void phx_announce_leave(phx_group *g) {
    atomic_store(&g->members[g->rank].left, 1); /* before our calls return: a peer that reads our memory checks this afterwards */
    atomic_store(&g->leaving, 1);
    wake_layers(g);
}

void phx_abort(phx_group *g) { phx_fail(g, PHX_ABORTED); }

void phx_failed_ranks(phx_group *g, uint8_t *ranks) {
    for (int r = 0; r < g->ranks; r++) ranks[r] = (atomic_load(&g->head->failed_ranks[r / 32]) >> r % 32) & 1;
}

int phx_ranks(const phx_group *g) { return g->ranks; }

int phx_direct(const phx_group *g) { return g->direct; }

/* A pidfd becomes readable when its process exits, no matter which process reaps it. */
int phx_is_gone(const phx_group *g, int rank) {
    struct pollfd peer = {g->peers[rank].fd, POLLIN, 0};
    return atomic_load(&g->members[rank].left) || (peer.fd >= 0 && poll(&peer, 1, 0) > 0);
}

/* -- barrier */

static int is_missing(const phx_group *g, int rank) {
    return !reached(atomic_load_explicit(&g->members[rank].round, memory_order_acquire), g->round);
}

/* Fail the group and blame the marked ranks. A rank that leaves because the group has already failed is not blamed. */
static int fail_blaming(phx_group *g, const uint8_t *marked, int how) {
    int result = phx_error(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++)
        if (marked[r]) atomic_fetch_or(&g->head->failed_ranks[r / 32], 1u << r % 32);
    return phx_fail(g, how);
}

int phx_fail_lost(phx_group *g, int rank) {
    uint8_t marked[PHX_MAX_RANKS] = {0};
    marked[rank] = 1;
    return fail_blaming(g, marked, PHX_DEAD);
}

static int completed(const phx_group *g) { return reached(atomic_load(&g->head->completed), g->round); }

/* Fail the group if a rank has exited or left before this barrier completed, or after the timeout. A rank that has
   entered the barrier and then exited counts too: no rank should have to wait for a third one to learn that. */
static int check_peers(phx_group *g) {
    uint8_t missing[PHX_MAX_RANKS] = {0}, gone[PHX_MAX_RANKS] = {0};
    int any = 0;
    for (int r = 0; r < g->ranks; r++) {
        missing[r] = (uint8_t)is_missing(g, r);
        any |= gone[r] = r != g->rank && phx_is_gone(g, r) && !completed(g); /* the barrier may have completed just before it exited */
    }
    if (any) return fail_blaming(g, gone, PHX_DEAD);
    if (g->interruptible && g->interrupted && g->interrupted()) return phx_fail(g, PHX_ABORTED);
    return g->timeout_ms && phx_now_ms() >= g->deadline ? fail_blaming(g, missing, PHX_TIMEOUT) : PHX_OK;
}

static int sleep_until_complete(phx_group *g) {
    struct header *h = g->head;
    if (g->timeout_ms && !g->deadline) g->deadline = phx_now_ms() + g->timeout_ms;
    const struct timespec soon = {0, POLL_MS * 1000000L};
    int result = PHX_OK;
    atomic_fetch_add(&h->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&h->completed);
        if (reached(seen, g->round)) break;
        if ((result = phx_error(g)) != PHX_OK) break;
        if (phx_futex(&h->completed, FUTEX_WAIT, seen, &soon) != 0 && errno != EAGAIN && (result = check_peers(g)) != PHX_OK) break;
    }
    atomic_fetch_sub(&h->sleepers, 1);
    return result;
}

/* Spin for as long as it pays. A rank that shares this core can only arrive once we yield. Retry the full budget
   occasionally. */
static int spin_until_complete(phx_group *g) {
    atomic_u32 *completed = &g->head->completed;
    int most = g->interruptible ? g->spins : g->spins_background, tries = ++g->waits % 64 && g->tries < most ? g->tries : most;
    for (int i = 0; i < tries; i++, relax())
        if (reached(atomic_load_explicit(completed, memory_order_acquire), g->round)) {
            g->tries = tries < most / 2 ? tries * 2 : most;
            return 1;
        }
    g->tries = tries / 2 > g->spins_min ? tries / 2 : g->spins_min;
    for (int i = 0; i < 2; i++) {
        sched_yield();
        if (reached(atomic_load_explicit(completed, memory_order_acquire), g->round)) return 1;
    }
    return 0;
}

int phx_barrier(phx_group *g) {
    struct header *h = g->head;
    int result = phx_error(g);
    if (result != PHX_OK) return result;
    uint32_t round = ++g->round;
    phx_fault(g);
    int last = atomic_fetch_add(&h->arrived, 1) + 1 == round * (uint32_t)g->ranks;
    phx_fault(g);
    if (last) atomic_store(&h->completed, round);
    phx_fault(g);
    atomic_store_explicit(&g->members[g->rank].round, round, memory_order_release); /* last: other ranks treat this as the arrival */
    if (last) { /* `completed` is written before `sleepers` is read, and sleepers do the reverse: no wakeup is lost */
        if (atomic_load(&h->sleepers)) phx_futex(&h->completed, FUTEX_WAKE, INT_MAX, NULL);
        return PHX_OK;
    }
    return spin_until_complete(g) ? PHX_OK : sleep_until_complete(g);
}

/* -- peer memory */

int phx_read_peer(const phx_group *g, int rank, void *to, uint64_t from, size_t bytes) {
    uint8_t *at = to;
    while (bytes) {
        struct iovec here = {at, bytes}, there = {(void *)(uintptr_t)from, bytes};
        ssize_t got = process_vm_readv(g->members[rank].pid, &here, 1, &there, 1, 0);
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            return -1;
        }
        at += got, from += (uint64_t)got, bytes -= (size_t)got;
    }
    return 0;
}

int phx_read_or_fail(phx_group *g, int rank, void *to, uint64_t from, size_t bytes) {
    phx_fault(g);
    if (!phx_read_peer(g, rank, to, from, bytes)) return PHX_OK;
    /* A process loses its memory slightly before its exit is visible. A rank that has failed may have freed its memory. */
    int gone = errno == ESRCH;
    for (int i = 0; !gone && i < 2 * POLL_MS && phx_error(g) == PHX_OK; i++, poll(NULL, 0, 1)) gone = phx_is_gone(g, rank);
    return gone ? phx_fail_lost(g, rank) : phx_fail(g, PHX_FAILED);
}

/* -- forks */

static unsigned forks; /* number of forks of this process and its ancestors since the first group was joined */

static void count_fork(void) { forks++; }

static void count_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

unsigned phx_fork_count(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, count_forks);
    return forks;
}

int phx_is_owner(const phx_group *g) { return g->forks == forks; }
