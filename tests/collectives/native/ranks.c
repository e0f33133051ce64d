/* All collectives with threads or processes as ranks, and a rank that dies at every point of each.

       ranks threads|processes N direct|staged    every kind, many sizes, run and started; then failures
       ranks deaths N direct|staged               one of N dies at each point in turn: no rank may hang        */
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
#include "kernels.h"

#define SLOT 4096
#define PATIENCE 60000
#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))

static const char *const NAMES[] = {"all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier"};

struct rank {
    int number, ranks, direct, fd;
    int32_t *pids;
    phx_group *group;
};

/* -- one collective of one rank */

struct work {
    struct phx_call call;
    struct phx_part in[PHX_MAX_RANKS], out[PHX_MAX_RANKS];
};

static int same(int kind) { return kind <= PHX_GATHER; }
static int reduces(int kind) { return kind == PHX_ALL_REDUCE || kind == PHX_REDUCE || kind == PHX_REDUCE_SCATTER; }

/* Bytes from one rank to another: all differ, and some are zero. */
static size_t bytes_of(int kind, size_t base, int from, int to) {
    size_t words = base / 4;
    switch (kind) {
    case PHX_ALL_GATHER:
    case PHX_GATHER: return 4 * (words + (words ? (size_t)from : 0));
    case PHX_SCATTER:
    case PHX_REDUCE_SCATTER: return 4 * (words + (words ? (size_t)to : 0));
    case PHX_ALL_TO_ALL: return 4 * (words * (size_t)((from + 2 * to) % 3) + (words ? (size_t)from : 0));
    default: return 4 * words;
    }
}

static int32_t value(int kind, int from, int to, size_t i) {
    return (int32_t)((size_t)from * 1000 + (same(kind) ? 0 : (size_t)to * 100000) + i);
}

static struct phx_part part(size_t bytes) { return (struct phx_part){malloc(bytes ? bytes : 1), bytes}; }

static void prepare(struct work *w, const struct rank *own, int kind, size_t base, int root) {
    memset(w, 0, sizeof *w);
    w->call = (struct phx_call){.kind = kind, .dtype = PHX_I32, .op = PHX_SUM, .root = root, .scale = 1, .timeout_ms = PATIENCE, .in = w->in, .out = w->out};
    int me = own->number, ranks = own->ranks, is_root = me == root;
    if (kind == PHX_ALL_GATHER || kind == PHX_GATHER) w->call.ins = 1;
    else if (kind == PHX_REDUCE_SCATTER || kind == PHX_ALL_TO_ALL || (kind == PHX_SCATTER && is_root)) w->call.ins = ranks;
    if (kind == PHX_ALL_GATHER || kind == PHX_ALL_TO_ALL || (kind == PHX_GATHER && is_root)) w->call.outs = ranks;
    else if (kind != PHX_GATHER && kind != PHX_BARRIER) w->call.outs = 1;
    for (int r = 0; r < w->call.ins; r++) {
        w->in[r] = part(bytes_of(kind, base, me, r));
        for (size_t i = 0; i < w->in[r].bytes / 4; i++) ((int32_t *)w->in[r].at)[i] = value(kind, me, r, i);
    }
    for (int r = 0; r < w->call.outs; r++) {
        w->out[r] = part(w->call.outs > 1 || kind == PHX_SCATTER ? bytes_of(kind, base, w->call.outs > 1 ? r : root, me) : bytes_of(kind, base, me, me));
        for (size_t i = 0; i < w->out[r].bytes / 4; i++) ((int32_t *)w->out[r].at)[i] = kind <= PHX_BROADCAST ? value(kind, me, me, i) : -1;
    }
}

static int32_t expected(const struct work *w, const struct rank *own, int which, size_t i) {
    int kind = w->call.kind, me = own->number, root = w->call.root;
    int32_t sum = 0;
    for (int r = 0; r < own->ranks; r++) sum += value(kind, r, me, i);
    if (kind == PHX_REDUCE) return me == root ? sum : value(kind, me, me, i);
    if (reduces(kind)) return sum;
    return value(kind, kind == PHX_BROADCAST || kind == PHX_SCATTER ? root : which, me, i);
}

