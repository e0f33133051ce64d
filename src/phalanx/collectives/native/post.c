#define _GNU_SOURCE
#include "post.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BITE (512u << 10) /* bytes that one thread reads at once */

/* A message that nobody awaits yet, or a word for which there is no room yet. */
struct letter {
    struct link link;
    uint64_t order;
    uint64_t then; /* ticket of what is over once this is said */
    struct record record;
    uint8_t data[];
};

/* -- tickets */

uint64_t post_ticket(const struct parcel *p) { return (uint64_t)p->life << 32 | (p->index + 2); }

struct parcel *post_find(struct phx_post *q, uint64_t ticket) {
    uint32_t index = (uint32_t)ticket - 2;
    return index < q->room && q->table[index]->life == ticket >> 32 ? q->table[index] : NULL;
}

struct parcel *post_parcel(struct phx_post *q, int peer, void *data, size_t bytes, int64_t tag) {
    if (!q->free) {
        uint32_t more = q->room ? 2 * q->room : 64;
        struct parcel **table = realloc(q->table, more * sizeof *table);
        if (!table) return NULL;
        q->table = table;
        for (; q->room < more; q->room++) {
            struct parcel *p = table[q->room] = calloc(1, sizeof *p);
            if (!p) break;
            p->index = q->room, p->life = 1, p->waiters = (int)q->free, q->free = q->room + 1;
            atomic_store(&p->over, 1);
        }
        if (!q->free) return NULL;
    }
    struct parcel *p = q->table[q->free - 1];
    q->free = (uint32_t)p->waiters;
    uint32_t index = p->index, life = p->life;
    memset(p, 0, sizeof *p);
    set_out(&p->link);
    p->index = index, p->life = life, p->peer = peer, p->data = data, p->bytes = bytes, p->tag = tag;
    q->open++;
    return p;
}

void post_forget(struct phx_post *q, struct parcel *p) {
    p->life++;
    p->waiters = (int)q->free, q->free = p->index + 1;
}

/* -- bells */

/* What was written for that rank is there. Who goes to sleep says so, then looks for mail: nobody oversleeps. */
void post_ring(struct phx_post *q, int rank, uint32_t whom) {
    struct bell *b = &q->bells[rank];
    int own = q->group->rank;
    phx_fault(q->group);
    atomic_fetch_or(&b->mail[own / 32], 1u << own % 32);
    if (!(atomic_load(&b->wake) & whom)) return;
    uint32_t wake = atomic_fetch_and(&b->wake, ~whom) & whom; /* once is enough */
    atomic_fetch_add(&b->rung, 1);
    syscall(SYS_futex, &b->rung, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, wake);
}

/* -- how parcels end */

void post_finish(struct phx_post *q, struct parcel *p, int result, int blame) {
    unlink_it(&p->link);
    if (p->readers) {
        p->verdict = 1 + result, p->blame = blame, p->moved = p->bytes;
        return;
    }
    if (p->stage == FILLING) q->peers[p->peer].filling--;
    if (p->stage == READ) result = PHX_OK, blame = p->peer;
    p->result = result, p->blame = blame;
    q->open--;
    if (p->waiters) q->stirred = 1;
    atomic_store_explicit(&p->over, 1, memory_order_release);
}

/* Whether the helper has to know at once. A whole message, or the end of one, can wait until somebody asks; a small one
   that has to be fetched, until the helper looks: it is slow to come where the awaited thread is already on its way. */
static int is_urgent(const struct record *r) {
    return r->kind == OFFER ? r->bytes > AT_ONCE : r->kind != EAGER && r->kind != TAKEN;
}

/* Into a ring, and ring. */
static int write_to(struct phx_post *q, int rank, struct end *ring, const struct record *r, const void *data, size_t bytes) {
    phx_fault(q->group);
    int done = put(ring, r, data, bytes);
    if (done >= 0) post_ring(q, rank, !done || is_urgent(r) ? BOTH : WAITER);
    return done > 0;
}

/* Words to the other side, in the order they were said. Whether it is out. */
static int say_then(struct phx_post *q, int rank, const struct record *r, uint64_t then) {
    struct peer *to = &q->peers[rank];
    if (is_empty(&to->unsaid) && write_to(q, rank, &to->say, r, NULL, 0)) return 1;
    struct letter *l = malloc(sizeof *l);
    if (!l) {
        phx_give_up(q->group, PHX_FAILED); /* the other would wait for ever */
        return 1;
    }
    l->record = *r, l->then = then;
    append(&to->unsaid, &l->link);
    return 0;
}

