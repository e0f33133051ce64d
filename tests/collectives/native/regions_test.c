/* all_reduce calls of ranks that are threads, in memory that all have mapped: at different places, run and started, one
   after the other. Built with a sanitizer, which detects reads before writes. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "group.h"
#include "kernels.h"

#define RANKS 3
#define BYTES (2 * (size_t)PHX_REGION)
#define COUNT (PHX_REGION / 4 + 77)
#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))

static float *memory[RANKS];
static int fd;

/* Map the memory of the group at the same address for all ranks (-Wl,--wrap=mmap,--wrap=munmap). Otherwise a sanitizer
   does not see that the ranks synchronize through the same words. */
void *__real_mmap(void *, size_t, int, int, int, off_t);
int __real_munmap(void *, size_t);

static void *common;
static pthread_mutex_t mapping = PTHREAD_MUTEX_INITIALIZER;

void *__wrap_mmap(void *at, size_t size, int how, int flags, int of, off_t from) {
    if (of != fd) return __real_mmap(at, size, how, flags, of, from);
    pthread_mutex_lock(&mapping);
    if (!common) common = __real_mmap(at, size, how, flags, of, from);
    pthread_mutex_unlock(&mapping);
    return common;
}

int __wrap_munmap(void *at, size_t size) { return at == common ? 0 : __real_munmap(at, size); }

static void *rank(void *number) {
    int me = (int)(intptr_t)number;
    int32_t pids[RANKS];
    uint64_t there[RANKS];
    for (int r = 0; r < RANKS; r++) pids[r] = getpid(), there[r] = (uint64_t)(uintptr_t)memory[r];
    phx_group *g = phx_join(fd, me, RANKS, 4096, pids, me % 2, 60000, NULL);
    if (!g) FAIL("rank %d has not joined", me);
    if (phx_add_region(g, 1, BYTES, (void *const *)memory, there)) FAIL("no memory");
    for (int round = 0; round < 3; round++) {
        float *data = memory[me] + 16 * me + round;
        struct phx_part part = {data, COUNT * sizeof *data};
        struct phx_call call = {PHX_ALL_REDUCE, PHX_F32, PHX_SUM, 0, 1.0, 0, 60000, 0, 1, NULL, &part};
        for (size_t i = 0; i < COUNT; i++) data[i] = (float)((me + 1) * (int)(i % 1000) + round);
        int result = round % 2 ? phx_wait(g, phx_start(g, &call), 0) : phx_run(g, &call);
        if (result != PHX_OK) FAIL("rank %d: %d", me, result);
        for (size_t i = 0; i < COUNT; i++)
            if (data[i] != (float)(6 * (int)(i % 1000) + 3 * round)) FAIL("rank %d, round %d: %f at %zu", me, round, data[i], i);
    }
    phx_remove_region(g, 1);
    phx_leave(g);
    return NULL;
}

int main(void) {
    pthread_t threads[RANKS];
    fd = memfd_create("phalanx-test", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)phx_memory(RANKS, 4096))) FAIL("no memory");
    for (int r = 0; r < RANKS; r++)
        if (!(memory[r] = malloc(BYTES))) FAIL("no memory");
    for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, rank, (void *)(intptr_t)r);
    for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < RANKS; r++) free(memory[r]);
    puts("right");
}