static void check(const struct work *w, const struct rank *own) {
    for (int r = 0; r < w->call.outs; r++)
        for (size_t i = 0; i < w->out[r].bytes / 4; i++)
            if (((int32_t *)w->out[r].at)[i] != expected(w, own, r, i))
                FAIL("%s of %zu bytes, rank %d: element %zu of part %d is %d, not %d", NAMES[w->call.kind], w->out[r].bytes, own->number, i, r,
                     ((int32_t *)w->out[r].at)[i], expected(w, own, r, i));
}

static void finish(struct work *w) {
    for (int r = 0; r < w->call.ins; r++) free(w->in[r].at);
    for (int r = 0; r < w->call.outs; r++) free(w->out[r].at);
}

static void want(const struct rank *own, const char *what, int result, int wanted) {
    if (result != wanted) FAIL("%s, rank %d of %d: result %d, not %d", what, own->number, own->ranks, result, wanted);
}

/* -- successful calls, then the ways in which a group ends */

static const size_t SIZES[] = {0, 4, 100, 1300, 4096, 4100, 13000, 40000};
#define COUNT(a) (sizeof(a) / sizeof *(a))

static void collectives(const struct rank *own) {
    for (size_t s = 0; s < COUNT(SIZES); s++)
        for (int kind = 0; kind <= PHX_BARRIER; kind++)
            for (int root = 0; root < own->ranks; root += own->ranks > 1 ? own->ranks - 1 : 1) {
                struct work w;
                prepare(&w, own, kind, SIZES[s], root);
                const char *wrong = phx_validate(own->group, &w.call);
                if (wrong) FAIL("%s: %s", NAMES[kind], wrong);
                want(own, NAMES[kind], phx_run(own->group, &w.call), PHX_OK);
                check(&w, own);
                finish(&w);
            }
}

/* Many collectives are pending, and one is run after them. */
static void queued(const struct rank *own) {
    static const size_t sizes[] = {4, 8192, 100, 30000};
    struct work w[COUNT(sizes) * PHX_BARRIER], last;
    uint64_t tickets[COUNT(sizes) * PHX_BARRIER];
    int many = 0;
    for (size_t s = 0; s < COUNT(sizes); s++)
        for (int kind = 0; kind < PHX_BARRIER; kind++, many++) {
            prepare(&w[many], own, kind, sizes[s], 0);
            tickets[many] = phx_start(own->group, &w[many].call);
        }
    prepare(&last, own, PHX_ALL_REDUCE, 100, 0);
    want(own, "behind others", phx_run(own->group, &last.call), PHX_OK);
    if (!phx_done(own->group, tickets[many - 1])) FAIL("what was run has overtaken what was started");
    check(&last, own);
    finish(&last);
    for (int i = 0; i < many; i++) {
        want(own, "started", phx_wait(own->group, tickets[i], 0), PHX_OK);
        check(&w[i], own);
        finish(&w[i]);
    }
}

static int run(const struct rank *own, int kind, size_t base, int root, int64_t patience) {
    struct work w;
    prepare(&w, own, kind, base, root);
    w.call.timeout_ms = patience;
    int result = phx_run(own->group, &w.call);
    finish(&w);
    return result;
}

static void blames(const struct rank *own, int culprit) {
    uint8_t ranks[PHX_MAX_RANKS];
    phx_failed_ranks(own->group, ranks);
    for (int r = 0; r < own->ranks; r++)
        if (ranks[r] != (r == culprit)) FAIL("rank %d is %sto blame, it was %d", r, ranks[r] ? "" : "not ", culprit);
}

static void differing(const struct rank *own) {
    int last = own->ranks - 1, odd = own->number == last;
    want(own, "other kinds", run(own, odd ? PHX_BARRIER : PHX_ALL_REDUCE, 100, 0, PATIENCE), PHX_MISMATCH);
    struct phx_signature signature;
    phx_signature(own->group, 0, &signature);
    if (signature.kind != PHX_ALL_REDUCE || signature.bytes != 100) FAIL("rank 0 called %d of %d bytes", signature.kind, (int)signature.bytes);
    phx_signature(own->group, last, &signature);
    if (signature.kind != PHX_BARRIER) FAIL("the last rank called %d", signature.kind);
    want(own, "after that", run(own, PHX_BARRIER, 0, 0, PATIENCE), PHX_MISMATCH);
}

