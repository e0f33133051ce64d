/* Messages from rank to rank. Whoever waits moves them on; while nobody does, a thread of the group's own. */
#define _GNU_SOURCE
#include "post.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SENT 1              /* ticket of what was over at once */
#define WORDS 8192u         /* bytes of a ring for TAKEN, GO, WITHDRAWN */
#define TICK_MS 2           /* how often the helper looks while something is under way and nobody waits */
#define TICKS 50            /* how often it still does, once nothing is or nothing comes: to be called costs more */

/* With many ranks there are many rings. */
static uint32_t ring_bytes(int ranks) { return ranks <= 64 ? 64u << 10 : 16u << 10; }

static size_t pair_bytes(int ranks) { return 2 * sizeof(struct ring) + ring_bytes(ranks) + WORDS; }

size_t phx_parcels_memory(int ranks) {
    return (size_t)ranks * sizeof(struct bell) + (size_t)ranks * (size_t)ranks * pair_bytes(ranks);
}

static void sleep_at(struct bell *b, uint32_t seen, int64_t until, uint32_t who) {
    struct timespec t = {until / 1000, until % 1000 * 1000000};
    syscall(SYS_futex, &b->rung, FUTEX_WAIT_BITSET, seen, until ? &t : NULL, NULL, who);
}

static void rouse(struct bell *b, uint32_t whom) {
    atomic_fetch_add(&b->rung, 1);
    syscall(SYS_futex, &b->rung, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, whom);
}

void phx_parcels_wake(phx_group *g) {
    for (int r = 0; g->post && r < g->ranks; r++) {
        atomic_fetch_or(&g->post->bells[r].mail[g->rank / 32], 1u << g->rank % 32);
        rouse(&g->post->bells[r], BOTH);
    }
}

/* -- the lock, and what has to be said when it is given back */

/* Whom the others have to wake: who waits and sleeps; the helper only where nobody waits. */
static void set_wake(struct phx_post *q) {
    uint32_t wake = q->asleep ? WAITER : q->open && !q->waiters ? HELPER : 0;
    if (atomic_load(&q->bell->wake) != wake) atomic_store(&q->bell->wake, wake);
}

static void release(struct phx_post *q) {
    for (set_wake(q); q->open && !q->waiters && has_mail(q); set_wake(q)) post_move(q); /* came before we said so */
    int called = !q->waiters && (!is_empty(&q->reads) || (q->open && q->dozing));
    uint32_t whom = (q->stirred && q->asleep ? WAITER : 0) | (called ? HELPER : 0);
    q->stirred = 0;
    if (called) q->dozing = 0;
    pthread_mutex_unlock(&q->lock);
    if (whom) rouse(q->bell, whom);
}

/* -- the helper */

