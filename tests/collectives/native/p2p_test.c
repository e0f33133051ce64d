/* Messages between ranks that are threads of one process, for the thread and address sanitizers.

   Every rank maps the same memory at the same address (see mmap below), so that a sanitizer sees all accesses. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "group.h"

#define RANKS 4
#define SLOT 4096

static int memory_fd, staged;
static void *memory;

/* The linker redirects the library's calls to these functions (--wrap). */
void *__real_mmap(void *, size_t, int, int, int, off_t);
int __real_munmap(void *, size_t);
void *__wrap_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    return fd == memory_fd ? memory : __real_mmap(at, size, protection, flags, fd, offset);
}
int __wrap_munmap(void *at, size_t size) { return at == memory ? 0 : __real_munmap(at, size); }

static void expect(int right, const char *what, int line) {
    if (right) return;
    fprintf(stderr, "line %d: not so: %s\n", line, what);
    exit(1);
}
#define EXPECT(what) expect((what), #what, __LINE__)

static int ended(phx_group *g, uint64_t ticket) {
    int from;
    size_t bytes;
    return phx_p2p_wait(g, ticket, 0, &from, &bytes);
}

static uint8_t *made(size_t bytes, int seed) {
    uint8_t *data = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)(seed * 31 + (int)(i % 251));
    return data;
}

static size_t size_of(int from, int to, int tag) {
    static const size_t sizes[] = {0, 1, 16, 17, 4096, 8192, 8193, 70000, 300000, 1200000};
    return sizes[(from * 7 + to * 3 + tag) % 10];
}

/* Every rank sends to every rank. Receives are in the reverse order of tags, and some are from any source. */
static void crossing(phx_group *g, int tags) {
    int n = g->ranks * tags;
    uint64_t *sends = malloc((size_t)n * sizeof *sends), *recvs = malloc((size_t)n * sizeof *recvs);
    uint8_t **out = malloc((size_t)n * sizeof *out), **in = malloc((size_t)n * sizeof *in);
    for (int tag = 0; tag < tags; tag++)
        for (int r = 0; r < g->ranks; r++) {
            size_t bytes = size_of(g->rank, r, tag);
            out[tag * g->ranks + r] = made(bytes, g->rank + tag);
            sends[tag * g->ranks + r] = phx_send(g, out[tag * g->ranks + r], bytes, r, tag, 0);
        }
    for (int tag = tags - 1; tag >= 0; tag--)
        for (int r = 0; r < g->ranks; r++) {
            size_t bytes = size_of(r, g->rank, tag);
            in[tag * g->ranks + r] = malloc(bytes + 1);
            recvs[tag * g->ranks + r] = phx_recv(g, in[tag * g->ranks + r], bytes, r, tag, 0);
        }
    for (int i = 0; i < n; i++) {
        int from;
        size_t bytes, wanted = size_of(i % g->ranks, g->rank, i / g->ranks);
        EXPECT(phx_p2p_wait(g, recvs[i], 0, &from, &bytes) == PHX_OK);
        EXPECT(from == i % g->ranks && bytes == wanted);
        uint8_t *right = made(wanted, from + i / g->ranks);
        EXPECT(!memcmp(in[i], right, wanted));
        free(right);
        free(in[i]);
    }
    for (int i = 0; i < n; i++) EXPECT(ended(g, sends[i]) == PHX_OK), free(out[i]);
    free(sends), free(recvs), free(out), free(in);
}

/* Two threads of each rank at the same time. */
struct pair {
    phx_group *g;
    int base;
};

static void *round_trips(void *arg) {
    struct pair *p = arg;
    phx_group *g = p->g;
    int right = (g->rank + 1) % g->ranks, left = (g->rank + g->ranks - 1) % g->ranks;
    static const size_t sizes[] = {4, 5000, 20000, 700000};
    for (int i = 0; i < 12; i++) {
        size_t bytes = sizes[i % 4];
        uint8_t *out = made(bytes, i), *in = malloc(bytes);
        uint64_t recv = phx_recv(g, in, bytes, left, p->base, 0), send = phx_send(g, out, bytes, right, p->base, 0);
        while (i % 3 == 0 && !phx_p2p_done(g, recv)) sched_yield();
        EXPECT(ended(g, send) == PHX_OK);
        EXPECT(ended(g, recv) == PHX_OK);
        EXPECT(!memcmp(in, out, bytes));
        free(in), free(out);
    }
    return NULL;
}

static void threads(phx_group *g) {
    struct pair all[2] = {{g, 100}, {g, 101}};
    pthread_t t[2];
    for (int i = 0; i < 2; i++) pthread_create(&t[i], NULL, round_trips, &all[i]);
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
}