static void say(struct phx_post *q, int rank, const struct record *r) { say_then(q, rank, r, 0); }

static void taken(struct phx_post *q, const struct parcel *p, int result) {
    say(q, p->peer, &(struct record){.kind = TAKEN, .result = result, .bytes = p->bytes, .to = p->theirs});
}

void post_withdraw(struct phx_post *q, struct parcel *p, int result, int blame) {
    if (p->stage == OFFERED) atomic_store(&q->peers[p->peer].out.ring->withdrawn, 1); /* before we return: see read_over */
    if (p->stage == STREAMING) say(q, p->peer, &(struct record){.kind = WITHDRAWN, .to = p->theirs});
    if ((p->stage == READING && !p->readers) || p->stage == FILLING) taken(q, p, result);
    post_finish(q, p, result, blame);
}

/* -- receiving */

/* Please send it in pieces. */
static void ask(struct phx_post *q, struct parcel *p) {
    p->stage = FILLING, p->moved = 0;
    q->peers[p->peer].filling++;
    say(q, p->peer, &(struct record){.kind = GO, .to = p->theirs, .from = post_ticket(p)});
}

/* A receive has got its message, which may still have to be fetched. `data`: NULL, it lies in the ring. */
static void accept(struct phx_post *q, struct parcel *p, int rank, const struct record *r, const void *data) {
    struct peer *from = &q->peers[rank];
    unlink_it(&p->link);
    p->peer = rank, p->seen = r->bytes, p->theirs = r->from;
    if (r->bytes != p->bytes) {
        if (r->kind == OFFER) taken(q, p, PHX_MISMATCH);
        post_finish(q, p, PHX_MISMATCH, rank);
    } else if (r->kind == EAGER) {
        if (!data) copy_out(&from->in, p->data, r->bytes);
        else if (r->bytes) memcpy(p->data, data, r->bytes);
        post_finish(q, p, PHX_OK, rank);
    } else if (from->gone) {
        post_finish(q, p, PHX_DEAD, rank);
    } else if (q->group->direct && !atomic_load(&from->in.ring->withdrawn)) {
        p->stage = READING, p->address = r->address;
        append(&q->reads, &p->link);
    } else {
        ask(q, p);
    }
}

static struct parcel *first_awaiting(struct link *list, int64_t tag) {
    for (struct link *l = list->next; l != list; l = l->next)
        if (((struct parcel *)l)->tag == tag) return (struct parcel *)l;
    return NULL;
}

static void arrive(struct phx_post *q, int rank, const struct record *r) {
    struct peer *from = &q->peers[rank];
    struct parcel *p = first_awaiting(&from->awaited, r->tag), *any = first_awaiting(&q->anyone, r->tag);
    if (any && (!p || any->order < p->order)) p = any;
    if (p) {
        accept(q, p, rank, r, NULL);
        return;
    }
    size_t bytes = r->kind == EAGER ? r->bytes : 0;
    struct letter *l = malloc(sizeof *l + bytes);
    if (!l) {
        phx_give_up(q->group, PHX_FAILED);
        return;
    }
    l->record = *r, l->order = q->arrivals++;
    if (bytes) copy_out(&from->in, l->data, bytes);
    append(&from->aside, &l->link);
}

static struct letter *first_aside(struct peer *from, int64_t tag) {
    for (struct link *l = from->aside.next; l != &from->aside; l = l->next)
        if (((struct letter *)l)->record.tag == tag) return (struct letter *)l;
    return NULL;
}

static void piece_came(struct phx_post *q, int rank, const struct record *r) {
    struct parcel *p = post_find(q, r->to);
    if (!p || is_over(p) || p->stage != FILLING || p->peer != rank || r->bytes > p->bytes - p->moved) return;
    copy_out(&q->peers[rank].in, p->data + p->moved, r->bytes);
    p->moved += r->bytes;
    if (p->moved == p->bytes) post_finish(q, p, PHX_OK, rank);
}

static void take_in(struct phx_post *q, int rank) {
    struct peer *from = &q->peers[rank];
    struct record r;
    while ((from->filling || !is_empty(&from->awaited) || !is_empty(&q->anyone)) && peek(&from->in, &r)) {
        if (r.kind == PIECE_OF) piece_came(q, rank, &r);
        else arrive(q, rank, &r);
        if (drop(&from->in, r.kind == OFFER ? 0 : r.bytes)) post_ring(q, rank, BOTH);
    }
}

