/* Matching of sends and receives, and their progress. */
#define _GNU_SOURCE
#include "mailbox.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define READ_CHUNK (512u << 10) /* bytes that one thread reads at a time */

/* A message that arrived before its receive, or a control record that waits for space. */
struct message {
    struct link link;
    uint64_t order;
    uint64_t then; /* ticket of the request that is complete once this is written */
    struct record record;
    uint8_t data[];
};

/* -- tickets */

uint64_t request_ticket(const struct request *p) { return (uint64_t)p->generation << 32 | (p->index + 2); }

struct request *mailbox_find(struct mailbox *q, uint64_t ticket) {
    uint32_t index = (uint32_t)ticket - 2;
    return index < q->capacity && q->table[index]->generation == ticket >> 32 ? q->table[index] : NULL;
}

struct request *mailbox_new_request(struct mailbox *q, int peer, void *data, size_t bytes, int64_t tag) {
    if (!q->free) {
        uint32_t more = q->capacity ? 2 * q->capacity : 64;
        struct request **table = realloc(q->table, more * sizeof *table);
        if (!table) return NULL;
        q->table = table;
        for (; q->capacity < more; q->capacity++) {
            struct request *p = table[q->capacity] = calloc(1, sizeof *p);
            if (!p) break;
            p->index = q->capacity, p->generation = 1, p->waiters = (int)q->free, q->free = q->capacity + 1;
            atomic_store(&p->done, 1);
        }
        if (!q->free) return NULL;
    }
    struct request *p = q->table[q->free - 1];
    q->free = (uint32_t)p->waiters;
    uint32_t index = p->index, generation = p->generation;
    memset(p, 0, sizeof *p);
    list_init(&p->link);
    p->index = index, p->generation = generation, p->peer = peer, p->data = data, p->bytes = bytes, p->tag = tag;
    q->open_requests++;
    return p;
}

void mailbox_free_request(struct mailbox *q, struct request *p) {
    p->generation++;
    p->waiters = (int)q->free, q->free = p->index + 1;
}

/* -- doorbells */

/* Notify a rank of data that was written for it. A thread announces that it sleeps and then checks `pending`: no wakeup
   is lost. */
void mailbox_ring(struct mailbox *q, int rank, uint32_t which) {
    struct doorbell *b = &q->doorbells[rank];
    int own = q->group->rank;
    phx_fault(q->group);
    atomic_fetch_or(&b->pending[own / 32], 1u << own % 32);
    if (!(atomic_load(&b->wake) & which)) return;
    uint32_t wake = atomic_fetch_and(&b->wake, ~which) & which; /* wake it only once */
    atomic_fetch_add(&b->rung, 1);
    syscall(SYS_futex, &b->rung, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, wake);
}

/* -- completion */

void mailbox_finish(struct mailbox *q, struct request *p, int result, int source) {
    list_remove(&p->link);
    if (p->readers) {
        p->read_error = 1 + result, p->source = source, p->transferred = p->bytes;
        return;
    }
    if (p->state == RECEIVING) q->peers[p->peer].filling--;
    if (p->state == ACKING) result = PHX_OK, source = p->peer;
    p->result = result, p->source = source;
    q->open_requests--;
    if (p->waiters) q->wake_waiters = 1;
    atomic_store_explicit(&p->done, 1, memory_order_release);
}

/* Whether the progress thread must be woken. A whole message, or the end of one, can wait until it is requested. So can
   a small message that must be read, until the thread polls: waking it is slow while a waiting thread is about to do the
   same. */
static int is_urgent(const struct record *r) {
    return r->kind == OFFER ? r->bytes > READ_AT_ONCE : r->kind != EAGER && r->kind != ACK;
}

/* Write to a ring and ring the doorbell. */
static int write_to(struct mailbox *q, int rank, struct ring_end *ring, const struct record *r, const void *data, size_t bytes) {
    phx_fault(q->group);
    int done = ring_write(ring, r, data, bytes);
    if (done >= 0) mailbox_ring(q, rank, !done || is_urgent(r) ? BOTH : WAITER);
    return done > 0;
}

/* Send a control record; they keep their order. Return whether it is written. */
static int send_control_then(struct mailbox *q, int rank, const struct record *r, uint64_t then) {
    struct peer *to = &q->peers[rank];
    if (list_empty(&to->control_queue) && write_to(q, rank, &to->control_out, r, NULL, 0)) return 1;
    struct message *l = malloc(sizeof *l);
    if (!l) {
        phx_fail(q->group, PHX_FAILED); /* the other side would wait forever */
        return 1;
    }
    l->record = *r, l->then = then;
    list_append(&to->control_queue, &l->link);
    return 0;
}

