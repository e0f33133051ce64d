/* Collectives in order. Each call takes a ticket and begins when all earlier ones have finished: in the calling thread, or,
   if it was started asynchronously, in the group's own thread. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "ops.h"
#include "queue.h"

struct queued_call {
    struct queued_call *next;
    uint64_t ticket;
    struct phx_call call;
    struct phx_part parts[];
};

struct queue {
    pthread_mutex_t lock; /* for tickets and the list */
    pthread_cond_t filled;
    uint64_t issued;
    struct queued_call *first, **last;
    pthread_t thread;
    int has_thread, closing;
    _Atomic uint64_t finished; /* the last ticket that has finished; they finish in order */
    _Atomic uint64_t failed;   /* the first ticket that failed, and with it all later ones; 0: none */
    int error;
    atomic_u32 changes; /* of `finished`: threads that wait for a ticket sleep on it */
    atomic_u32 sleepers;
};

static void wake_queue(phx_group *g) {
    atomic_fetch_add(&g->queue->changes, 1);
    if (atomic_load(&g->queue->sleepers)) phx_futex(&g->queue->changes, FUTEX_WAKE_PRIVATE, INT_MAX, NULL);
}

int phx_queue_open(phx_group *g) {
    struct queue *q = g->queue = calloc(1, sizeof *q);
    if (!q) return -1;
    q->last = &q->first;
    g->wake_queue = wake_queue;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->filled, NULL);
    return 0;
}

/* -- order */

static int is_finished(struct queue *q, uint64_t ticket) { return atomic_load_explicit(&q->finished, memory_order_acquire) >= ticket; }

/* Wait for a ticket. Return 0, or -1: not finished after this time (0: no timeout). */
static int wait_for(phx_group *g, uint64_t ticket, int64_t timeout_ms, int interruptible) {
    struct queue *q = g->queue;
    for (int i = 0; i < g->spins_min; i++, relax())
        if (is_finished(q, ticket)) return 0;
    int64_t deadline = timeout_ms ? phx_now_ms() + timeout_ms : 0;
    int late = 0;
    atomic_fetch_add(&q->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&q->changes);
        if (is_finished(q, ticket)) break;
        int64_t left = deadline ? deadline - phx_now_ms() : POLL_MS;
        if ((late = left <= 0)) break;
        if (left > POLL_MS) left = POLL_MS;
        const struct timespec soon = {0, (long)left * 1000000L};
        if (phx_futex(&q->changes, FUTEX_WAIT_PRIVATE, seen, &soon) != 0 && errno != EAGAIN && interruptible && g->interrupted && g->interrupted())
            phx_fail(g, PHX_ABORTED); /* it will finish soon */
    }
    atomic_fetch_sub(&q->sleepers, 1);
    return late ? -1 : 0;
}

static int result_of(struct queue *q, uint64_t ticket) {
    uint64_t failed = atomic_load_explicit(&q->failed, memory_order_acquire);
    return failed && ticket >= failed ? q->error : PHX_OK;
}

static int run_collective(phx_group *g, const struct phx_call *c) {
    switch (c->kind) {
    case PHX_BARRIER: return phx_open_call(g, c, ++g->turn, 1);
    case PHX_ALL_REDUCE:
    case PHX_REDUCE: return phx_op_reduce(g, c);
    case PHX_REDUCE_SCATTER: return phx_op_reduce_scatter(g, c);
    default: return phx_op_copy(g, c);
    }
}

/* Execute a call when it is its turn. */
static int execute(phx_group *g, uint64_t ticket, const struct phx_call *call, int interruptible) {
    struct queue *q = g->queue;
    int result = result_of(q, ticket); /* a failed group stays failed, with the first error */
    if (result == PHX_OK) {
        g->timeout_ms = call->timeout_ms, g->deadline = 0, g->interruptible = interruptible;
        result = run_collective(g, call);
        if (result != PHX_OK) {
            q->error = result;
            atomic_store_explicit(&q->failed, ticket, memory_order_release);
        }
    }
    atomic_store_explicit(&q->finished, ticket, memory_order_seq_cst);
    wake_queue(g);
    return result;
}

int phx_run(phx_group *g, const struct phx_call *call) {
    struct queue *q = g->queue;
    pthread_mutex_lock(&q->lock);
    uint64_t ticket = ++q->issued;
    pthread_mutex_unlock(&q->lock);
    if (!is_finished(q, ticket - 1)) wait_for(g, ticket - 1, 0, 1);
    return execute(g, ticket, call, 1);
}

/* -- asynchronous calls */

static void *run_queue(void *group) {
    phx_group *g = group;
    struct queue *q = g->queue;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (!q->first && !q->closing) pthread_cond_wait(&q->filled, &q->lock);
        struct queued_call *s = q->first;
        if (!s) break;
        if (!(q->first = s->next)) q->last = &q->first;
        pthread_mutex_unlock(&q->lock);
        wait_for(g, s->ticket - 1, 0, 0);
        execute(g, s->ticket, &s->call, 0);
        free(s);
        pthread_mutex_lock(&q->lock);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* With all signals blocked: they are for the program's own threads. */
static int start_thread(phx_group *g) {
    sigset_t all, old_mask;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_mask);
    int failed = pthread_create(&g->queue->thread, NULL, run_queue, g);
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
    g->queue->has_thread = !failed;
    return failed;
}

uint64_t phx_start(phx_group *g, const struct phx_call *call) {
    struct queue *q = g->queue;
    size_t ins = (size_t)call->ins, outs = (size_t)call->outs;
    struct queued_call *s = malloc(sizeof *s + (ins + outs) * sizeof *s->parts);
    if (!s) return 0;
    s->next = NULL, s->call = *call;
    if (ins) memcpy(s->parts, call->in, ins * sizeof *s->parts);
    if (outs) memcpy(s->parts + ins, call->out, outs * sizeof *s->parts);
    s->call.in = s->parts, s->call.out = s->parts + ins;
    pthread_mutex_lock(&q->lock);
    uint64_t ticket = 0;
    if (q->has_thread || !start_thread(g)) {
        ticket = s->ticket = ++q->issued;
        *q->last = s;
        q->last = &s->next;
        pthread_cond_signal(&q->filled);
    }
    pthread_mutex_unlock(&q->lock);
    if (!ticket) free(s);
    return ticket;
}

int phx_done(phx_group *g, uint64_t ticket) { return is_finished(g->queue, ticket); }

int phx_wait(phx_group *g, uint64_t ticket, int64_t milliseconds) {
    return wait_for(g, ticket, milliseconds, 1) ? -1 : result_of(g->queue, ticket);
}

/* The thread ends once the group has failed or left: its remaining calls fail at once. A forked process has no such thread. */
void phx_queue_close(phx_group *g) {
    struct queue *q = g->queue;
    if (!q) return;
    if (!phx_is_owner(g)) return;
    if (q->has_thread) {
        pthread_mutex_lock(&q->lock);
        q->closing = 1;
        pthread_cond_signal(&q->filled);
        pthread_mutex_unlock(&q->lock);
        pthread_join(q->thread, NULL);
    }
    for (struct queued_call *s = q->first, *next; s; s = next) next = s->next, free(s);
    free(q);
}
