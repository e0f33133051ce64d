/* A rank's part in messages from rank to rank: what it sends and awaits, and what has come that nobody awaits yet.

   Small messages are copied into the ring: they are sent at once. Larger ones are offered, with their address; the
   receiver reads them from there and says TAKEN. Where it may not, it says GO, and they come through the ring in pieces.
   A ring is emptied only while something from there is awaited: who sends more than that waits.

   Whoever has the lock moves everything on. Functions that begin with post_ are called with it. */
#ifndef PHX_POST_H
#define PHX_POST_H

#include <pthread.h>

#include "parcels.h"
#include "rings.h"

#define AT_ONCE (256u << 10) /* bytes that are read where a receive is begun */

struct link {
    struct link *next, *before;
};

enum stage {
    QUEUED,    /* a send for which the ring has no room */
    OFFERED,   /* a send that the receiver will read, or ask for */
    STREAMING, /* a send that goes in pieces */
    AWAITED,   /* a receive for which nothing has come */
    READING,   /* a receive from the sender's memory */
    FILLING,   /* a receive in pieces */
    READ,      /* a receive whose sender is still to be told: there is no room for the word */
};

struct parcel {
    struct link link;
    uint32_t index, life; /* the ticket */
    int stage;
    int peer;             /* -1: anyone, so far */
    uint8_t *data;
    uint64_t bytes;
    int64_t tag, until;
    uint64_t order;       /* of receives, among themselves */
    uint64_t theirs;      /* the other's ticket */
    uint64_t address;     /* READING */
    uint64_t moved;       /* of STREAMING, FILLING; of READING: what somebody has begun to read */
    int readers;          /* threads that read */
    int verdict;          /* 1 + result, once they are through; 1: it cannot be read; 0: it goes well */
    int waiters;
    word over;            /* then the rest is: */
    int result, blame;
    uint64_t seen;        /* bytes that the other side had in mind */
};

struct peer {
    struct end out, in;    /* messages */
    struct end say, hear;  /* TAKEN, GO, WITHDRAWN: always read, so that they get through whatever messages wait */
    struct link unsaid;    /* for which there was no room */
    struct link queue, streams, awaited;
    struct link aside;     /* came, and nobody awaits them */
    int filling, gone;
};

struct phx_post {
    pthread_mutex_t lock;
    phx_group *group;
    struct bell *bells, *bell;
    struct peer *peers;
    struct pollfd *watched;
    uint32_t eager;        /* bytes up to which messages are copied */
    struct link anyone;    /* receives from anyone */
    struct link reads;     /* of which some is not being read yet */
    struct parcel **table;
    uint32_t room, free;   /* `free`: 1 + index of the first, which has the next in `waiters` */
    uint64_t orders, arrivals;
    int64_t looked;
    int open;              /* parcels that are not over */
    int waiters, asleep, stirred;
    int closing, helping;
    int dozing;            /* the helper sleeps until it is called */
    pthread_t helper;
};

static inline void set_out(struct link *l) { l->next = l->before = l; }
static inline int is_empty(const struct link *l) { return l->next == l; }
static inline void unlink_it(struct link *l) {
    l->before->next = l->next, l->next->before = l->before;
    set_out(l);
}
static inline void append(struct link *list, struct link *l) {
    l->before = list->before, l->next = list;
    list->before->next = l, list->before = l;
}

static inline int is_over(const struct parcel *p) { return (int)atomic_load_explicit(&p->over, memory_order_acquire); }

static inline int has_mail(const struct phx_post *q) {
    for (int w = 0; w * 32 < q->group->ranks; w++)
        if (atomic_load(&q->bell->mail[w])) return 1;
    return 0;
}

uint64_t post_ticket(const struct parcel *);
struct parcel *post_find(struct phx_post *, uint64_t ticket);
struct parcel *post_parcel(struct phx_post *, int peer, void *data, size_t bytes, int64_t tag);
void post_forget(struct phx_post *, struct parcel *);

/* Over, as soon as nobody reads for it any more. */
void post_finish(struct phx_post *, struct parcel *, int result, int blame);

/* The same before its time: the other side may still think of it. */
void post_withdraw(struct phx_post *, struct parcel *, int result, int blame);

/* A small message, at once; 0: it has to be queued. */
int post_at_once(struct phx_post *, const void *data, size_t bytes, int to, int64_t tag);
void post_queue(struct phx_post *, struct parcel *);
void post_await(struct phx_post *, struct parcel *);

/* Everything that can go on without waiting. */
void post_move(struct phx_post *);

/* Read some of a large message, without the lock in between. 0: there is nothing to read. */
int post_read(struct phx_post *, struct link *);

/* Who has ended? */
void post_look(struct phx_post *);

void post_ring(struct phx_post *, int rank, uint32_t whom);

#endif