static void control_out(struct mailbox *q, int rank, const struct record *r) { send_control_then(q, rank, r, 0); }

static void send_ack(struct mailbox *q, const struct request *p, int result) {
    control_out(q, p->peer, &(struct record){.kind = ACK, .result = result, .bytes = p->bytes, .to = p->peer_ticket});
}

void mailbox_cancel(struct mailbox *q, struct request *p, int result, int source) {
    if (p->state == OFFERED) atomic_store(&q->peers[p->peer].out.ring->cancelled, 1); /* before we return: see finish_read */
    if (p->state == STREAMING) control_out(q, p->peer, &(struct record){.kind = CANCELLED, .to = p->peer_ticket});
    if ((p->state == READING && !p->readers) || p->state == RECEIVING) send_ack(q, p, result);
    mailbox_finish(q, p, result, source);
}

/* -- receive */

/* Request the message in pieces. */
static void request_pieces(struct mailbox *q, struct request *p) {
    p->state = RECEIVING, p->transferred = 0;
    q->peers[p->peer].filling++;
    control_out(q, p->peer, &(struct record){.kind = SEND_PIECES, .to = p->peer_ticket, .from = request_ticket(p)});
}

/* Match a receive with a message, which may still have to be read. `data` NULL: it is in the ring. */
static void match(struct mailbox *q, struct request *p, int rank, const struct record *r, const void *data) {
    struct peer *from = &q->peers[rank];
    list_remove(&p->link);
    p->peer = rank, p->peer_bytes = r->bytes, p->peer_ticket = r->from;
    if (r->bytes != p->bytes) {
        if (r->kind == OFFER) send_ack(q, p, PHX_MISMATCH);
        mailbox_finish(q, p, PHX_MISMATCH, rank);
    } else if (r->kind == EAGER) {
        if (!data) ring_copy_out(&from->in, p->data, r->bytes);
        else if (r->bytes) memcpy(p->data, data, r->bytes);
        mailbox_finish(q, p, PHX_OK, rank);
    } else if (from->gone) {
        mailbox_finish(q, p, PHX_DEAD, rank);
    } else if (q->group->direct && !atomic_load(&from->in.ring->cancelled)) {
        p->state = READING, p->address = r->address;
        list_append(&q->reads, &p->link);
    } else {
        request_pieces(q, p);
    }
}

static struct request *find_receive(struct link *list, int64_t tag) {
    for (struct link *l = list->next; l != list; l = l->next)
        if (((struct request *)l)->tag == tag) return (struct request *)l;
    return NULL;
}

static void deliver(struct mailbox *q, int rank, const struct record *r) {
    struct peer *from = &q->peers[rank];
    struct request *p = find_receive(&from->receives, r->tag), *any = find_receive(&q->any_source, r->tag);
    if (any && (!p || any->order < p->order)) p = any;
    if (p) {
        match(q, p, rank, r, NULL);
        return;
    }
    size_t bytes = r->kind == EAGER ? r->bytes : 0;
    struct message *l = malloc(sizeof *l + bytes);
    if (!l) {
        phx_fail(q->group, PHX_FAILED);
        return;
    }
    l->record = *r, l->order = q->arrival_count++;
    if (bytes) ring_copy_out(&from->in, l->data, bytes);
    list_append(&from->unexpected, &l->link);
}

static struct message *find_unexpected(struct peer *from, int64_t tag) {
    for (struct link *l = from->unexpected.next; l != &from->unexpected; l = l->next)
        if (((struct message *)l)->record.tag == tag) return (struct message *)l;
    return NULL;
}

static void receive_piece(struct mailbox *q, int rank, const struct record *r) {
    struct request *p = mailbox_find(q, r->to);
    if (!p || is_done(p) || p->state != RECEIVING || p->peer != rank || r->bytes > p->bytes - p->transferred) return;
    ring_copy_out(&q->peers[rank].in, p->data + p->transferred, r->bytes);
    p->transferred += r->bytes;
    if (p->transferred == p->bytes) mailbox_finish(q, p, PHX_OK, rank);
}

static void read_messages(struct mailbox *q, int rank) {
    struct peer *from = &q->peers[rank];
    struct record r;
    while ((from->filling || !list_empty(&from->receives) || !list_empty(&q->any_source)) && ring_peek(&from->in, &r)) {
        if (r.kind == PIECE) receive_piece(q, rank, &r);
        else deliver(q, rank, &r);
        if (ring_consume(&from->in, r.kind == OFFER ? 0 : r.bytes)) mailbox_ring(q, rank, BOTH);
    }
}

