/* Calls in their order. Each takes a ticket and begins when all before it are over: in the thread that calls, or in one
   of the group's own for those that were merely started. */
#define _GNU_SOURCE
#include "group.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

struct started {
    struct started *next;
    uint64_t ticket;
    struct phx_call call;
    struct phx_part parts[];
};

struct queue {
    pthread_mutex_t lock; /* of tickets, and of the list */
    pthread_cond_t filled;
    uint64_t issued;
    struct started *first, **last;
    pthread_t thread;
    int threaded, closing;
    _Atomic uint64_t over;   /* tickets whose calls are over: in their order */
    _Atomic uint64_t failed; /* the first that failed, and all that came after it; 0: none */
    int how;
    word changes;            /* of `over`: who waits for a ticket sleeps here */
    word sleepers;
};

int phx_queue_open(phx_group *g) {
    struct queue *q = g->queue = calloc(1, sizeof *q);
    if (!q) return -1;
    q->last = &q->first;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->filled, NULL);
    return 0;
}

void phx_queue_wake(phx_group *g) {
    atomic_fetch_add(&g->queue->changes, 1);
    if (atomic_load(&g->queue->sleepers)) phx_futex(&g->queue->changes, FUTEX_WAKE_PRIVATE, INT_MAX, NULL);
}

/* -- turns */

static int is_over(struct queue *q, uint64_t ticket) { return atomic_load_explicit(&q->over, memory_order_acquire) >= ticket; }

/* Until that ticket is over. 0: it is; -1: not after so many milliseconds (0: for ever). Who asks may be interrupted. */
static int await(phx_group *g, uint64_t ticket, int64_t patience, int asks) {
    struct queue *q = g->queue;
    for (int i = 0; i < g->spins_least; i++, relax())
        if (is_over(q, ticket)) return 0;
    int64_t until = patience ? phx_now_ms() + patience : 0;
    int late = 0;
    atomic_fetch_add(&q->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&q->changes);
        if (is_over(q, ticket)) break;
        int64_t left = until ? until - phx_now_ms() : LOOK_MS;
        if ((late = left <= 0)) break;
        if (left > LOOK_MS) left = LOOK_MS;
        const struct timespec soon = {0, (long)left * 1000000L};
        if (phx_futex(&q->changes, FUTEX_WAIT_PRIVATE, seen, &soon) != 0 && errno != EAGAIN && asks && g->interrupted && g->interrupted())
            phx_give_up(g, PHX_ABORTED); /* then it is over soon */
    }
    atomic_fetch_sub(&q->sleepers, 1);
    return late ? -1 : 0;
}

static int result_of(struct queue *q, uint64_t ticket) {
    uint64_t failed = atomic_load_explicit(&q->failed, memory_order_acquire);
    return failed && ticket >= failed ? q->how : PHX_OK;
}

/* It is this call's turn. */
static int execute(phx_group *g, uint64_t ticket, const struct phx_call *call, int asks) {
    struct queue *q = g->queue;
    int result = result_of(q, ticket); /* once broken, always so, and for the first reason */
    if (result == PHX_OK) {
        g->patience = call->patience, g->until = 0, g->asks = asks;
        result = phx_execute(g, call);
        if (result != PHX_OK) {
            q->how = result;
            atomic_store_explicit(&q->failed, ticket, memory_order_release);
        }
    }
    atomic_store_explicit(&q->over, ticket, memory_order_seq_cst);
    phx_queue_wake(g);
    return result;
}

int phx_run(phx_group *g, const struct phx_call *call) {
    struct queue *q = g->queue;
    pthread_mutex_lock(&q->lock);
    uint64_t ticket = ++q->issued;
    pthread_mutex_unlock(&q->lock);
    if (!is_over(q, ticket - 1)) await(g, ticket - 1, 0, 1);
    return execute(g, ticket, call, 1);
}

/* -- what was started */

static void *work(void *group) {
    phx_group *g = group;
    struct queue *q = g->queue;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (!q->first && !q->closing) pthread_cond_wait(&q->filled, &q->lock);
        struct started *s = q->first;
        if (!s) break;
        if (!(q->first = s->next)) q->last = &q->first;
        pthread_mutex_unlock(&q->lock);
        await(g, s->ticket - 1, 0, 0);
        execute(g, s->ticket, &s->call, 0);
        free(s);
        pthread_mutex_lock(&q->lock);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* Signals are for the program's own threads. */
static int begin(phx_group *g) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&g->queue->thread, NULL, work, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    g->queue->threaded = !failed;
    return failed;
}

uint64_t phx_start(phx_group *g, const struct phx_call *call) {
    struct queue *q = g->queue;
    size_t ins = (size_t)call->ins, outs = (size_t)call->outs;
    struct started *s = malloc(sizeof *s + (ins + outs) * sizeof *s->parts);
    if (!s) return 0;
    s->next = NULL, s->call = *call;
    if (ins) memcpy(s->parts, call->in, ins * sizeof *s->parts);
    if (outs) memcpy(s->parts + ins, call->out, outs * sizeof *s->parts);
    s->call.in = s->parts, s->call.out = s->parts + ins;
    pthread_mutex_lock(&q->lock);
    uint64_t ticket = 0;
    if (q->threaded || !begin(g)) {
        ticket = s->ticket = ++q->issued;
        *q->last = s;
        q->last = &s->next;
        pthread_cond_signal(&q->filled);
    }
    pthread_mutex_unlock(&q->lock);
    if (!ticket) free(s);
    return ticket;
}

int phx_done(phx_group *g, uint64_t ticket) { return is_over(g->queue, ticket); }

int phx_wait(phx_group *g, uint64_t ticket, int64_t milliseconds) {
    return await(g, ticket, milliseconds, 1) ? -1 : result_of(g->queue, ticket);
}

/* The thread ends by itself once the group has: what it still has to do fails at once. A fork has no such thread. */
void phx_queue_close(phx_group *g) {
    struct queue *q = g->queue;
    if (!q) return;
    if (!phx_own(g)) return;
    if (q->threaded) {
        pthread_mutex_lock(&q->lock);
        q->closing = 1;
        pthread_cond_signal(&q->filled);
        pthread_mutex_unlock(&q->lock);
        pthread_join(q->thread, NULL);
    }
    for (struct started *s = q->first, *next; s; s = next) next = s->next, free(s);
    free(q);
}