static void uneven(const struct rank *own) {
    struct work w;
    prepare(&w, own, PHX_ALL_TO_ALL, 100, 0);
    if (own->number == 0) w.out[own->ranks - 1].bytes -= 4;
    want(own, "other sizes", phx_run(own->group, &w.call), PHX_MISMATCH);
    if (own->number == 0) w.out[own->ranks - 1].bytes += 4;
    finish(&w);
}

/* Ranks that have reached a point of the story, in memory that all of them share. */
static atomic_int *arrived;

static void await_arrived(int ranks) {
    while (atomic_load(arrived) < ranks) usleep(1000);
}

static void late(const struct rank *own) {
    int last = own->ranks - 1;
    if (own->number != last) {
        atomic_fetch_add(arrived, 1);
        await_arrived(last);
        want(own, "late", run(own, PHX_ALL_REDUCE, 100, 0, 1000), PHX_TIMEOUT);
        blames(own, last);
        return;
    }
    while (phx_error(own->group) == PHX_OK) usleep(1000);
    want(own, "too late", run(own, PHX_ALL_REDUCE, 100, 0, 100), PHX_TIMEOUT);
}

static void aborted(const struct rank *own) {
    if (own->number) {
        uint64_t ticket = 0;
        struct work w;
        prepare(&w, own, PHX_ALL_GATHER, 100, 0);
        ticket = phx_start(own->group, &w.call);
        want(own, "not yet", phx_wait(own->group, ticket, 30), -1);
        atomic_fetch_add(arrived, 1);
        want(own, "aborted", phx_wait(own->group, ticket, 0), PHX_ABORTED);
        finish(&w);
        return;
    }
    await_arrived(own->ranks - 1);
    phx_abort(own->group);
}

static void left(const struct rank *own) {
    if (own->number == 0) return; /* leaves the group */
    want(own, "left", run(own, PHX_ALL_REDUCE, 100, 0, PATIENCE), PHX_DEAD);
    blames(own, 0);
}

static void (*const stories[])(const struct rank *) = {collectives, queued, differing, uneven, late, aborted, left};

/* -- ranks */

static void *memory_at;
static int mappings;
static pthread_mutex_t mapping = PTHREAD_MUTEX_INITIALIZER;

/* Threads share one mapping. Otherwise the sanitizer does not see that it is the same memory. */
void *shared_mmap(void *at, size_t size, int protection, int flags, int fd, off_t from) {
    pthread_mutex_lock(&mapping);
    if (!mappings++) memory_at = mmap(at, size, protection, flags, fd, from);
    pthread_mutex_unlock(&mapping);
    return memory_at;
}

int shared_munmap(void *at, size_t size) {
    pthread_mutex_lock(&mapping);
    int result = --mappings ? 0 : munmap(at, size);
    pthread_mutex_unlock(&mapping);
    return result;
}

static phx_group *join(const struct rank *own) {
    phx_group *g = phx_join(own->fd, own->number, own->ranks, SLOT, own->pids, own->direct, PATIENCE, NULL);
    if (!g) FAIL("rank %d cannot join: %m", own->number);
    if (phx_direct(g) && !own->direct) FAIL("direct, although that was not wanted");
    return g;
}

static void (*story)(const struct rank *);

static void *be(void *rank) {
    struct rank *own = rank;
    own->group = join(own);
    story(own);
    phx_leave(own->group);
    return NULL;
}

static int memory(int ranks) {
    int fd = memfd_create("ranks", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)phx_memory(ranks, SLOT))) FAIL("no memory: %m");
    return fd;
}