/* The whole message was read, or an attempt failed. */
static void finish_read(struct mailbox *q, struct request *p) {
    struct peer *from = &q->peers[p->peer];
    int rank = p->peer, error = phx_error(q->group), left = (int)atomic_load(&q->group->members[rank].left);
    if (error) {
        mailbox_finish(q, p, error, -1);
    } else if (p->read_error > 1) {
        if (!from->gone) send_ack(q, p, p->read_error - 1);
        mailbox_finish(q, p, p->read_error - 1, p->source);
    } else if (left || from->gone) {
        mailbox_finish(q, p, PHX_DEAD, rank);
    } else if (p->read_error || atomic_load(&from->in.ring->cancelled)) {
        p->read_error = 0;
        request_pieces(q, p); /* cannot be read, or may have been cancelled during the read: then the sender answers that */
    } else {
        /* Done when the sender can see it, even if this process exits: a received message is also sent. */
        p->state = ACKING;
        struct record done = {.kind = ACK, .result = PHX_OK, .bytes = p->bytes, .to = p->peer_ticket};
        if (send_control_then(q, rank, &done, request_ticket(p))) mailbox_finish(q, p, PHX_OK, rank);
    }
}

int mailbox_read(struct mailbox *q, struct link *which) {
    if (list_empty(&q->reads)) return 0;
    struct request *p = (struct request *)(which ? which : q->reads.next);
    uint64_t at = p->transferred, some = p->bytes - at < READ_CHUNK ? p->bytes - at : READ_CHUNK;
    int rank = p->peer;
    p->transferred += some, p->readers++;
    if (p->transferred == p->bytes) list_remove(&p->link);
    pthread_mutex_unlock(&q->lock);
    phx_fault(q->group);
    int failed = phx_read_peer(q->group, rank, p->data + at, p->address + at, some), why = errno;
    pthread_mutex_lock(&q->lock);
    p->readers--;
    if (failed && !p->read_error) p->read_error = why == ESRCH ? 1 + PHX_DEAD : 1, p->source = rank;
    if (failed && p->transferred < p->bytes) p->transferred = p->bytes, list_remove(&p->link);
    if (!p->readers && p->transferred == p->bytes) finish_read(q, p);
    return 1;
}

void mailbox_post_recv(struct mailbox *q, struct request *p) {
    int ranks = q->group->ranks, first = p->peer < 0 ? 0 : p->peer, last = p->peer < 0 ? ranks - 1 : p->peer, rank = -1;
    struct message *found = NULL;
    p->state = POSTED, p->order = q->receive_count++;
    for (int r = first; r <= last; r++) {
        struct message *l = find_unexpected(&q->peers[r], p->tag);
        if (l && (!found || l->order < found->order)) found = l, rank = r;
    }
    if (found) {
        list_remove(&found->link);
        match(q, p, rank, &found->record, found->data);
        free(found);
        return;
    }
    list_append(p->peer < 0 ? &q->any_source : &q->peers[p->peer].receives, &p->link);
    int some = last - first + 1, start = (int)(p->order % (uint64_t)some); /* rotate, so that rank 0 is not always preferred */
    for (int i = 0; i < some && !is_done(p) && p->state == POSTED; i++) read_messages(q, first + (start + i) % some);
}

/* -- send */

int mailbox_send_eager(struct mailbox *q, const void *data, size_t bytes, int to, int64_t tag) {
    struct peer *peer = &q->peers[to];
    if (bytes > q->eager || !list_empty(&peer->queue)) return 0;
    return write_to(q, to, &peer->out, &(struct record){.kind = EAGER, .tag = tag, .bytes = bytes}, data, bytes);
}

static int start_send(struct mailbox *q, struct request *p) {
    struct peer *to = &q->peers[p->peer];
    struct record r = {.kind = p->bytes <= q->eager ? EAGER : OFFER, .tag = p->tag, .bytes = p->bytes};
    r.from = request_ticket(p), r.address = (uint64_t)(uintptr_t)p->data;
    if (!write_to(q, p->peer, &to->out, &r, p->data, r.kind == EAGER ? p->bytes : 0)) return 0;
    p->state = OFFERED;
    if (r.kind == EAGER) mailbox_finish(q, p, PHX_OK, p->peer);
    else list_remove(&p->link);
    return 1;
}

static int send_piece(struct mailbox *q, struct request *p) {
    uint64_t some = p->bytes - p->transferred < q->eager ? p->bytes - p->transferred : q->eager;
    struct record r = {.kind = PIECE, .bytes = some, .to = p->peer_ticket};
    if (!write_to(q, p->peer, &q->peers[p->peer].out, &r, p->data + p->transferred, some)) return 0;
    p->transferred += some;
    if (p->transferred == p->bytes) mailbox_finish(q, p, PHX_OK, p->peer);
    return 1;
}

