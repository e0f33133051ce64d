#define _GNU_SOURCE
#include "shm.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "reduce.h"

#define LINE 64
#define LOOK_MS 20          /* how often who waits looks whether the others live */
#define FLAT (64u << 10)    /* bytes up to which every rank reduces everything by itself: one meeting */
#define PIECE (128u << 10)  /* bytes that are read from another's memory at once: they stay in the second cache */

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

static long futex(word *at, int op, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, at, op, value, timeout, NULL, 0);
}

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int reached(uint32_t count, uint32_t wanted) { return (int32_t)(count - wanted) >= 0; }

static size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

static size_t before_slots(int ranks) { return rounded(sizeof(struct header) + (size_t)ranks * sizeof(struct seat), 4096); }

size_t phx_memory(int ranks, size_t slot) { return before_slots(ranks) + (size_t)ranks * 2 * rounded(slot, 4096); }

static uint8_t *slot_of(const phx_group *g, int rank, uint32_t turn) {
    return g->slots + ((size_t)rank * 2 + (turn & 1)) * g->slot;
}

static struct notice *notice_of(const phx_group *g, int rank, uint32_t turn) { return &g->seats[rank].notice[turn & 1]; }

/* -- an end that all of them see */

static int broken(const phx_group *g) {
    uint32_t how = atomic_load(&g->head->broken);
    return how ? (int)how - 1 : PHX_OK;
}

static int give_up(phx_group *g, int how) {
    uint32_t none = 0;
    atomic_compare_exchange_strong(&g->head->broken, &none, (uint32_t)how + 1);
    futex(&g->head->met, FUTEX_WAKE, INT_MAX, NULL);
    return broken(g);
}

static void blame(phx_group *g, int rank) { atomic_fetch_or(&g->head->lost[rank / 32 % 8], 1u << rank % 32); }

void phx_abort(phx_group *g) { give_up(g, PHX_ABORTED); }

void phx_patience(phx_group *g, int64_t milliseconds) { g->patience = milliseconds; }

void phx_culprits(phx_group *g, uint8_t *ranks) {
    for (int r = 0; r < g->ranks; r++) ranks[r] = (atomic_load(&g->head->lost[r / 32 % 8]) >> r % 32) & 1;
}

/* Whether one that has not come is dead: the end of a process makes its pidfd readable, whoever reaps it. */
static int look(phx_group *g, int64_t until) {
    int dead = 0;
    if (poll(g->peers, (nfds_t)g->ranks, 0) > 0)
        for (int r = 0; r < g->ranks; r++)
            if (g->peers[r].revents && !reached(atomic_load(&g->seats[r].posted), g->round)) {
                blame(g, r);
                dead = 1;
            }
    if (dead) return give_up(g, PHX_DEAD);
    if (until && now_ms() >= until) {
        for (int r = 0; r < g->ranks; r++)
            if (!reached(atomic_load(&g->seats[r].posted), g->round)) blame(g, r);
        return give_up(g, PHX_TIMEOUT);
    }
    return PHX_OK;
}

/* -- meeting: what a rank has written before is seen by all of them after */

static int sleep_until_met(phx_group *g) {
    struct header *h = g->head;
    int64_t until = g->patience ? now_ms() + g->patience : 0;
    const struct timespec soon = {0, LOOK_MS * 1000000L};
    int result = PHX_OK;
    atomic_fetch_add(&h->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&h->met);
        if (reached(seen, g->round)) break;
        if ((result = broken(g)) != PHX_OK) break;
        if (futex(&h->met, FUTEX_WAIT, seen, &soon) != 0 && errno == ETIMEDOUT && (result = look(g, until)) != PHX_OK) break;
    }
    atomic_fetch_sub(&h->sleepers, 1);
    return result;
}