/* All of it has been read, or that did not work. */
static void read_over(struct phx_post *q, struct parcel *p) {
    struct peer *from = &q->peers[p->peer];
    int rank = p->peer, broken = phx_broken(q->group), left = (int)atomic_load(&q->group->seats[rank].left);
    if (broken) {
        post_finish(q, p, broken, -1);
    } else if (p->verdict > 1) {
        if (!from->gone) taken(q, p, p->verdict - 1);
        post_finish(q, p, p->verdict - 1, p->blame);
    } else if (left || from->gone) {
        post_finish(q, p, PHX_DEAD, rank);
    } else if (p->verdict || atomic_load(&from->in.ring->withdrawn)) {
        p->verdict = 0;
        ask(q, p); /* may not be read, or may have been taken back while we read: then the sender says so */
    } else {
        /* Over when the sender can see it, whatever becomes of this process: what was received was also sent. */
        p->stage = READ;
        struct record done = {.kind = TAKEN, .result = PHX_OK, .bytes = p->bytes, .to = p->theirs};
        if (say_then(q, rank, &done, post_ticket(p))) post_finish(q, p, PHX_OK, rank);
    }
}

int post_read(struct phx_post *q, struct link *which) {
    if (is_empty(&q->reads)) return 0;
    struct parcel *p = (struct parcel *)(which ? which : q->reads.next);
    uint64_t at = p->moved, some = p->bytes - at < BITE ? p->bytes - at : BITE;
    int rank = p->peer;
    p->moved += some, p->readers++;
    if (p->moved == p->bytes) unlink_it(&p->link);
    pthread_mutex_unlock(&q->lock);
    phx_fault(q->group);
    int failed = phx_read_peer(q->group, rank, p->data + at, p->address + at, some), why = errno;
    pthread_mutex_lock(&q->lock);
    p->readers--;
    if (failed && !p->verdict) p->verdict = why == ESRCH ? 1 + PHX_DEAD : 1, p->blame = rank;
    if (failed && p->moved < p->bytes) p->moved = p->bytes, unlink_it(&p->link);
    if (!p->readers && p->moved == p->bytes) read_over(q, p);
    return 1;
}

void post_await(struct phx_post *q, struct parcel *p) {
    int ranks = q->group->ranks, first = p->peer < 0 ? 0 : p->peer, last = p->peer < 0 ? ranks - 1 : p->peer, rank = -1;
    struct letter *found = NULL;
    p->stage = AWAITED, p->order = q->orders++;
    for (int r = first; r <= last; r++) {
        struct letter *l = first_aside(&q->peers[r], p->tag);
        if (l && (!found || l->order < found->order)) found = l, rank = r;
    }
    if (found) {
        unlink_it(&found->link);
        accept(q, p, rank, &found->record, found->data);
        free(found);
        return;
    }
    append(p->peer < 0 ? &q->anyone : &q->peers[p->peer].awaited, &p->link);
    int some = last - first + 1, start = (int)(p->order % (uint64_t)some); /* of anyone's, not always those of rank 0 first */
    for (int i = 0; i < some && !is_over(p) && p->stage == AWAITED; i++) take_in(q, first + (start + i) % some);
}

/* -- sending */

int post_at_once(struct phx_post *q, const void *data, size_t bytes, int to, int64_t tag) {
    struct peer *peer = &q->peers[to];
    if (bytes > q->eager || !is_empty(&peer->queue)) return 0;
    return write_to(q, to, &peer->out, &(struct record){.kind = EAGER, .tag = tag, .bytes = bytes}, data, bytes);
}

static int launch(struct phx_post *q, struct parcel *p) {
    struct peer *to = &q->peers[p->peer];
    struct record r = {.kind = p->bytes <= q->eager ? EAGER : OFFER, .tag = p->tag, .bytes = p->bytes};
    r.from = post_ticket(p), r.address = (uint64_t)(uintptr_t)p->data;
    if (!write_to(q, p->peer, &to->out, &r, p->data, r.kind == EAGER ? p->bytes : 0)) return 0;
    p->stage = OFFERED;
    if (r.kind == EAGER) post_finish(q, p, PHX_OK, p->peer);
    else unlink_it(&p->link);
    return 1;
}

