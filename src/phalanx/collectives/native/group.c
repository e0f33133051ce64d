#define _GNU_SOURCE
#include "group.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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
    return how ? (int)how - 1 : PHX_OK;
}

int phx_give_up(phx_group *g, int how) {
    uint32_t none = 0;
    atomic_compare_exchange_strong(&g->head->broken, &none, (uint32_t)how + 1);
    phx_futex(&g->head->met, FUTEX_WAKE, INT_MAX, NULL);
    return phx_broken(g);
}

void phx_blame(phx_group *g, int rank) { atomic_fetch_or(&g->head->lost[rank / 32 % 8], 1u << rank % 32); }

void phx_abort(phx_group *g) { phx_give_up(g, PHX_ABORTED); }

void phx_patience(phx_group *g, int64_t milliseconds) { g->patience = milliseconds; }

void phx_culprits(phx_group *g, uint8_t *ranks) {
    for (int r = 0; r < g->ranks; r++) ranks[r] = (atomic_load(&g->head->lost[r / 32 % 8]) >> r % 32) & 1;
}

/* Whether one that has not come is dead: the end of a process makes its pidfd readable, whoever reaps it. */
int phx_look(phx_group *g, int64_t until) {
    int dead = 0;
    if (poll(g->peers, (nfds_t)g->ranks, 0) > 0)
        for (int r = 0; r < g->ranks; r++)
            if (g->peers[r].revents && !reached(atomic_load(&g->seats[r].posted), g->round)) {
                phx_blame(g, r);
                dead = 1;
            }
    if (dead) return phx_give_up(g, PHX_DEAD);
    if (until && phx_now_ms() >= until) {
        for (int r = 0; r < g->ranks; r++)
            if (!reached(atomic_load(&g->seats[r].posted), g->round)) phx_blame(g, r);
        return phx_give_up(g, PHX_TIMEOUT);
    }
    return PHX_OK;
}

/* -- meeting: what a rank has written before is seen by all of them after */

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
        if (phx_futex(&h->met, FUTEX_WAIT, seen, &soon) != 0 && errno == ETIMEDOUT && (result = phx_look(g, until)) != PHX_OK) break;
    }
    atomic_fetch_sub(&h->sleepers, 1);
    return result;
}

int phx_meet(phx_group *g) {
    struct header *h = g->head;
    uint32_t round = ++g->round;
    atomic_store_explicit(&g->seats[g->rank].posted, round, memory_order_release);
    if (atomic_fetch_add(&h->arrived, 1) + 1 == round * (uint32_t)g->ranks) {
        atomic_store(&h->met, round); /* before who sleeps is asked for, and they the other way round: nobody oversleeps */
        if (atomic_load(&h->sleepers)) phx_futex(&h->met, FUTEX_WAKE, INT_MAX, NULL);
        return phx_broken(g);
    }
    for (int i = 0; i < g->spins; i++) {
        if (reached(atomic_load_explicit(&h->met, memory_order_acquire), round)) return phx_broken(g);
        relax();
    }
    for (int i = 0; i < 2; i++) {
        sched_yield();
        if (reached(atomic_load_explicit(&h->met, memory_order_acquire), round)) return phx_broken(g);
    }
    return sleep_until_met(g);
}

/* -- coming and going */

static int open_peers(phx_group *g, const int32_t *pids) {
    for (int r = 0; r < g->ranks; r++) {
        g->peers[r] = (struct pollfd){-1, POLLIN, 0};
        if (r == g->rank) continue;
        g->peers[r].fd = (int)syscall(SYS_pidfd_open, pids[r], 0);
        if (g->peers[r].fd < 0) return -1;
    }
    return 0;
}

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

/* Everybody tries whether it may read everybody's memory; if anyone may not, nobody does. */
static int try_direct(phx_group *g) {
    struct seat *own = &g->seats[g->rank];
    static const uint64_t sample = 0x7068616c616e78ull;
    own->token = (uint64_t)(uintptr_t)&sample;
    int result = phx_meet(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++) {
        uint64_t seen = 0;
        if (r != g->rank && (phx_read_peer(g, r, &seen, g->seats[r].token, sizeof seen) || seen != sample)) {
            atomic_fetch_add(&g->head->unreadable, 1);
            break;
        }
    }
    result = phx_meet(g);
    g->direct = !atomic_load(&g->head->unreadable);
    return result;
}

phx_group *phx_join(int fd, int rank, int ranks, size_t slot, const int32_t *pids) {
    phx_group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->rank = rank, g->ranks = ranks, g->slot = rounded(slot, 4096), g->size = phx_memory(ranks, slot);
    g->memory = mmap(NULL, g->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    g->peers = calloc((size_t)ranks, sizeof *g->peers);
    g->scratch = aligned_alloc(4096, (size_t)PIECE * (size_t)ranks);
    if (g->memory == MAP_FAILED || !g->peers || !g->scratch || open_peers(g, pids)) {
        int why = errno;
        if (g->memory == MAP_FAILED) g->memory = NULL;
        phx_leave(g);
        errno = why;
        return NULL;
    }
    g->head = g->memory;
    g->seats = (struct seat *)(g->head + 1);
    g->slots = (uint8_t *)g->memory + before_slots(ranks);
    g->seats[rank].pid = pids[rank];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) cores = CPU_COUNT(&allowed);
    g->spins = ranks <= cores ? 4000 : 100; /* with more ranks than cores, who spins keeps the others from coming */
    g->patience = 60000;
    if (try_direct(g) != PHX_OK) {
        phx_leave(g);
        errno = ECONNABORTED;
        return NULL;
    }
    return g;
}

void phx_leave(phx_group *g) {
    for (int r = 0; g->peers && r < g->ranks; r++)
        if (g->peers[r].fd >= 0 && r != g->rank) close(g->peers[r].fd);
    if (g->memory) munmap(g->memory, g->size);
    free(g->peers);
    free(g->scratch);
    free(g);
}