static int meet(phx_group *g) {
    struct header *h = g->head;
    uint32_t round = ++g->round;
    atomic_store_explicit(&g->seats[g->rank].posted, round, memory_order_release);
    if (atomic_fetch_add(&h->arrived, 1) + 1 == round * (uint32_t)g->ranks) {
        atomic_store(&h->met, round); /* before who sleeps is asked for, and they the other way round: nobody oversleeps */
        if (atomic_load(&h->sleepers)) futex(&h->met, FUTEX_WAKE, INT_MAX, NULL);
        return broken(g);
    }
    for (int i = 0; i < g->spins; i++) {
        if (reached(atomic_load_explicit(&h->met, memory_order_acquire), round)) return broken(g);
        relax();
    }
    for (int i = 0; i < 2; i++) {
        sched_yield();
        if (reached(atomic_load_explicit(&h->met, memory_order_acquire), round)) return broken(g);
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

/* Everybody tries whether it may read everybody's memory; if anyone may not, nobody does. */
static int try_direct(phx_group *g) {
    struct seat *own = &g->seats[g->rank];
    static const uint64_t sample = 0x7068616c616e78ull;
    own->token = (uint64_t)(uintptr_t)&sample;
    int result = meet(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++) {
        uint64_t seen = 0;
        if (r != g->rank && (read_peer(g, r, &seen, g->seats[r].token, sizeof seen) || seen != sample)) {
            atomic_fetch_add(&g->head->unreadable, 1);
            break;
        }
    }
    result = meet(g);
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

/* -- collectives */

static size_t less(size_t a, size_t b) { return a < b ? a : b; }

int phx_barrier(phx_group *g) { return meet(g); }

/* Where rank `part` of all begins, of `count` elements. */
static size_t begins(const phx_group *g, size_t count, int part) {
    size_t each = count / (size_t)g->ranks, more = count % (size_t)g->ranks;
    return each * (size_t)part + less((size_t)part, more);
}

/* Every rank reduces everything. */
static int reduce_flat(phx_group *g, void *data, size_t count, int dtype, int op, double before, double after) {
    const void *inputs[256];
    uint32_t turn = ++g->turn;
    memcpy(slot_of(g, g->rank, turn), data, count * phx_itemsize(dtype));
    int result = meet(g);
    if (result != PHX_OK) return result;
    for (int r = 0; r < g->ranks; r++) inputs[r] = slot_of(g, r, turn);
    phx_reduce(data, inputs, g->ranks, count, dtype, op, before, after);
    return PHX_OK;
}

/* Every rank reduces its part of what lies in the slots, in its own; then all take all parts. */
static int reduce_staged(phx_group *g, uint8_t *data, size_t count, int dtype, int op, double before, double after) {
    const void *inputs[256];
    size_t item = phx_itemsize(dtype), most = g->slot / item;
    for (size_t at = 0; at < count; at += most) {
        size_t some = less(count - at, most), from = begins(g, some, g->rank), to = begins(g, some, g->rank + 1);
        uint32_t turn = ++g->turn;
        memcpy(slot_of(g, g->rank, turn), data + at * item, some * item);
        int result = meet(g);
        if (result != PHX_OK) return result;
        for (int r = 0; r < g->ranks; r++) inputs[r] = slot_of(g, r, turn) + from * item;
        phx_reduce(slot_of(g, g->rank, turn) + from * item, inputs, g->ranks, to - from, dtype, op, before, after);
        if ((result = meet(g)) != PHX_OK) return result;
        for (int r = 0; r < g->ranks; r++) {
            size_t first = begins(g, some, r), last = begins(g, some, r + 1);
            memcpy(data + (at + first) * item, slot_of(g, r, turn) + first * item, (last - first) * item);
        }
    }
    return PHX_OK;
}

/* The same without slots: every rank reads its part from the memory of the others, and later theirs. */
static int reduce_direct(phx_group *g, uint8_t *data, size_t count, int dtype, int op, double before, double after) {
    const void *inputs[256];
    size_t item = phx_itemsize(dtype), most = PIECE / item;
    size_t from = begins(g, count, g->rank), to = begins(g, count, g->rank + 1);
    uint32_t turn = ++g->turn;
    notice_of(g, g->rank, turn)->address = (uint64_t)(uintptr_t)data;
    int result = meet(g);
    if (result != PHX_OK) return result;
    uint64_t where[256];
    for (int r = 0; r < g->ranks; r++) where[r] = notice_of(g, r, turn)->address;
    for (size_t at = from; at < to; at += most) {
        size_t some = less(to - at, most);
        for (int r = 0; r < g->ranks; r++) {
            inputs[r] = r == g->rank ? data + at * item : g->scratch + (size_t)r * PIECE;
            if (r != g->rank && read_peer(g, r, g->scratch + (size_t)r * PIECE, where[r] + at * item, some * item))
                return look(g, 0) ? broken(g) : give_up(g, PHX_FAILED);
        }
        phx_reduce(data + at * item, inputs, g->ranks, some, dtype, op, before, after);
    }
    if ((result = meet(g)) != PHX_OK) return result;
    for (int step = 1; step < g->ranks; step++) { /* each begins with another, so that not all read from one */
        int r = (g->rank + step) % g->ranks;
        size_t first = begins(g, count, r), last = begins(g, count, r + 1);
        if (read_peer(g, r, data + first * item, where[r] + first * item, (last - first) * item))
            return look(g, 0) ? broken(g) : give_up(g, PHX_FAILED);
    }
    return meet(g); /* until all have read, the tensor is theirs too */
}

int phx_all_reduce(phx_group *g, void *data, size_t count, int dtype, int op, double before, double after) {
    size_t bytes = count * phx_itemsize(dtype);
    if (bytes <= FLAT && bytes <= g->slot) return reduce_flat(g, data, count, dtype, op, before, after);
    if (g->direct) return reduce_direct(g, data, count, dtype, op, before, after);
    return reduce_staged(g, data, count, dtype, op, before, after);
}

int phx_broadcast(phx_group *g, void *data, size_t bytes, int root) {
    for (size_t at = 0; at < bytes || at == 0; at += g->slot) {
        size_t some = less(bytes - at, g->slot);
        uint32_t turn = ++g->turn;
        if (g->rank == root) memcpy(slot_of(g, root, turn), (uint8_t *)data + at, some);
        int result = meet(g);
        if (result != PHX_OK) return result;
        if (g->rank != root) memcpy((uint8_t *)data + at, slot_of(g, root, turn), some);
    }
    return PHX_OK;
}

int phx_all_gather(phx_group *g, void *out, const void *in, size_t bytes) {
    for (size_t at = 0; at < bytes || at == 0; at += g->slot) {
        size_t some = less(bytes - at, g->slot);
        uint32_t turn = ++g->turn;
        memcpy(slot_of(g, g->rank, turn), (const uint8_t *)in + at, some);
        int result = meet(g);
        if (result != PHX_OK) return result;
        for (int r = 0; r < g->ranks; r++) memcpy((uint8_t *)out + (size_t)r * bytes + at, slot_of(g, r, turn), some);
    }
    return PHX_OK;
}
