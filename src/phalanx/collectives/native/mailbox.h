/* A rank's side of point-to-point messages: its sends, its receives, and messages that arrived before their receive.

   Small messages are copied into the ring and sent immediately (eager). Larger ones are offered with their address; the
   receiver reads them from there and answers ACK. If it cannot, it answers SEND_PIECES, and they are sent through the
   ring in pieces. A ring is read only while a receive from that rank is posted: a sender of more than fits must wait.

   The thread that holds the lock makes progress for all requests. Functions that begin with mailbox_ are called with the
   lock held. */
#ifndef PHX_MAILBOX_H
#define PHX_MAILBOX_H

#include <pthread.h>

#include "rings.h"

#define READ_AT_ONCE (256u << 10) /* bytes up to which a message is read by the call that posts the receive */

struct link {
    struct link *next, *prev;
};

enum state {
    QUEUED,    /* a send that waits for space in the ring */
    OFFERED,   /* a send that the receiver will read, or ask for in pieces */
    STREAMING, /* a send in pieces */
    POSTED,    /* a receive for which nothing has arrived */
    READING,   /* a receive that reads the sender's memory */
    RECEIVING, /* a receive in pieces */
    ACKING,    /* a receive whose ACK waits for space in the ring */
};

struct request {
    struct link link;
    uint32_t index, generation; /* together the ticket */
    int state;
    int peer; /* -1: any source, not matched yet */
    uint8_t *data;
    uint64_t bytes;
    int64_t tag, deadline;
    uint64_t order;       /* of receives */
    uint64_t peer_ticket; /* the other side's ticket */
    uint64_t address;     /* READING */
    uint64_t transferred; /* STREAMING, RECEIVING: bytes; READING: bytes that a thread has started to read */
    int readers;          /* threads that read now */
    int read_error;       /* 1 + result, set when the readers are done; 1: the memory cannot be read; 0: no error */
    int waiters;
    atomic_u32 done; /* then these are valid: */
    int result, source;
    uint64_t peer_bytes; /* size of the message on the other side */
};

struct peer {
    struct ring_end out, in;                 /* messages */
    struct ring_end control_out, control_in; /* ACK, SEND_PIECES, CANCELLED: always read, so that they overtake waiting messages */
    struct link control_queue;               /* records that wait for space in control_out */
    struct link queue, streams, receives;
    struct link unexpected; /* messages that arrived before their receive */
    int filling, gone;
};

struct mailbox {
    pthread_mutex_t lock;
    phx_group *group;
    struct doorbell *doorbells, *doorbell;
    struct peer *peers;
    struct pollfd *watched;
    uint32_t eager;         /* bytes up to which messages are copied */
    struct link any_source; /* receives from any source */
    struct link reads;      /* receives of which some part is not being read yet */
    struct request **table;
    uint32_t capacity, free; /* `free`: 1 + index of the first free request, linked through `waiters` */
    uint64_t receive_count, arrival_count;
    int64_t last_check;
    int open_requests; /* requests that are not done */
    int waiters, sleeping, wake_waiters;
    int closing, has_thread;
    int thread_idle; /* the progress thread sleeps until it is woken */
    pthread_t thread;
};

static inline void list_init(struct link *l) { l->next = l->prev = l; }
static inline int list_empty(const struct link *l) { return l->next == l; }
static inline void list_remove(struct link *l) {
    l->prev->next = l->next, l->next->prev = l->prev;
    list_init(l);
}
static inline void list_append(struct link *list, struct link *l) {
    l->prev = list->prev, l->next = list;
    list->prev->next = l, list->prev = l;
}

static inline int is_done(const struct request *p) { return (int)atomic_load_explicit(&p->done, memory_order_acquire); }

static inline int has_pending(const struct mailbox *q) {
    for (int w = 0; w * 32 < q->group->ranks; w++)
        if (atomic_load(&q->doorbell->pending[w])) return 1;
    return 0;
}

uint64_t request_ticket(const struct request *);
struct request *mailbox_find(struct mailbox *, uint64_t ticket);
struct request *mailbox_new_request(struct mailbox *, int peer, void *data, size_t bytes, int64_t tag);
void mailbox_free_request(struct mailbox *, struct request *);

/* Complete a request, as soon as no thread reads for it. */
void mailbox_finish(struct mailbox *, struct request *, int result, int source);

/* Complete a request early; the other side is notified if it may still use it. */
void mailbox_cancel(struct mailbox *, struct request *, int result, int source);

/* Send a small message immediately. Return 0 if it has to be queued. */
int mailbox_send_eager(struct mailbox *, const void *data, size_t bytes, int to, int64_t tag);
void mailbox_queue_send(struct mailbox *, struct request *);
void mailbox_post_recv(struct mailbox *, struct request *);

/* Make all progress that is possible without waiting. */
void mailbox_progress(struct mailbox *);

/* Read a chunk of a large message; releases the lock meanwhile. Return 0 if there is nothing to read. */
int mailbox_read(struct mailbox *, struct link *);

/* Check for peers that have exited. */
void mailbox_check_peers(struct mailbox *);

void mailbox_ring(struct mailbox *, int rank, uint32_t which);

#endif
