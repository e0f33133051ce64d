#define _GNU_SOURCE
#include "group.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

long phx_futex(word *at, int op, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, at, op, value, timeout, NULL, 0);
}

int64_t phx_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

static size_t before_slots(int ranks) { return rounded(sizeof(struct header) + (size_t)ranks * sizeof(struct seat), 4096); }

size_t phx_memory(int ranks, size_t slot) { return before_slots(ranks) + (size_t)ranks * 2 * rounded(slot, 4096); }

/* -- an end that all of them see */

int phx_broken(const phx_group *g) {
    uint32_t how = atomic_load(&g->head->broken);
    if (how) return (int)how - 1;
    return atomic_load(&g->departed) ? PHX_ABORTED : PHX_OK;
}

int phx_give_up(phx_group *g, int how) {
    uint32_t none = 0;
    atomic_compare_exchange_strong(&g->head->broken, &none, (uint32_t)how + 1);
    phx_futex(&g->head->met, FUTEX_WAKE, INT_MAX, NULL);
    phx_queue_wake(g);
    return phx_broken(g);
}

void phx_blame(phx_group *g, int rank) { atomic_fetch_or(&g->head->lost[rank / 32], 1u << rank % 32); }

void phx_abort(phx_group *g) { phx_give_up(g, PHX_ABORTED); }

void phx_culprits(phx_group *g, uint8_t *ranks) {
    for (int r = 0; r < g->ranks; r++) ranks[r] = (atomic_load(&g->head->lost[r / 32]) >> r % 32) & 1;
}

int phx_ranks(const phx_group *g) { return g->ranks; }

int phx_direct(const phx_group *g) { return g->direct; }

/* The end of a process makes its pidfd readable, whoever reaps it. */
int phx_gone(const phx_group *g, int rank) {
    struct pollfd peer = {g->peers[rank].fd, POLLIN, 0};
    return atomic_load(&g->seats[rank].left) || (peer.fd >= 0 && poll(&peer, 1, 0) > 0);
}

/* -- meeting: what a rank has written before is seen by all of them after */

static int absent(const phx_group *g, int rank) {
    return !reached(atomic_load_explicit(&g->seats[rank].posted, memory_order_acquire), g->round);
}

/* Whether one that has not come to this round never will, or the time is over: then the group has ended. */
static int look(phx_group *g, int64_t until) {
    int lost = 0;
    for (int r = 0; r < g->ranks; r++)
        if (absent(g, r) && phx_gone(g, r) && absent(g, r)) phx_blame(g, r), lost = 1; /* it may have come just before it went */
    if (lost) return phx_give_up(g, PHX_DEAD);
    if (g->asks && g->interrupted && g->interrupted()) return phx_give_up(g, PHX_ABORTED);
    if (!until || phx_now_ms() < until) return PHX_OK;
    for (int r = 0; r < g->ranks; r++)
        if (absent(g, r)) phx_blame(g, r);
    return phx_give_up(g, PHX_TIMEOUT);
}

static int sleep_until_met(phx_group *g) {
    struct header *h = g->head;
    int64_t until = g->patience ? phx_now_ms() + g->patience : 0;
    const struct timespec soon = {0, LOOK_MS * 1000000L};
    int result = PHX_OK;
    atomic_fetch_add(&h->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&h->met);
        if (reached(seen, g->round)) break;
        if ((result = phx_broken(g)) != PHX_OK) break;
        if (phx_futex(&h->met, FUTEX_WAIT, seen, &soon) != 0 && errno != EAGAIN && (result = look(g, until)) != PHX_OK) break;
    }
    atomic_fetch_sub(&h->sleepers, 1);
    return result;
}

int phx_meet(phx_group *g) {
    struct header *h = g->head;
    int result = phx_broken(g);
    if (result != PHX_OK) return result;
    uint32_t round = ++g->round;
    phx_fault(g);
    int last = atomic_fetch_add(&h->arrived, 1) + 1 == round * (uint32_t)g->ranks;
    phx_fault(g);
    if (last) atomic_store(&h->met, round);
    phx_fault(g);
    atomic_store_explicit(&g->seats[g->rank].posted, round, memory_order_release); /* last: a word that says so is counted */
    if (last) { /* met was written before who sleeps is asked for, and they do it the other way round: nobody oversleeps */
        if (atomic_load(&h->sleepers)) phx_futex(&h->met, FUTEX_WAKE, INT_MAX, NULL);
        return PHX_OK;
    }
    for (int i = 0; i < g->spins; i++) {
        if (reached(atomic_load_explicit(&h->met, memory_order_acquire), round)) return PHX_OK;
        relax();
    }
    for (int i = 0; i < 2; i++) {
        sched_yield();
        if (reached(atomic_load_explicit(&h->met, memory_order_acquire), round)) return PHX_OK;
    }
    return sleep_until_met(g);
}

/* -- the memory of others */

