/* Shared memory for point-to-point messages: one doorbell per rank, two ring buffers per ordered pair of ranks.

   A ring has one writer and one reader. Records begin at cache lines; the data that follows a record may wrap around.
   Counters are bytes since the start, and wrap around too. */
#ifndef PHX_RINGS_H
#define PHX_RINGS_H

#include <string.h>

#include "group.h"

/* Who may sleep at a doorbell. The progress thread is not woken for messages that only a waiting thread needs. */
enum { WAITER = 1, PROGRESS_THREAD = 2, BOTH = 3 };

struct doorbell {
    _Alignas(2 * CACHE_LINE) atomic_u32 rung; /* threads sleep on it */
    atomic_u32 wake;                          /* which of them sleep and must be woken */
    atomic_u32 core;                          /* core on which it last ran, plus 1 */
    atomic_u32 pending[PHX_MAX_RANKS / 32];   /* ranks that have written something, one bit each */
};

enum { EAGER, OFFER, PIECE, ACK, SEND_PIECES, CANCELLED };

struct record {
    uint32_t kind;
    int32_t result;   /* ACK */
    int64_t tag;      /* EAGER, OFFER */
    uint64_t bytes;   /* of the message; PIECE: of this piece; ACK: what the receiver expected */
    uint64_t to;      /* the reader's ticket that this refers to */
    uint64_t from;    /* the writer's ticket */
    uint64_t address; /* OFFER: where the message is, in the writer's memory */
};

struct ring {
    _Alignas(2 * CACHE_LINE) atomic_u32 written;
    atomic_u32 cancelled; /* the writer has cancelled an offer before */
    _Alignas(2 * CACHE_LINE) atomic_u32 consumed;
    atomic_u32 writer_waits; /* the writer waits for space */
    _Alignas(2 * CACHE_LINE) uint8_t bytes[];
};

/* One end of a ring, from the perspective of its process. */
struct ring_end {
    struct ring *ring;
    uint32_t size;
    uint32_t position;      /* our counter */
    uint32_t peer_position; /* the other end's counter, as last read */
};

static inline uint32_t padded(size_t bytes) { return (uint32_t)((sizeof(struct record) + bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE); }

static inline void ring_copy_in(struct ring_end *e, uint32_t at, const void *data, size_t bytes) {
    size_t from = at & (e->size - 1), first = bytes < e->size - from ? bytes : e->size - from;
    memcpy(e->ring->bytes + from, data, first);
    if (first < bytes) memcpy(e->ring->bytes, (const uint8_t *)data + first, bytes - first);
}

static inline int has_room(const struct ring_end *e, uint32_t bytes) { return e->size - (e->position - e->peer_position) >= bytes; }

/* Write a record. Return 1, or: no space, and the reader must be notified that we wait for it (0), or already knows
   (-1). */
static inline int ring_write(struct ring_end *e, const struct record *record, const void *data, size_t bytes) {
    uint32_t all = padded(bytes);
    if (!has_room(e, all)) {
        e->peer_position = atomic_load_explicit(&e->ring->consumed, memory_order_acquire);
        if (!has_room(e, all)) {
            uint32_t known = atomic_exchange(&e->ring->writer_waits, 1); /* then read the counter; the reader does it in the reverse order */
            e->peer_position = atomic_load(&e->ring->consumed);
            if (!has_room(e, all)) return known ? -1 : 0;
        }
    }
    memcpy(e->ring->bytes + (e->position & (e->size - 1)), record, sizeof *record);
    if (bytes) ring_copy_in(e, e->position + sizeof *record, data, bytes);
    e->position += all;
    atomic_store_explicit(&e->ring->written, e->position, memory_order_release);
    return 1;
}

/* Read the next record; 0: none. */
static inline int ring_peek(struct ring_end *e, struct record *record) {
    if (e->position == e->peer_position) {
        e->peer_position = atomic_load_explicit(&e->ring->written, memory_order_acquire);
        if (e->position == e->peer_position) return 0;
    }
    memcpy(record, e->ring->bytes + (e->position & (e->size - 1)), sizeof *record);
    return 1;
}

/* Copy the data that follows the current record. */
static inline void ring_copy_out(const struct ring_end *e, void *to, size_t bytes) {
    if (!bytes) return;
    size_t from = (e->position + sizeof(struct record)) & (e->size - 1);
    size_t first = bytes < e->size - from ? bytes : e->size - from;
    memcpy(to, e->ring->bytes + from, first);
    if (first < bytes) memcpy((uint8_t *)to + first, e->ring->bytes, bytes - first);
}

/* Free the space of the current record. Return whether the writer waits for it. */
static inline int ring_consume(struct ring_end *e, size_t bytes) {
    e->position += padded(bytes);
    atomic_store(&e->ring->consumed, e->position);
    return atomic_load(&e->ring->writer_waits) && atomic_exchange(&e->ring->writer_waits, 0);
}

#endif
