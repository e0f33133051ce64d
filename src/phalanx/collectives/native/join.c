/* Joins and leaves a group: opens and closes everything that a group consists of. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "group.h"
#include "p2p.h"
#include "queue.h"
#include "regions.h"

#define SPIN_NS 100000 /* how long a waiting thread spins before it sleeps */
#define SCRATCH_BYTES (1u << 20) /* bytes read from peers at a time: few system calls, and they stay in the L2 cache */

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static size_t slots_offset(int ranks) {
    size_t n = (size_t)ranks;
    return round_up(sizeof(struct header) + n * sizeof(struct member) + 2 * n * n * sizeof(struct transfer), 4096);
}

static size_t p2p_offset(int ranks, size_t slot) { return slots_offset(ranks) + (size_t)ranks * 2 * round_up(slot, 4096); }

size_t phx_memory(int ranks, size_t slot) { return p2p_offset(ranks, slot) + phx_p2p_memory(ranks); }

/* Test whether every rank can read the memory of every other one. Direct reads are used only if all can. */
static int try_direct(phx_group *g, int direct, int attempt) {
    struct member *own = &g->members[g->rank];
    static const uint64_t sample = 0x7068616c616e78ull;
    own->token = (uint64_t)(uintptr_t)&sample;
    int result = phx_barrier(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++) {
        uint64_t seen = 0;
        if (!direct || phx_read_peer(g, r, &seen, g->members[r].token, sizeof seen) || seen != sample)
            atomic_store(&g->head->unreadable[attempt], 1);
    }
    result = phx_barrier(g);
    g->direct = !atomic_load(&g->head->unreadable[attempt]);
    return result;
}

static int choose_direct(phx_group *g, int direct) {
    int result = try_direct(g, direct, 0);
    if (result != PHX_OK || g->direct) return result;
    /* Yama (ptrace_scope 1) allows only ancestors to read a process, plus one process that it names, with the
       descendants of that process. Ranks usually have the same parent, so naming it allows them to read each other. */
    if (direct) prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);
    return try_direct(g, direct, 1);
}

/* -- join and leave */

static int open_peers(phx_group *g, const int32_t *pids) {
    for (int r = 0; r < g->ranks; r++) {
        if (r == g->rank) continue;
        g->peers[r].fd = (int)syscall(SYS_pidfd_open, pids[r], 0);
        if (g->peers[r].fd < 0) return -1;
    }
    return 0;
}

/* Read one or two numbers from a file; return how many. */
static int read_numbers(const char *path, long *a, long *b) {
    FILE *file = fopen(path, "re");
    int found = file ? fscanf(file, "%ld %ld", a, b) : 0;
    if (file) fclose(file);
    return found;
}

/* Publish the cores that this rank may run on: ranks may be bound to different ones. */
static void publish_cores(phx_group *g) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    for (int core = 0; core < MAX_CORES && core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed)) atomic_fetch_or(&g->head->cores[core / 32], 1u << core % 32);
}

/* The number of cores that all ranks together may use, limited by affinity and by the container's CPU quota. */
static long cores(const phx_group *g) {
    long all = 0, quota = 0, period = 0, unused;
    for (int i = 0; i < MAX_CORES / 32; i++) all += __builtin_popcount(atomic_load(&g->head->cores[i]));
    if (!all) all = sysconf(_SC_NPROCESSORS_ONLN);
    if (read_numbers("/sys/fs/cgroup/cpu.max", &quota, &period) != 2) { /* cgroup v1 has two files */
        read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", &quota, &unused);
        read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_period_us", &period, &unused);
    }
    return quota > 0 && period > 0 && quota / period < all ? quota / period : all;
}

/* Number of polls that take this many nanoseconds: a pause instruction takes ten times longer on some processors. */
static int spins(long nanoseconds) {
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < 256; i++) relax();
    clock_gettime(CLOCK_MONOTONIC, &to);
    long took = (to.tv_sec - from.tv_sec) * 1000000000L + to.tv_nsec - from.tv_nsec;
    return (int)(nanoseconds * 256 / (took > 256 ? took : 256));
}

phx_group *phx_join(int fd, int rank, int ranks, size_t slot, const int32_t *pids, int direct, int64_t timeout_ms,
                    int (*interrupted)(void)) {
    phx_group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->rank = rank, g->ranks = ranks, g->slot = round_up(slot, 4096), g->size = phx_memory(ranks, slot);
    g->piece = round_up(SCRATCH_BYTES / (size_t)ranks, 4096);
    g->timeout_ms = timeout_ms, g->interrupted = interrupted, g->interruptible = 1, g->forks = phx_fork_count();
    g->memory = mmap(NULL, g->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    g->peers = calloc((size_t)ranks, sizeof *g->peers);
    g->scratch = aligned_alloc(4096, g->piece * (size_t)ranks);
    if (g->memory == MAP_FAILED) g->memory = NULL;
    int result = g->memory && g->peers && g->scratch && !phx_queue_open(g) ? PHX_OK : PHX_FAILED;
    if (result == PHX_OK) { /* from here on, the other ranks notice if this one fails */
        for (int r = 0; r < ranks; r++) g->peers[r] = (struct pollfd){-1, POLLIN, 0};
        g->head = g->memory;
        g->members = (struct member *)(g->head + 1);
        result = open_peers(g, pids) ? PHX_FAILED : PHX_OK;
    }
    int why = errno;
    if (result == PHX_OK) {
        g->transfers = (struct transfer *)(g->members + ranks);
        g->slots = (uint8_t *)g->memory + slots_offset(ranks);
        g->members[rank].pid = pids[rank];
        g->spins = g->spins_background = g->spins_min = spins(SPIN_NS / 50);
        publish_cores(g);
        result = phx_p2p_open(g, (uint8_t *)g->memory + p2p_offset(ranks, slot)) ? PHX_FAILED : choose_direct(g, direct);
        long all = cores(g); /* with more threads than cores, a spinning thread prevents the others from arriving */
        if (ranks <= all) g->spins = spins(SPIN_NS);
        if (2 * ranks <= all) g->spins_background = g->spins; /* enough cores for our own threads while the callers compute */
        why = result == PHX_FAILED ? ENOMEM : result == PHX_DEAD ? ESRCH : result == PHX_TIMEOUT ? ETIMEDOUT : ECONNABORTED;
    }
    if (result == PHX_OK) return g;
    phx_leave(g);
    errno = why;
    return NULL;
}

void phx_leave(phx_group *g) {
    if (g->head && phx_is_owner(g)) phx_announce_leave(g);
    phx_queue_close(g);
    phx_regions_close(g);
    phx_p2p_close(g);
    for (int r = 0; g->peers && r < g->ranks; r++)
        if (g->peers[r].fd >= 0) close(g->peers[r].fd);
    if (g->memory) munmap(g->memory, g->size);
    free(g->peers);
    free(g->scratch);
    free(g);
}