static void *help(void *post) {
    struct phx_post *q = post;
    int quiet = 0, idle = 0; /* looks since anything was under way, and since anything came */
    pthread_mutex_lock(&q->lock);
    while (!q->closing) {
        if (post_read(q, NULL)) continue;
        int alone = q->open && !q->waiters;
        idle = alone && !has_mail(q) ? idle + 1 : 0;
        if (alone) post_move(q);
        if (!is_empty(&q->reads)) continue;
        set_wake(q);
        uint32_t seen = atomic_load(&q->bell->rung);
        if (q->open && !q->waiters && has_mail(q)) continue;
        if (q->stirred && q->asleep) {
            q->stirred = 0;
            rouse(q->bell, WAITER);
            continue;
        }
        quiet = alone ? 0 : quiet + 1;
        q->dozing = quiet > TICKS;
        pthread_mutex_unlock(&q->lock);
        sleep_at(q->bell, seen, quiet > TICKS ? 0 : phx_now_ms() + (idle > TICKS ? LOOK_MS : TICK_MS), HELPER);
        pthread_mutex_lock(&q->lock);
        q->dozing = 0;
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* Without one, things go on only while somebody waits. */
static void need_helper(struct phx_post *q) {
    if (q->helping || !q->open) return;
    sigset_t all, before;
    pthread_attr_t small;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the script's threads */
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    q->helping = pthread_create(&q->helper, &small, help, q) == 0;
    pthread_attr_destroy(&small);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* -- calls */

static int64_t end_of(int64_t patience) { return patience ? phx_now_ms() + patience : 0; }

uint64_t phx_send(phx_group *g, const void *data, size_t bytes, int to, int64_t tag, int64_t patience) {
    struct phx_post *q = g->post;
    if (to < 0 || to >= g->ranks) return 0;
    pthread_mutex_lock(&q->lock);
    int broken = phx_broken(g), gone = q->peers[to].gone;
    uint64_t ticket = SENT;
    if (broken || gone || !post_at_once(q, data, bytes, to, tag)) {
        struct parcel *p = post_parcel(q, to, (void *)(uintptr_t)data, bytes, tag);
        ticket = p ? post_ticket(p) : 0;
        if (p) p->until = end_of(patience);
        if (p && (broken || gone)) post_finish(q, p, broken ? broken : PHX_DEAD, broken ? -1 : to);
        else if (p) post_queue(q, p), need_helper(q);
    }
    release(q);
    return ticket;
}

uint64_t phx_recv(phx_group *g, void *data, size_t bytes, int from, int64_t tag, int64_t patience) {
    struct phx_post *q = g->post;
    if (from < -1 || from >= g->ranks) return 0;
    pthread_mutex_lock(&q->lock);
    struct parcel *p = post_parcel(q, from, data, bytes, tag);
    uint64_t ticket = p ? post_ticket(p) : 0;
    if (p) {
        int broken = phx_broken(g);
        p->until = end_of(patience);
        post_await(q, p);
        if (is_over(p)) ;
        else if (broken) post_finish(q, p, broken, -1);
        else if (p->stage == AWAITED && from >= 0 && q->peers[from].gone) post_finish(q, p, PHX_DEAD, from);
        else need_helper(q);
        if (!is_over(p) && p->stage == READING && bytes <= AT_ONCE) post_read(q, &p->link);
    }
    release(q);
    return ticket;
}

/* Looks, now and then, for what nobody rings for. */
static void check(struct phx_post *q, struct parcel *p) {
    int64_t now = phx_now_ms();
    if (now - q->looked >= LOOK_MS) post_look(q);
    if (!is_over(p) && !p->verdict && p->until && now >= p->until) post_withdraw(q, p, PHX_TIMEOUT, p->peer);
}

/* Without the lock: who is interrupted may need Python's, and who has that may wait for ours. */
static void check_waiting(struct phx_post *q, struct parcel *p) {
    int (*interrupted)(void) = q->group->interrupted;
    int stop = 0;
    if (interrupted && phx_now_ms() - q->looked >= LOOK_MS) {
        pthread_mutex_unlock(&q->lock);
        stop = interrupted();
        pthread_mutex_lock(&q->lock);
    }
    check(q, p);
    if (stop && !is_over(p) && !p->verdict) post_withdraw(q, p, PHX_ABORTED, -1);
}

int phx_parcel_done(phx_group *g, uint64_t ticket) {
    struct phx_post *q = g->post;
    if (ticket == SENT) return 1;
    pthread_mutex_lock(&q->lock);
    struct parcel *p = post_find(q, ticket);
    if (p && !is_over(p)) post_move(q), check(q, p);
    int done = !p || is_over(p);
    release(q);
    return done;
}

/* Whether there is something to do. Who is awaited can do nothing while we look on its core. */
static int spin(const struct phx_post *q, const struct parcel *p, int peer) {
    int spins = q->group->spins;
    uint32_t core = (uint32_t)sched_getcpu() + 1;
    atomic_store_explicit(&q->bell->core, core, memory_order_relaxed);
    if (peer >= 0 && atomic_load_explicit(&q->bells[peer].core, memory_order_relaxed) == core) spins = q->group->spins_least;
    for (int i = 0; i < spins + 2; i++) {
        if (is_over(p) || has_mail(q) || atomic_load_explicit(&q->group->head->broken, memory_order_relaxed)) return 1;
        if (i < spins) relax();
        else sched_yield();
    }
    return 0;
}

static void sleep_for(struct phx_post *q, const struct parcel *p, int64_t until) {
    int64_t next = q->looked + LOOK_MS;
    if (until && until < next) next = until;
    if (p->until && p->until < next) next = p->until;
    q->asleep++;
    set_wake(q);
    uint32_t seen = atomic_load(&q->bell->rung);
    if (!is_over(p) && !has_mail(q) && is_empty(&q->reads) && !phx_broken(q->group)) {
        pthread_mutex_unlock(&q->lock);
        sleep_at(q->bell, seen, next, WAITER);
        pthread_mutex_lock(&q->lock);
    }
    q->asleep--;
    set_wake(q);
}

int phx_parcel_wait(phx_group *g, uint64_t ticket, int64_t milliseconds, int *from, size_t *bytes) {
    struct phx_post *q = g->post;
    *from = g->rank, *bytes = 0;
    if (ticket == SENT) return PHX_OK;
    int64_t until = end_of(milliseconds);
    pthread_mutex_lock(&q->lock);
    struct parcel *p = post_find(q, ticket);
    if (!p) {
        pthread_mutex_unlock(&q->lock);
        return PHX_FAILED;
    }
    p->waiters++, q->waiters++;
    set_wake(q);
    while (!is_over(p)) {
        post_move(q);
        if (is_over(p) || post_read(q, NULL)) continue;
        int peer = p->peer;
        pthread_mutex_unlock(&q->lock);
        int news = spin(q, p, peer);
        pthread_mutex_lock(&q->lock);
        if (news && phx_now_ms() - q->looked < LOOK_MS) continue; /* also where others always have something for us */
        check_waiting(q, p);
        if (is_over(p) || (until && phx_now_ms() >= until)) break;
        if (!news) sleep_for(q, p, until);
    }
    int result = is_over(p) ? p->result : -1;
    *from = p->blame, *bytes = p->seen;
    p->waiters--, q->waiters--;
    if (result >= 0 && !p->waiters) post_forget(q, p);
    release(q);
    return result;
}

/* -- coming and going */

static struct end end_at(void *ring, uint32_t size) { return (struct end){ring, size, 0, 0}; }

int phx_parcels_open(phx_group *g, void *memory) {
    struct phx_post *q = calloc(1, sizeof *q);
    if (!q) return -1;
    q->peers = calloc((size_t)g->ranks, sizeof *q->peers);
    q->watched = calloc((size_t)g->ranks, sizeof *q->watched);
    if (!q->peers || !q->watched) {
        free(q->peers), free(q->watched), free(q);
        return -1;
    }
    q->group = g, q->bells = memory, q->bell = &q->bells[g->rank];
    q->eager = ring_bytes(g->ranks) / 8;
    set_out(&q->anyone), set_out(&q->reads);
    pthread_mutex_init(&q->lock, NULL);
    uint8_t *rings = (uint8_t *)(q->bells + g->ranks);
    for (int r = 0; r < g->ranks; r++) {
        struct peer *p = &q->peers[r];
        uint8_t *to = rings + ((size_t)g->rank * (size_t)g->ranks + (size_t)r) * pair_bytes(g->ranks);
        uint8_t *from = rings + ((size_t)r * (size_t)g->ranks + (size_t)g->rank) * pair_bytes(g->ranks);
        uint32_t size = ring_bytes(g->ranks);
        p->out = end_at(to, size), p->say = end_at(to + sizeof(struct ring) + size, WORDS);
        p->in = end_at(from, size), p->hear = end_at(from + sizeof(struct ring) + size, WORDS);
        set_out(&p->unsaid), set_out(&p->queue), set_out(&p->streams), set_out(&p->awaited), set_out(&p->aside);
        q->watched[r] = (struct pollfd){r == g->rank ? -1 : g->peers[r].fd, POLLIN, 0};
    }
    g->post = q;
    return 0;
}

static void free_all(struct link *list) {
    while (!is_empty(list)) {
        struct link *l = list->next;
        unlink_it(l);
        free(l);
    }
}

void phx_parcels_close(phx_group *g) {
    struct phx_post *q = g->post;
    if (!q || !phx_own(g)) return; /* a fork has no helper, and perhaps a lock that nobody gives back */
    pthread_mutex_lock(&q->lock);
    q->closing = 1;
    for (uint32_t i = 0; i < q->room; i++)
        if (!is_over(q->table[i])) post_finish(q, q->table[i], PHX_ABORTED, -1);
    while (q->waiters) { /* they see that they are over */
        pthread_mutex_unlock(&q->lock);
        rouse(q->bell, WAITER);
        sched_yield();
        pthread_mutex_lock(&q->lock);
    }
    pthread_mutex_unlock(&q->lock);
    rouse(q->bell, HELPER);
    if (q->helping) pthread_join(q->helper, NULL);
    pthread_mutex_destroy(&q->lock);
    for (int r = 0; r < g->ranks; r++) free_all(&q->peers[r].unsaid), free_all(&q->peers[r].aside);
    for (uint32_t i = 0; i < q->room; i++) free(q->table[i]);
    free(q->table), free(q->watched), free(q->peers), free(q);
    g->post = NULL;
}