/* Write as much as the rings to that rank have space for. */
static void flush_sends(struct mailbox *q, int rank) {
    struct peer *to = &q->peers[rank];
    while (!list_empty(&to->control_queue)) {
        struct message *l = (struct message *)to->control_queue.next;
        if (!write_to(q, rank, &to->control_out, &l->record, NULL, 0)) break;
        struct request *p = mailbox_find(q, l->then);
        if (p && !is_done(p)) mailbox_finish(q, p, PHX_OK, rank);
        list_remove(&l->link);
        free(l);
    }
    while (!list_empty(&to->queue) && start_send(q, (struct request *)to->queue.next));
    while (!list_empty(&to->streams) && send_piece(q, (struct request *)to->streams.next));
}

void mailbox_queue_send(struct mailbox *q, struct request *p) {
    p->state = QUEUED;
    list_append(&q->peers[p->peer].queue, &p->link);
    flush_sends(q, p->peer);
}

static void handle_control(struct mailbox *q, int rank, const struct record *r) {
    struct request *p = mailbox_find(q, r->to);
    int open_requests = p && !is_done(p) && p->peer == rank;
    if (r->kind == ACK && open_requests && (p->state == OFFERED || p->state == STREAMING)) {
        p->peer_bytes = r->bytes;
        mailbox_finish(q, p, r->result, rank);
    } else if (r->kind == SEND_PIECES && open_requests && p->state == OFFERED) {
        p->state = STREAMING, p->peer_ticket = r->from;
        list_append(&q->peers[rank].streams, &p->link);
    } else if (r->kind == SEND_PIECES) {
        control_out(q, rank, &(struct record){.kind = CANCELLED, .to = r->from});
    } else if (r->kind == CANCELLED && open_requests && p->state == RECEIVING) {
        mailbox_finish(q, p, PHX_TIMEOUT, rank);
    }
}

static void read_control(struct mailbox *q, int rank) {
    struct record r;
    while (ring_peek(&q->peers[rank].control_in, &r)) {
        if (ring_consume(&q->peers[rank].control_in, 0)) mailbox_ring(q, rank, BOTH);
        handle_control(q, rank, &r);
    }
}

/* -- peers that exit or leave */

static int all_gone(const struct mailbox *q) {
    for (int r = 0; r < q->group->ranks; r++)
        if (r != q->group->rank && !q->peers[r].gone) return 0;
    return 1;
}

/* Handle a rank that has exited or left. Data that it wrote before is still valid. */
static void peer_left(struct mailbox *q, int rank) {
    struct peer *from = &q->peers[rank];
    if (from->gone || phx_error(q->group)) return; /* a rank that failed the group before it left has set the reason */
    from->gone = 1;
    read_control(q, rank);
    read_messages(q, rank);
    int alone = all_gone(q);
    for (uint32_t i = 0; i < q->capacity; i++) {
        struct request *p = q->table[i];
        if (!is_done(p) && (p->peer == rank || (p->peer < 0 && alone))) mailbox_finish(q, p, PHX_DEAD, p->peer);
    }
}

void mailbox_check_peers(struct mailbox *q) {
    q->last_check = phx_now_ms();
    if (poll(q->watched, (nfds_t)q->group->ranks, 0) <= 0) return;
    for (int r = 0; r < q->group->ranks; r++)
        if (q->watched[r].fd >= 0 && q->watched[r].revents) {
            q->watched[r].fd = -1;
            peer_left(q, r);
        }
}

static void progress_peer(struct mailbox *q, int rank) {
    read_control(q, rank);
    read_messages(q, rank);
    flush_sends(q, rank);
    if (rank != q->group->rank && atomic_load(&q->group->members[rank].left)) peer_left(q, rank);
}

void mailbox_progress(struct mailbox *q) {
    int error = phx_error(q->group);
    if (error) {
        for (uint32_t i = 0; q->open_requests && i < q->capacity; i++)
            if (!is_done(q->table[i])) mailbox_finish(q, q->table[i], error, -1);
        return;
    }
    for (int w = 0; w * 32 < q->group->ranks; w++) {
        if (!atomic_load_explicit(&q->doorbell->pending[w], memory_order_relaxed)) continue;
        for (uint32_t bits = atomic_exchange(&q->doorbell->pending[w], 0); bits; bits &= bits - 1) progress_peer(q, w * 32 + __builtin_ctz(bits));
    }
}
