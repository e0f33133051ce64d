#define _GNU_SOURCE
#include "group.h"

#include "parcels.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define SPIN_NS 100000 /* who waits looks so long before it sleeps */

long phx_futex(word *at, int op, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, at, op, value, timeout, NULL, 0);
}

int64_t phx_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

static size_t before_slots(int ranks) {
    size_t n = (size_t)ranks;
    return rounded(sizeof(struct header) + n * sizeof(struct seat) + 2 * n * n * sizeof(struct share), 4096);
}

static size_t before_parcels(int ranks, size_t slot) { return before_slots(ranks) + (size_t)ranks * 2 * rounded(slot, 4096); }

size_t phx_memory(int ranks, size_t slot) { return before_parcels(ranks, slot) + phx_parcels_memory(ranks); }

#ifdef PHX_FAULTS
_Atomic long phx_fault_in;

void phx_fault(const phx_group *g) {
    (void)g;
    if (atomic_load(&phx_fault_in) && atomic_fetch_sub(&phx_fault_in, 1) == 1) _exit(77);
}
#endif

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
    phx_parcels_wake(g);
    return phx_broken(g);
}

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

/* End the group by the fault of those marked. Who leaves because it has ended already is not to blame: its end came first. */
static int accuse(phx_group *g, const uint8_t *marked, int how) {
    int result = phx_broken(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++)
        if (marked[r]) atomic_fetch_or(&g->head->lost[r / 32], 1u << r % 32);
    return phx_give_up(g, how);
}

int phx_lost(phx_group *g, int rank) {
    uint8_t marked[PHX_MOST] = {0};
    marked[rank] = 1;
    return accuse(g, marked, PHX_DEAD);
}

static int met(const phx_group *g) { return reached(atomic_load(&g->head->met), g->round); }

/* Whether somebody has gone before all had come to this round, or the time is over: then the group has ended. One that had
   come itself counts, too: why should whoever waits with it for a third learn of that only when the third comes? */
static int look(phx_group *g) {
    uint8_t missing[PHX_MOST] = {0}, lost[PHX_MOST] = {0};
    int any = 0;
    for (int r = 0; r < g->ranks; r++) {
        missing[r] = (uint8_t)absent(g, r);
        any |= lost[r] = r != g->rank && phx_gone(g, r) && !met(g); /* all may have met just before it went */
    }
    if (any) return accuse(g, lost, PHX_DEAD);
    if (g->asks && g->interrupted && g->interrupted()) return phx_give_up(g, PHX_ABORTED);
    return g->patience && phx_now_ms() >= g->until ? accuse(g, missing, PHX_TIMEOUT) : PHX_OK;
}

static int sleep_until_met(phx_group *g) {
    struct header *h = g->head;
    if (g->patience && !g->until) g->until = phx_now_ms() + g->patience;
    const struct timespec soon = {0, LOOK_MS * 1000000L};
    int result = PHX_OK;
    atomic_fetch_add(&h->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&h->met);
        if (reached(seen, g->round)) break;
        if ((result = phx_broken(g)) != PHX_OK) break;
        if (phx_futex(&h->met, FUTEX_WAIT, seen, &soon) != 0 && errno != EAGAIN && (result = look(g)) != PHX_OK) break;
    }
    atomic_fetch_sub(&h->sleepers, 1);
    return result;
}

/* As long as it pays: ranks that share a core with others, or with each other, come only once this one lets go of it. Now
   and then the whole time is tried again. */
static int spin_until_met(phx_group *g) {
    word *met = &g->head->met;
    int most = g->asks ? g->spins : g->spins_beside, tries = ++g->waits % 64 && g->tries < most ? g->tries : most;
    for (int i = 0; i < tries; i++, relax())
        if (reached(atomic_load_explicit(met, memory_order_acquire), g->round)) {
            g->tries = tries < most / 2 ? tries * 2 : most;
            return 1;
        }
    g->tries = tries / 2 > g->spins_least ? tries / 2 : g->spins_least;
    for (int i = 0; i < 2; i++) {
        sched_yield();
        if (reached(atomic_load_explicit(met, memory_order_acquire), g->round)) return 1;
    }
    return 0;
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
    return spin_until_met(g) ? PHX_OK : sleep_until_met(g);
}

/* -- the memory of others */

int phx_read_peer(const phx_group *g, int rank, void *to, uint64_t from, size_t bytes) {
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
    if (!phx_read_peer(g, rank, to, from, bytes)) return PHX_OK;
    /* Its memory goes a moment before its end is seen; and one that has given up may have freed it. */
    int gone = errno == ESRCH;
    for (int i = 0; !gone && i < 2 * LOOK_MS && phx_broken(g) == PHX_OK; i++, poll(NULL, 0, 1)) gone = phx_gone(g, rank);
    return gone ? phx_lost(g, rank) : phx_give_up(g, PHX_FAILED);
}

/* Everybody tries whether it may read everybody's memory; if anyone may not, nobody does. */
static int try_direct(phx_group *g, int direct, int attempt) {
    struct seat *own = &g->seats[g->rank];
    static const uint64_t sample = 0x7068616c616e78ull;
    own->token = (uint64_t)(uintptr_t)&sample;
    int result = phx_meet(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++) {
        uint64_t seen = 0;
        if (!direct || phx_read_peer(g, r, &seen, g->seats[r].token, sizeof seen) || seen != sample)
            atomic_store(&g->head->unreadable[attempt], 1);
    }
    result = phx_meet(g);
    g->direct = !atomic_load(&g->head->unreadable[attempt]);
    return result;
}