static void any_source(phx_group *g) {
    int seen = 0, value = g->rank;
    if (g->rank) {
        for (int i = 0; i < 50; i++) EXPECT(ended(g, phx_send(g, &value, sizeof value, 0, 7, 0)) == PHX_OK);
        return;
    }
    for (int i = 0; i < 50 * (g->ranks - 1); i++) {
        int from, got = -1;
        size_t bytes;
        EXPECT(phx_p2p_wait(g, phx_recv(g, &got, sizeof got, -1, 7, 0), 0, &from, &bytes) == PHX_OK);
        EXPECT(got == from && from > 0);
        seen += got;
    }
    EXPECT(seen == 50 * (g->ranks * (g->ranks - 1) / 2));
}

static void sizes_differ(phx_group *g) {
    static const size_t sent[] = {8, 40000}, wanted[] = {16, 50000};
    uint8_t *data = calloc(1, 60000);
    for (int i = 0; i < 2 && g->rank < 2; i++) {
        int from, result;
        size_t bytes;
        if (g->rank) {
            result = phx_p2p_wait(g, phx_send(g, data, sent[i], 0, 9, 0), 0, &from, &bytes);
            EXPECT(i ? result == PHX_MISMATCH && from == 0 && bytes == wanted[i] : result == PHX_OK);
        } else {
            result = phx_p2p_wait(g, phx_recv(g, data, wanted[i], 1, 9, 0), 0, &from, &bytes);
            EXPECT(result == PHX_MISMATCH && from == 1 && bytes == sent[i]);
        }
    }
    free(data);
}

/* A send that times out is withdrawn: a later receive does not read its memory. */
static void taken_back(phx_group *g) {
    uint8_t *data = made(100000, 3), ready = 0;
    int from;
    size_t bytes;
    if (g->rank == 0) {
        EXPECT(phx_p2p_wait(g, phx_send(g, data, 100000, 1, 11, 30), 0, &from, &bytes) == PHX_TIMEOUT && from == 1);
        memset(data, 0, 100000);
        EXPECT(ended(g, phx_send(g, &ready, 1, 1, 12, 0)) == PHX_OK);
        free(data), data = made(100000, 4);
        EXPECT(ended(g, phx_send(g, data, 100000, 1, 11, 0)) == PHX_OK); /* the next one arrives */
    } else if (g->rank == 1) {
        EXPECT(ended(g, phx_recv(g, &ready, 1, 0, 12, 0)) == PHX_OK);
        EXPECT(ended(g, phx_recv(g, data, 100000, 0, 11, 0)) == PHX_TIMEOUT);
        EXPECT(ended(g, phx_recv(g, data, 100000, 0, 11, 0)) == PHX_OK);
        uint8_t *right = made(100000, 4);
        EXPECT(!memcmp(data, right, 100000));
        free(right);
        EXPECT(ended(g, phx_recv(g, data, 1, 2, 13, 30)) == PHX_TIMEOUT);
    }
    free(data);
}

static void *rank(void *arg) {
    int32_t pids[RANKS];
    for (int r = 0; r < RANKS; r++) pids[r] = getpid();
    phx_group *g = phx_join(memory_fd, (int)(intptr_t)arg, RANKS, SLOT, pids, !staged, 60000, NULL);
    EXPECT(g != NULL);
    struct phx_call barrier = {.kind = PHX_BARRIER, .scale = 1.0};
    crossing(g, 8);
    any_source(g);
    sizes_differ(g);
    threads(g);
    taken_back(g);
    EXPECT(phx_run(g, &barrier) == PHX_OK);
    /* A rank that waits for one that leaves gets an error; earlier messages of that rank arrive. */
    uint8_t last = 0, *large = made(500000, 1);
    if (g->rank == 1) EXPECT(ended(g, phx_send(g, &last, 1, 2, 20, 0)) == PHX_OK);
    uint64_t never = g->rank == 0 ? phx_recv(g, large, 500000, 1, 21, 0) : g->rank == 3 ? phx_send(g, large, 500000, 1, 21, 0) : 0;
    if (g->rank == 1) {
        phx_leave(g);
    } else {
        if (g->rank == 2) EXPECT(ended(g, phx_recv(g, &last, 1, 1, 20, 0)) == PHX_OK);
        if (never) EXPECT(ended(g, never) == PHX_DEAD);
        EXPECT(ended(g, phx_recv(g, large, 1, 1, 22, 0)) == PHX_DEAD);
        if (g->rank == 0) EXPECT(ended(g, phx_recv(g, &last, 1, 2, 23, 0)) == PHX_OK);
        if (g->rank == 2) EXPECT(ended(g, phx_send(g, &last, 1, 0, 23, 0)) == PHX_OK);
        /* An abort ends the waits of all ranks. */
        uint64_t hung = phx_recv(g, large, 500000, -1, 24, 0);
        if (g->rank != 3) EXPECT(ended(g, phx_send(g, &last, 1, 3, 25, 0)) == PHX_OK);
        for (int r = 0; g->rank == 3 && r < 3; r += 2) EXPECT(ended(g, phx_recv(g, &last, 1, r, 25, 0)) == PHX_OK);
        if (g->rank == 3) phx_abort(g);
        EXPECT(ended(g, hung) == PHX_ABORTED);
        phx_leave(g);
    }
    free(large);
    return NULL;
}