static int read_peer(const phx_group *g, int rank, void *to, uint64_t from, size_t bytes) {
    uint8_t *at = to;
    while (bytes) {
        struct iovec here = {at, bytes}, there = {(void *)(uintptr_t)from, bytes};
        ssize_t got = process_vm_readv(g->seats[rank].pid, &here, 1, &there, 1, 0);
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            return -1;
        }
        at += got, from += (uint64_t)got, bytes -= (size_t)got;
    }
    return 0;
}

int phx_read(phx_group *g, int rank, void *to, uint64_t from, size_t bytes) {
    phx_fault(g);
    if (!read_peer(g, rank, to, from, bytes)) return PHX_OK;
    /* Its memory goes a moment before its end is seen; and one that has given up may have freed it. */
    int gone = errno == ESRCH;
    for (int i = 0; !gone && i < 2 * LOOK_MS && phx_broken(g) == PHX_OK; i++, poll(NULL, 0, 1)) gone = phx_gone(g, rank);
    if (!gone) return phx_give_up(g, PHX_FAILED);
    phx_blame(g, rank);
    return phx_give_up(g, PHX_DEAD);
}

/* Everybody tries whether it may read everybody's memory; if anyone may not, nobody does. */
static int try_direct(phx_group *g, int attempt) {
    struct seat *own = &g->seats[g->rank];
    static const uint64_t sample = 0x7068616c616e78ull;
    own->token = (uint64_t)(uintptr_t)&sample;
    int result = phx_meet(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++) {
        uint64_t seen = 0;
        if (r != g->rank && (read_peer(g, r, &seen, g->seats[r].token, sizeof seen) || seen != sample)) {
            atomic_fetch_add(&g->head->unreadable[attempt], 1);
            break;
        }
    }
    result = phx_meet(g);
    g->direct = !atomic_load(&g->head->unreadable[attempt]);
    return result;
}

static int find_way(phx_group *g) {
    int result = try_direct(g, 0);
    if (result != PHX_OK || g->direct) return result;
    /* Yama (ptrace_scope 1) lets only ancestors read a process, and whom it names: the launcher, with all that comes
       of it. The ranks have one parent as a rule, so they may read each other then. */
    prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);
    return try_direct(g, 1);
}

/* -- coming and going */

static unsigned forks; /* of this process and its ancestors since the library was loaded */

static void forked(void) { forks++; }

static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

int phx_own(const phx_group *g) { return g->forks == forks; }

static int open_peers(phx_group *g, const int32_t *pids) {
    for (int r = 0; r < g->ranks; r++) g->peers[r] = (struct pollfd){-1, POLLIN, 0};
    for (int r = 0; r < g->ranks; r++) {
        if (r == g->rank) continue;
        g->peers[r].fd = (int)syscall(SYS_pidfd_open, pids[r], 0);
        if (g->peers[r].fd < 0) return -1;
    }
    return 0;
}

static long cores(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : sysconf(_SC_NPROCESSORS_ONLN);
}

phx_group *phx_join(int fd, int rank, int ranks, size_t slot, const int32_t *pids, int64_t patience, int (*interrupted)(void)) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    phx_group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->rank = rank, g->ranks = ranks, g->slot = rounded(slot, 4096), g->size = phx_memory(ranks, slot);
    g->patience = patience, g->interrupted = interrupted, g->asks = 1, g->forks = forks;
    g->memory = mmap(NULL, g->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    g->peers = calloc((size_t)ranks, sizeof *g->peers);
    g->scratch = aligned_alloc(4096, (size_t)PIECE * (size_t)ranks);
    if (g->memory == MAP_FAILED) g->memory = NULL;
    int result = g->memory && g->peers && g->scratch && !open_peers(g, pids) && !phx_queue_open(g) ? PHX_OK : PHX_FAILED;
    int why = errno;
    if (result == PHX_OK) {
        g->head = g->memory;
        g->seats = (struct seat *)(g->head + 1);
        g->slots = (uint8_t *)g->memory + before_slots(ranks);
        g->seats[rank].pid = pids[rank];
        g->spins = ranks <= cores() ? 4000 : 100; /* with more ranks than cores, who spins keeps the others from coming */
        result = find_way(g);
        why = result == PHX_DEAD ? ESRCH : result == PHX_TIMEOUT ? ETIMEDOUT : ECONNABORTED;
    }
    if (result == PHX_OK) return g;
    phx_leave(g);
    errno = why;
    return NULL;
}

void phx_depart(phx_group *g) {
    atomic_store(&g->departed, 1);
    atomic_store(&g->seats[g->rank].left, 1);
    phx_futex(&g->head->met, FUTEX_WAKE, INT_MAX, NULL);
    phx_queue_wake(g);
}

void phx_leave(phx_group *g) {
    if (g->head && phx_own(g)) phx_depart(g);
    phx_queue_close(g);
    phx_regions_close(g);
    for (int r = 0; g->peers && r < g->ranks; r++)
        if (g->peers[r].fd >= 0) close(g->peers[r].fd);
    if (g->memory) munmap(g->memory, g->size);
    free(g->peers);
    free(g->scratch);
    free(g);
}
