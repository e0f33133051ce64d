/* What lies in shared memory for messages from rank to rank: a bell for each rank, two rings for each ordered pair.

   A ring has one writer and one reader. Records begin at multiples of a line; what follows one may run over the end of
   the ring to its beginning. Counters are bytes since the start, and go round. */
#ifndef PHX_RINGS_H
#define PHX_RINGS_H

#include <string.h>

#include "group.h"

/* Who may be asleep at a bell. What comes is of no use to the helper where only whoever waits for it has to know. */
enum { WAITER = 1, HELPER = 2, BOTH = 3 };

struct bell {
    _Alignas(2 * LINE) word rung; /* asleep here */
    word wake;                    /* who is, and has to be woken */
    word core;                    /* where it ran last, from 1 */
    word mail[PHX_MOST / 32];     /* from whom there is something, a bit each */
};

enum { EAGER, OFFER, PIECE_OF, TAKEN, GO, WITHDRAWN };

struct record {
    uint32_t kind;
    int32_t result;   /* TAKEN */
    int64_t tag;      /* EAGER, OFFER */
    uint64_t bytes;   /* of the message; PIECE_OF: of this piece; TAKEN: what the receiver expected */
    uint64_t to;      /* ticket, at the reader, of what this is about */
    uint64_t from;    /* ticket, at the writer */
    uint64_t address; /* OFFER: where the message lies, in the writer's memory */
};

struct ring {
    _Alignas(2 * LINE) word written;
    word withdrawn; /* the writer has taken back an offer, once */
    _Alignas(2 * LINE) word taken;
    word wanted;    /* the writer waits for room */
    _Alignas(2 * LINE) uint8_t bytes[];
};

/* One side of a ring, as its process sees it. */
struct end {
    struct ring *ring;
    uint32_t size;
    uint32_t here;  /* our counter */
    uint32_t there; /* the other's, as last seen */
};

static inline uint32_t padded(size_t bytes) { return (uint32_t)((sizeof(struct record) + bytes + LINE - 1) / LINE * LINE); }

static inline void to_ring(struct end *e, uint32_t at, const void *data, size_t bytes) {
    size_t from = at & (e->size - 1), first = bytes < e->size - from ? bytes : e->size - from;
    memcpy(e->ring->bytes + from, data, first);
    if (first < bytes) memcpy(e->ring->bytes, (const uint8_t *)data + first, bytes - first);
}

static inline int has_room(const struct end *e, uint32_t bytes) { return e->size - (e->here - e->there) >= bytes; }

/* 1: done. Else there is no room, and the reader rings once there may be: it has to be told so (0), or has been (-1). */
static inline int put(struct end *e, const struct record *record, const void *data, size_t bytes) {
    uint32_t all = padded(bytes);
    if (!has_room(e, all)) {
        e->there = atomic_load_explicit(&e->ring->taken, memory_order_acquire);
        if (!has_room(e, all)) {
            uint32_t known = atomic_exchange(&e->ring->wanted, 1); /* then the counter; the reader the other way round */
            e->there = atomic_load(&e->ring->taken);
            if (!has_room(e, all)) return known ? -1 : 0;
        }
    }
    memcpy(e->ring->bytes + (e->here & (e->size - 1)), record, sizeof *record);
    if (bytes) to_ring(e, e->here + sizeof *record, data, bytes);
    e->here += all;
    atomic_store_explicit(&e->ring->written, e->here, memory_order_release);
    return 1;
}

/* The next record; 0: there is none. */
static inline int peek(struct end *e, struct record *record) {
    if (e->here == e->there) {
        e->there = atomic_load_explicit(&e->ring->written, memory_order_acquire);
        if (e->here == e->there) return 0;
    }
    memcpy(record, e->ring->bytes + (e->here & (e->size - 1)), sizeof *record);
    return 1;
}

/* What follows the record that was seen. */
static inline void copy_out(const struct end *e, void *to, size_t bytes) {
    if (!bytes) return;
    size_t from = (e->here + sizeof(struct record)) & (e->size - 1);
    size_t first = bytes < e->size - from ? bytes : e->size - from;
    memcpy(to, e->ring->bytes + from, first);
    if (first < bytes) memcpy((uint8_t *)to + first, e->ring->bytes, bytes - first);
}

/* Its place is free. Whether the writer waits for that. */
static inline int drop(struct end *e, size_t bytes) {
    e->here += padded(bytes);
    atomic_store(&e->ring->taken, e->here);
    return atomic_load(&e->ring->wanted) && atomic_exchange(&e->ring->wanted, 0);
}

#endif
