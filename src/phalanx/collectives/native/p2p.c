/* Point-to-point messages. Waiting threads make progress for all of them; while none waits, the group's progress thread does. */
#define _GNU_SOURCE
#include "p2p.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "mailbox.h"

#define SENT 1              /* ticket of a send that was complete immediately */
#define CONTROL_BYTES 8192u /* of a ring for control records */
#define TICK_MS 2           /* poll interval of the progress thread while requests are open and no thread waits */
#define TICKS 50            /* polls after which it sleeps, or polls less often: waking it costs more than a poll */

/* With many ranks there are many rings. */
static uint32_t ring_bytes(int ranks) { return ranks <= 64 ? 64u << 10 : 16u << 10; }

static size_t pair_bytes(int ranks) { return 2 * sizeof(struct ring) + ring_bytes(ranks) + CONTROL_BYTES; }

size_t phx_p2p_memory(int ranks) {
    return (size_t)ranks * sizeof(struct doorbell) + (size_t)ranks * (size_t)ranks * pair_bytes(ranks);
}

static void wait_at(struct doorbell *b, uint32_t seen, int64_t deadline, uint32_t who) {
    struct timespec t = {deadline / 1000, deadline % 1000 * 1000000};
    syscall(SYS_futex, &b->rung, FUTEX_WAIT_BITSET, seen, deadline ? &t : NULL, NULL, who);
}

static void wake(struct doorbell *b, uint32_t which) {
    atomic_fetch_add(&b->rung, 1);
    syscall(SYS_futex, &b->rung, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, which);
}

static void wake_mailboxes(phx_group *g) {
    for (int r = 0; g->mailbox && r < g->ranks; r++) {
        atomic_fetch_or(&g->mailbox->doorbells[r].pending[g->rank / 32], 1u << g->rank % 32);
        wake(&g->mailbox->doorbells[r], BOTH);
    }
}

/* -- lock */

/* Set which thread the peers have to wake: a sleeping waiter, or the progress thread if no thread waits. */
static void set_wake(struct mailbox *q) {
    uint32_t wake = q->sleeping ? WAITER : q->open_requests && !q->waiters ? PROGRESS_THREAD : 0;
    if (atomic_load(&q->doorbell->wake) != wake) atomic_store(&q->doorbell->wake, wake);
}

static void release(struct mailbox *q) {
    for (set_wake(q); q->open_requests && !q->waiters && has_pending(q); set_wake(q)) mailbox_progress(q); /* arrived before the flag was set */
    int called = !q->waiters && (!list_empty(&q->reads) || (q->open_requests && q->thread_idle));
    uint32_t which = (q->wake_waiters && q->sleeping ? WAITER : 0) | (called ? PROGRESS_THREAD : 0);
    q->wake_waiters = 0;
    if (called) q->thread_idle = 0;
    pthread_mutex_unlock(&q->lock);
    if (which) wake(q->doorbell, which);
}

/* -- progress thread */