static int find_way(phx_group *g, int direct) {
    int result = try_direct(g, direct, 0);
    if (result != PHX_OK || g->direct) return result;
    /* Yama (ptrace_scope 1) lets only ancestors read a process, and whom it names: the launcher, with all that comes
       of it. The ranks have one parent as a rule, so they may read each other then. */
    if (direct) prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);
    return try_direct(g, direct, 1);
}

/* -- coming and going */

static unsigned forks; /* of this process and its ancestors since the library was loaded */

static void forked(void) { forks++; }

static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

int phx_own(const phx_group *g) { return g->forks == forks; }

static int open_peers(phx_group *g, const int32_t *pids) {
    for (int r = 0; r < g->ranks; r++) {
        if (r == g->rank) continue;
        g->peers[r].fd = (int)syscall(SYS_pidfd_open, pids[r], 0);
        if (g->peers[r].fd < 0) return -1;
    }
    return 0;
}

/* A number in a file, or two. */
static int numbers(const char *path, long *a, long *b) {
    FILE *file = fopen(path, "re");
    int found = file ? fscanf(file, "%ld %ld", a, b) : 0;
    if (file) fclose(file);
    return found;
}

/* Each rank may be bound to cores of its own. */
static void tell_cores(phx_group *g) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    for (int core = 0; core < CORES && core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed)) atomic_fetch_or(&g->head->cores[core / 32], 1u << core % 32);
}

/* What all ranks together may use, by their affinities and by what a container allows. */
static long cores(const phx_group *g) {
    long all = 0, quota = 0, period = 0, unused;
    for (int i = 0; i < CORES / 32; i++) all += __builtin_popcount(atomic_load(&g->head->cores[i]));
    if (!all) all = sysconf(_SC_NPROCESSORS_ONLN);
    if (numbers("/sys/fs/cgroup/cpu.max", &quota, &period) != 2) { /* the older kind of control groups has two files */
        numbers("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", &quota, &unused);
        numbers("/sys/fs/cgroup/cpu/cpu.cfs_period_us", &period, &unused);
    }
    return quota > 0 && period > 0 && quota / period < all ? quota / period : all;
}

/* How often one may look until so many nanoseconds have gone: a pause takes ten times longer on some processors. */
static int spins(long nanoseconds) {
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < 256; i++) relax();
    clock_gettime(CLOCK_MONOTONIC, &to);
    long took = (to.tv_sec - from.tv_sec) * 1000000000L + to.tv_nsec - from.tv_nsec;
    return (int)(nanoseconds * 256 / (took > 256 ? took : 256));
}

phx_group *phx_join(int fd, int rank, int ranks, size_t slot, const int32_t *pids, int direct, int64_t patience,
                    int (*interrupted)(void)) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    phx_group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->rank = rank, g->ranks = ranks, g->slot = rounded(slot, 4096), g->size = phx_memory(ranks, slot);
    g->piece = rounded(PIECES / (size_t)ranks, 4096);
    g->patience = patience, g->interrupted = interrupted, g->asks = 1, g->forks = forks;
    g->memory = mmap(NULL, g->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    g->peers = calloc((size_t)ranks, sizeof *g->peers);
    g->scratch = aligned_alloc(4096, g->piece * (size_t)ranks);
    if (g->memory == MAP_FAILED) g->memory = NULL;
    int result = g->memory && g->peers && g->scratch && !phx_queue_open(g) ? PHX_OK : PHX_FAILED;
    if (result == PHX_OK) { /* from here on the others see it where this one fails */
        for (int r = 0; r < ranks; r++) g->peers[r] = (struct pollfd){-1, POLLIN, 0};
        g->head = g->memory;
        g->seats = (struct seat *)(g->head + 1);
        result = open_peers(g, pids) ? PHX_FAILED : PHX_OK;
    }
    int why = errno;
    if (result == PHX_OK) {
        g->shares = (struct share *)(g->seats + ranks);
        g->slots = (uint8_t *)g->memory + before_slots(ranks);
        g->seats[rank].pid = pids[rank];
        g->spins = g->spins_beside = g->spins_least = spins(SPIN_NS / 50);
        tell_cores(g);
        result = phx_parcels_open(g, (uint8_t *)g->memory + before_parcels(ranks, slot)) ? PHX_FAILED : find_way(g, direct);
        long all = cores(g); /* with more threads than cores, who spins keeps the others from coming */
        if (ranks <= all) g->spins = spins(SPIN_NS);
        if (2 * ranks <= all) g->spins_beside = g->spins; /* where the others still compute meanwhile */
        why = result == PHX_FAILED ? ENOMEM : result == PHX_DEAD ? ESRCH : result == PHX_TIMEOUT ? ETIMEDOUT : ECONNABORTED;
    }
    if (result == PHX_OK) return g;
    phx_leave(g);
    errno = why;
    return NULL;
}

void phx_depart(phx_group *g) {
    atomic_store(&g->seats[g->rank].left, 1); /* before anyone of ours returns: who reads our memory looks after that */
    atomic_store(&g->departed, 1);
    phx_futex(&g->head->met, FUTEX_WAKE, INT_MAX, NULL);
    phx_queue_wake(g);
    phx_parcels_wake(g);
}

void phx_leave(phx_group *g) {
    if (g->head && phx_own(g)) phx_depart(g);
    phx_queue_close(g);
    phx_regions_close(g);
    phx_parcels_close(g);
    for (int r = 0; g->peers && r < g->ranks; r++)
        if (g->peers[r].fd >= 0) close(g->peers[r].fd);
    if (g->memory) munmap(g->memory, g->size);
    free(g->peers);
    free(g->scratch);
    free(g);
}