static void run_ranks(void) {
    size_t size = phx_memory(RANKS, SLOT);
    memory_fd = memfd_create("p2p", 0);
    EXPECT(ftruncate(memory_fd, (off_t)size) == 0);
    memory = __real_mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
    pthread_t t[RANKS];
    for (intptr_t r = 0; r < RANKS; r++) pthread_create(&t[r], NULL, rank, (void *)r);
    for (int r = 0; r < RANKS; r++) pthread_join(t[r], NULL);
    __real_munmap(memory, size);
    close(memory_fd);
}

/* -- a rank that dies */

#ifdef PHX_FAULTS
extern _Atomic long phx_fault_in;
#define BATCH 8 /* groups at the same time: a group mostly waits */
#define MUCH 100000

/* The message arrived whole, or its other end has died. */
static void ended_somehow(phx_group *g, uint64_t ticket, const uint8_t *data, size_t bytes, int seed) {
    int result = ended(g, ticket);
    EXPECT(result == PHX_OK || result == PHX_DEAD);
    if (result != PHX_OK || !data) return;
    uint8_t *right = made(bytes, seed);
    EXPECT(!memcmp(data, right, bytes));
    free(right);
}

static void exchange(int own, const int32_t *pids, int victim, long point) {
    alarm(60);
    phx_group *g = phx_join(memory_fd, own, 2, SLOT, pids, !staged, 60000, NULL);
    EXPECT(g != NULL);
    uint8_t *small = made(100, 1), *large = made(MUCH, 2), *other = made(MUCH, 3), *in = calloc(2, MUCH);
    if (own == victim) phx_fault_in = point;
    if (own == 0) {
        uint64_t first = phx_send(g, small, 100, 1, 1, 0), second = phx_send(g, large, MUCH, 1, 2, 0);
        ended_somehow(g, phx_recv(g, in, MUCH, 1, 3, 0), in, MUCH, 3);
        ended_somehow(g, second, NULL, 0, 0);
        EXPECT(ended(g, first) == PHX_OK);
    } else {
        uint64_t second = phx_recv(g, in, MUCH, 0, 2, 0), reply = phx_send(g, other, MUCH, 0, 3, 0);
        ended_somehow(g, second, in, MUCH, 2);
        ended_somehow(g, phx_recv(g, in + MUCH, 100, 0, 1, 0), in + MUCH, 100, 1);
        ended_somehow(g, reply, NULL, 0, 0);
    }
    if (own == victim) _exit(0);
    int64_t since = phx_now_ms();
    EXPECT(ended(g, phx_recv(g, in, 1, victim, 4, 0)) == PHX_DEAD);
    EXPECT(phx_now_ms() - since < 5000);
    phx_leave(g);
    exit(0);
}

static int32_t *forked(int victim, long point) {
    int32_t *pids = __real_mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int go[2];
    size_t size = phx_memory(2, SLOT);
    memory_fd = memfd_create("p2p", 0);
    EXPECT(ftruncate(memory_fd, (off_t)size) == 0 && pipe(go) == 0);
    memory = __real_mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
    for (int r = 0; r < 2; r++) {
        int32_t pid = fork();
        if (!pid) {
            char begin;
            close(go[1]);
            EXPECT(read(go[0], &begin, 1) == 0); /* until all ranks exist */
            exchange(r, pids, victim, point);
        }
        pids[r] = pid;
    }
    close(go[0]), close(go[1]), close(memory_fd);
    __real_munmap(memory, size);
    return pids;
}

/* Kill the victim at each point that it reaches, until it survives. */
static int deaths(int victim) {
    int points = 0, survived = 0;
    for (long from = 1; !survived; from += BATCH) {
        int32_t *pids[BATCH];
        for (int i = 0; i < BATCH; i++) pids[i] = forked(victim, from + i);
        for (int i = 0; i < BATCH; i++) {
            for (int r = 0; r < 2; r++) {
                int status;
                waitpid(pids[i][r], &status, 0);
                int died = r == victim && WIFEXITED(status) && WEXITSTATUS(status) == 77;
                if (status && !died) fprintf(stderr, "rank %d dies at point %ld%s: rank %d\n", victim, from + i, staged ? ", staged" : "", r);
                EXPECT(!status || died);
                if (r == victim) survived |= !died, points += died;
            }
            __real_munmap(pids[i], 4096);
        }
    }
    return points;
}
#endif

int main(int argc, char **argv) {
#ifdef PHX_FAULTS
    if (argc > 1 && !strcmp(argv[1], "deaths")) {
        int points = deaths(0) + deaths(1);
        staged = 1;
        printf("%d deaths\n", points + deaths(0) + deaths(1));
        return 0;
    }
#endif
    (void)argc, (void)argv;
    run_ranks();
    staged = 1; /* no rank reads the memory of another */
    run_ranks();
    puts("ok");
    return 0;
}