static int stream(struct phx_post *q, struct parcel *p) {
    uint64_t some = p->bytes - p->moved < q->eager ? p->bytes - p->moved : q->eager;
    struct record r = {.kind = PIECE_OF, .bytes = some, .to = p->theirs};
    if (!write_to(q, p->peer, &q->peers[p->peer].out, &r, p->data + p->moved, some)) return 0;
    p->moved += some;
    if (p->moved == p->bytes) post_finish(q, p, PHX_OK, p->peer);
    return 1;
}

/* Whatever the rings to that rank have room for. */
static void pump(struct phx_post *q, int rank) {
    struct peer *to = &q->peers[rank];
    while (!is_empty(&to->unsaid)) {
        struct letter *l = (struct letter *)to->unsaid.next;
        if (!write_to(q, rank, &to->say, &l->record, NULL, 0)) break;
        struct parcel *p = post_find(q, l->then);
        if (p && !is_over(p)) post_finish(q, p, PHX_OK, rank);
        unlink_it(&l->link);
        free(l);
    }
    while (!is_empty(&to->queue) && launch(q, (struct parcel *)to->queue.next));
    while (!is_empty(&to->streams) && stream(q, (struct parcel *)to->streams.next));
}

void post_queue(struct phx_post *q, struct parcel *p) {
    p->stage = QUEUED;
    append(&q->peers[p->peer].queue, &p->link);
    pump(q, p->peer);
}

static void heard(struct phx_post *q, int rank, const struct record *r) {
    struct parcel *p = post_find(q, r->to);
    int open = p && !is_over(p) && p->peer == rank;
    if (r->kind == TAKEN && open && (p->stage == OFFERED || p->stage == STREAMING)) {
        p->seen = r->bytes;
        post_finish(q, p, r->result, rank);
    } else if (r->kind == GO && open && p->stage == OFFERED) {
        p->stage = STREAMING, p->theirs = r->from;
        append(&q->peers[rank].streams, &p->link);
    } else if (r->kind == GO) {
        say(q, rank, &(struct record){.kind = WITHDRAWN, .to = r->from});
    } else if (r->kind == WITHDRAWN && open && p->stage == FILLING) {
        post_finish(q, p, PHX_TIMEOUT, rank);
    }
}

static void listen_to(struct phx_post *q, int rank) {
    struct record r;
    while (peek(&q->peers[rank].hear, &r)) {
        if (drop(&q->peers[rank].hear, 0)) post_ring(q, rank, BOTH);
        heard(q, rank, &r);
    }
}

/* -- ends */

static int all_gone(const struct phx_post *q) {
    for (int r = 0; r < q->group->ranks; r++)
        if (r != q->group->rank && !q->peers[r].gone) return 0;
    return 1;
}

/* That rank has ended, or left. What it had written before is still good. */
static void depart(struct phx_post *q, int rank) {
    struct peer *from = &q->peers[rank];
    if (from->gone || phx_broken(q->group)) return; /* who ended the group before it went has said why */
    from->gone = 1;
    listen_to(q, rank);
    take_in(q, rank);
    int alone = all_gone(q);
    for (uint32_t i = 0; i < q->room; i++) {
        struct parcel *p = q->table[i];
        if (!is_over(p) && (p->peer == rank || (p->peer < 0 && alone))) post_finish(q, p, PHX_DEAD, p->peer);
    }
}

void post_look(struct phx_post *q) {
    q->looked = phx_now_ms();
    if (poll(q->watched, (nfds_t)q->group->ranks, 0) <= 0) return;
    for (int r = 0; r < q->group->ranks; r++)
        if (q->watched[r].fd >= 0 && q->watched[r].revents) {
            q->watched[r].fd = -1;
            depart(q, r);
        }
}

static void attend(struct phx_post *q, int rank) {
    listen_to(q, rank);
    take_in(q, rank);
    pump(q, rank);
    if (rank != q->group->rank && atomic_load(&q->group->seats[rank].left)) depart(q, rank);
}

void post_move(struct phx_post *q) {
    int broken = phx_broken(q->group);
    if (broken) {
        for (uint32_t i = 0; q->open && i < q->room; i++)
            if (!is_over(q->table[i])) post_finish(q, q->table[i], broken, -1);
        return;
    }
    for (int w = 0; w * 32 < q->group->ranks; w++) {
        if (!atomic_load_explicit(&q->bell->mail[w], memory_order_relaxed)) continue;
        for (uint32_t bits = atomic_exchange(&q->bell->mail[w], 0); bits; bits &= bits - 1) attend(q, w * 32 + __builtin_ctz(bits));
    }
}