static void *progress_loop(void *mailbox) {
    struct mailbox *q = mailbox;
    int quiet = 0, idle = 0; /* polls since a request was open, and since a message arrived */
    pthread_mutex_lock(&q->lock);
    while (!q->closing) {
        if (mailbox_read(q, NULL)) continue;
        int alone = q->open_requests && !q->waiters;
        idle = alone && !has_pending(q) ? idle + 1 : 0;
        if (alone) mailbox_progress(q);
        if (!list_empty(&q->reads)) continue;
        set_wake(q);
        uint32_t seen = atomic_load(&q->doorbell->rung);
        if (q->open_requests && !q->waiters && has_pending(q)) continue;
        if (q->wake_waiters && q->sleeping) {
            q->wake_waiters = 0;
            wake(q->doorbell, WAITER);
            continue;
        }
        quiet = alone ? 0 : quiet + 1;
        q->thread_idle = quiet > TICKS;
        pthread_mutex_unlock(&q->lock);
        wait_at(q->doorbell, seen, quiet > TICKS ? 0 : phx_now_ms() + (idle > TICKS ? POLL_MS : TICK_MS), PROGRESS_THREAD);
        pthread_mutex_lock(&q->lock);
        q->thread_idle = 0;
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* Without this thread, requests make progress only while a thread waits. */
static void start_progress_thread(struct mailbox *q) {
    if (q->has_thread || !q->open_requests) return;
    sigset_t all, old_mask;
    pthread_attr_t small;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_mask); /* signals are for the script's threads */
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    q->has_thread = pthread_create(&q->thread, &small, progress_loop, q) == 0;
    pthread_attr_destroy(&small);
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
}

/* -- calls */

static int64_t deadline_after(int64_t timeout_ms) { return timeout_ms ? phx_now_ms() + timeout_ms : 0; }

uint64_t phx_send(phx_group *g, const void *data, size_t bytes, int to, int64_t tag, int64_t timeout_ms) {
    struct mailbox *q = g->mailbox;
    if (to < 0 || to >= g->ranks) return 0;
    pthread_mutex_lock(&q->lock);
    int error = phx_error(g), gone = q->peers[to].gone;
    uint64_t ticket = SENT;
    if (error || gone || !mailbox_send_eager(q, data, bytes, to, tag)) {
        struct request *p = mailbox_new_request(q, to, (void *)(uintptr_t)data, bytes, tag);
        ticket = p ? request_ticket(p) : 0;
        if (p) p->deadline = deadline_after(timeout_ms);
        if (p && (error || gone)) mailbox_finish(q, p, error ? error : PHX_DEAD, error ? -1 : to);
        else if (p) mailbox_queue_send(q, p), start_progress_thread(q);
    }
    release(q);
    return ticket;
}

uint64_t phx_recv(phx_group *g, void *data, size_t bytes, int from, int64_t tag, int64_t timeout_ms) {
    struct mailbox *q = g->mailbox;
    if (from < -1 || from >= g->ranks) return 0;
    pthread_mutex_lock(&q->lock);
    struct request *p = mailbox_new_request(q, from, data, bytes, tag);
    uint64_t ticket = p ? request_ticket(p) : 0;
    if (p) {
        int error = phx_error(g);
        p->deadline = deadline_after(timeout_ms);
        mailbox_post_recv(q, p);
        if (is_done(p)) ;
        else if (error) mailbox_finish(q, p, error, -1);
        else if (p->state == POSTED && from >= 0 && q->peers[from].gone) mailbox_finish(q, p, PHX_DEAD, from);
        else start_progress_thread(q);
        if (!is_done(p) && p->state == READING && bytes <= READ_AT_ONCE) mailbox_read(q, &p->link);
    }
    release(q);
    return ticket;
}

/* Check at intervals for events that ring no doorbell: exits and timeouts. */
static void check_request(struct mailbox *q, struct request *p) {
    int64_t now = phx_now_ms();
    if (now - q->last_check >= POLL_MS) mailbox_check_peers(q);
    if (!is_done(p) && !p->read_error && p->deadline && now >= p->deadline) mailbox_cancel(q, p, PHX_TIMEOUT, p->peer);
}

/* Releases the lock: `interrupted` may need the GIL, and its holder may wait for our lock. */
static void check_waiting(struct mailbox *q, struct request *p) {
    int (*interrupted)(void) = q->group->interrupted;
    int stop = 0;
    if (interrupted && phx_now_ms() - q->last_check >= POLL_MS) {
        pthread_mutex_unlock(&q->lock);
        stop = interrupted();
        pthread_mutex_lock(&q->lock);
    }
    check_request(q, p);
    if (stop && !is_done(p) && !p->read_error) mailbox_cancel(q, p, PHX_ABORTED, -1);
}

int phx_p2p_done(phx_group *g, uint64_t ticket) {
    struct mailbox *q = g->mailbox;
    if (ticket == SENT) return 1;
    pthread_mutex_lock(&q->lock);
    struct request *p = mailbox_find(q, ticket);
    if (p && !is_done(p)) mailbox_progress(q), check_request(q, p);
    int done = !p || is_done(p);
    release(q);
    return done;
}

/* Spin; return whether there is something to do. Do not spin on the core on which the peer runs. */
static int spin(const struct mailbox *q, const struct request *p, int peer) {
    int spins = q->group->spins;
    uint32_t core = (uint32_t)sched_getcpu() + 1;
    atomic_store_explicit(&q->doorbell->core, core, memory_order_relaxed);
    if (peer >= 0 && atomic_load_explicit(&q->doorbells[peer].core, memory_order_relaxed) == core) spins = q->group->spins_min;
    for (int i = 0; i < spins + 2; i++) {
        if (is_done(p) || has_pending(q) || atomic_load_explicit(&q->group->head->error, memory_order_relaxed)) return 1;
        if (i < spins) relax();
        else sched_yield();
    }
    return 0;
}

static void sleep_for(struct mailbox *q, const struct request *p, int64_t deadline) {
    int64_t next = q->last_check + POLL_MS;
    if (deadline && deadline < next) next = deadline;
    if (p->deadline && p->deadline < next) next = p->deadline;
    q->sleeping++;
    set_wake(q);
    uint32_t seen = atomic_load(&q->doorbell->rung);
    if (!is_done(p) && !has_pending(q) && list_empty(&q->reads) && !phx_error(q->group)) {
        pthread_mutex_unlock(&q->lock);
        wait_at(q->doorbell, seen, next, WAITER);
        pthread_mutex_lock(&q->lock);
    }
    q->sleeping--;
    set_wake(q);
}

int phx_p2p_wait(phx_group *g, uint64_t ticket, int64_t milliseconds, int *from, size_t *bytes) {
    struct mailbox *q = g->mailbox;
    *from = g->rank, *bytes = 0;
    if (ticket == SENT) return PHX_OK;
    int64_t deadline = deadline_after(milliseconds);
    pthread_mutex_lock(&q->lock);
    struct request *p = mailbox_find(q, ticket);
    if (!p) {
        pthread_mutex_unlock(&q->lock);
        return PHX_FAILED;
    }
    p->waiters++, q->waiters++;
    set_wake(q);
    while (!is_done(p)) {
        mailbox_progress(q);
        if (is_done(p) || mailbox_read(q, NULL)) continue;
        int peer = p->peer;
        pthread_mutex_unlock(&q->lock);
        int news = spin(q, p, peer);
        pthread_mutex_lock(&q->lock);
        if (news && phx_now_ms() - q->last_check < POLL_MS) continue; /* also check while messages arrive continuously */
        check_waiting(q, p);
        if (is_done(p) || (deadline && phx_now_ms() >= deadline)) break;
        if (!news) sleep_for(q, p, deadline);
    }
    int result = is_done(p) ? p->result : -1;
    *from = p->source, *bytes = p->peer_bytes;
    p->waiters--, q->waiters--;
    if (result >= 0 && !p->waiters) mailbox_free_request(q, p);
    release(q);
    return result;
}

/* -- open and close */

static struct ring_end ring_end_at(void *ring, uint32_t size) { return (struct ring_end){ring, size, 0, 0}; }

int phx_p2p_open(phx_group *g, void *memory) {
    struct mailbox *q = calloc(1, sizeof *q);
    if (!q) return -1;
    q->peers = calloc((size_t)g->ranks, sizeof *q->peers);
    q->watched = calloc((size_t)g->ranks, sizeof *q->watched);
    if (!q->peers || !q->watched) {
        free(q->peers), free(q->watched), free(q);
        return -1;
    }
    q->group = g, q->doorbells = memory, q->doorbell = &q->doorbells[g->rank];
    q->eager = ring_bytes(g->ranks) / 8;
    list_init(&q->any_source), list_init(&q->reads);
    pthread_mutex_init(&q->lock, NULL);
    uint8_t *rings = (uint8_t *)(q->doorbells + g->ranks);
    for (int r = 0; r < g->ranks; r++) {
        struct peer *p = &q->peers[r];
        uint8_t *to = rings + ((size_t)g->rank * (size_t)g->ranks + (size_t)r) * pair_bytes(g->ranks);
        uint8_t *from = rings + ((size_t)r * (size_t)g->ranks + (size_t)g->rank) * pair_bytes(g->ranks);
        uint32_t size = ring_bytes(g->ranks);
        p->out = ring_end_at(to, size), p->control_out = ring_end_at(to + sizeof(struct ring) + size, CONTROL_BYTES);
        p->in = ring_end_at(from, size), p->control_in = ring_end_at(from + sizeof(struct ring) + size, CONTROL_BYTES);
        list_init(&p->control_queue), list_init(&p->queue), list_init(&p->streams), list_init(&p->receives), list_init(&p->unexpected);
        q->watched[r] = (struct pollfd){r == g->rank ? -1 : g->peers[r].fd, POLLIN, 0};
    }
    g->mailbox = q, g->wake_mailbox = wake_mailboxes;
    return 0;
}

static void free_all(struct link *list) {
    while (!list_empty(list)) {
        struct link *l = list->next;
        list_remove(l);
        free(l);
    }
}

void phx_p2p_close(phx_group *g) {
    struct mailbox *q = g->mailbox;
    if (!q || !phx_is_owner(g)) return; /* a forked process has no progress thread, and perhaps a lock that is never released */
    pthread_mutex_lock(&q->lock);
    q->closing = 1;
    for (uint32_t i = 0; i < q->capacity; i++)
        if (!is_done(q->table[i])) mailbox_finish(q, q->table[i], PHX_ABORTED, -1);
    while (q->waiters) { /* they see that their requests are done */
        pthread_mutex_unlock(&q->lock);
        wake(q->doorbell, WAITER);
        sched_yield();
        pthread_mutex_lock(&q->lock);
    }
    pthread_mutex_unlock(&q->lock);
    wake(q->doorbell, PROGRESS_THREAD);
    if (q->has_thread) pthread_join(q->thread, NULL);
    pthread_mutex_destroy(&q->lock);
    for (int r = 0; r < g->ranks; r++) free_all(&q->peers[r].control_queue), free_all(&q->peers[r].unexpected);
    for (uint32_t i = 0; i < q->capacity; i++) free(q->table[i]);
    free(q->table), free(q->watched), free(q->peers), free(q);
    g->mailbox = NULL;
}