static void in_threads(int ranks, int direct) {
    int32_t pids[PHX_MAX_RANKS];
    pthread_t threads[PHX_MAX_RANKS];
    struct rank all[PHX_MAX_RANKS];
    int fd = memory(ranks);
    for (int r = 0; r < ranks; r++) pids[r] = getpid();
    for (int r = 0; r < ranks; r++) {
        all[r] = (struct rank){r, ranks, direct, fd, pids, NULL};
        pthread_create(&threads[r], NULL, be, &all[r]);
    }
    for (int r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
    close(fd);
}

/* Start processes that know each other's pid. */
static int32_t *fork_all(int ranks, int direct, void (*body)(struct rank *)) {
    int32_t *pids = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int fd = memory(ranks), go[2];
    if (pipe(go)) FAIL("no pipe");
    for (int r = 0; r < ranks; r++) {
        pid_t pid = fork();
        if (pid == 0) {
            char begin;
            close(go[1]);
            if (read(go[0], &begin, 1) != 0) _exit(1); /* until all ranks exist */
            struct rank own = {r, ranks, direct, fd, pids, NULL};
            body(&own);
            if (r) _exit(0); /* exit() makes the sanitizer search for leaks, which takes seconds: only rank 0 does it */
            exit(0);
        }
        pids[r] = pid;
    }
    close(go[0]);
    close(go[1]);
    close(fd);
    return pids;
}

static void be_process(struct rank *own) { be(own); }

static void in_processes(int ranks, int direct) {
    int32_t *pids = fork_all(ranks, direct, be_process);
    for (int r = 0; r < ranks; r++) {
        int status;
        if (waitpid(pids[r], &status, 0) < 0 || status) FAIL("rank %d ended with %x", r, status);
    }
    munmap(pids, 4096);
}

/* -- deaths */

#ifdef PHX_FAULTS
static int deadly;      /* kind */
static size_t how_much;
static long point;
static int victim;

static void die_or_not(struct rank *own) {
    alarm(60);
    own->group = join(own);
    if (run(own, PHX_BARRIER, 0, 0, PATIENCE)) FAIL("not even begun");
    if (own->number == victim) phx_fault_in = point;
    int result = run(own, deadly, how_much, 0, PATIENCE);
    if (own->number == victim) {
        phx_fault_in = 0;
        if (result) FAIL("%s, point %ld: %d without a death", NAMES[deadly], point, result);
        exit(0); /* it has fewer points; for the others this is the same, because it does not join the next collective */
    }
    int64_t since = phx_now_ms();
    if (result != PHX_OK && result != PHX_DEAD) FAIL("%s, point %ld, rank %d: %d", NAMES[deadly], point, own->number, result);
    want(own, "after a death", run(own, PHX_ALL_REDUCE, 4, 0, PATIENCE), PHX_DEAD);
    blames(own, victim);
    if (phx_now_ms() - since > PATIENCE / 2) FAIL("%s, point %ld: seen after %d ms only", NAMES[deadly], point, (int)(phx_now_ms() - since));
    phx_leave(own->group);
}

/* Test all points of a kind concurrently, in as many groups, because a group mostly waits. Ends when a victim survives. */
static void deaths(int ranks, int direct) {
    static const size_t sizes[] = {100, 9000};
    enum { BATCH = 8 };
    int points = 0;
    for (deadly = 0; deadly <= PHX_BARRIER; deadly++)
        for (size_t s = 0; s < COUNT(sizes); s++)
            for (victim = 0; victim < ranks; victim += ranks - 1) {
                int survived = 0;
                how_much = sizes[s];
                for (long from = 1; !survived; from += BATCH) {
                    int32_t *pids[BATCH];
                    for (int i = 0; i < BATCH; i++) point = from + i, pids[i] = fork_all(ranks, direct, die_or_not);
                    for (int i = 0; i < BATCH; i++) {
                        for (int r = 0; r < ranks; r++) {
                            int status;
                            waitpid(pids[i][r], &status, 0);
                            int died = r == victim && WIFEXITED(status) && WEXITSTATUS(status) == 77;
                            if (status && !died) FAIL("%s of %zu bytes, rank %d dies at point %ld: rank %d ended with %x", NAMES[deadly], how_much, victim, from + i, r, status);
                            if (r == victim) survived |= !died, points += died;
                        }
                        munmap(pids[i], 4096);
                    }
                }
            }
    printf("%d deaths\n", points);
}
#endif

int main(int count, char **words) {
    if (count != 4) FAIL("ranks threads|processes|deaths N direct|staged");
    int ranks = atoi(words[2]), direct = !strcmp(words[3], "direct");
#ifdef PHX_FAULTS
    if (!strcmp(words[1], "deaths")) return deaths(ranks, direct), 0;
#endif
    arrived = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < COUNT(stories); i++) {
        story = stories[i];
        atomic_store(arrived, 0);
        if (ranks == 1 && i > 1) break; /* one rank cannot fail like this */
        if (!strcmp(words[1], "threads")) in_threads(ranks, direct);
        else in_processes(ranks, direct);
    }
    return 0;
}
