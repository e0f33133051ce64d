/* Memory that every rank has mapped. What lies in it is reduced where it is: each rank takes its part from all, and puts
   the result into all. Every byte is read once and written once, by one rank. */
#define _GNU_SOURCE
#include "rounds.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PIECE (32u << 10) /* bytes whose result, and what it comes of, stay in the first caches until it is everywhere */

struct place {
    uint8_t *here;  /* of the region of a rank, in this process */
    uint64_t there; /* and in its own */
};

struct region {
    struct region *next;
    uint32_t number;
    size_t bytes;
    struct place of[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all lists: held for a look */

int phx_lend(phx_group *g, uint32_t number, size_t bytes, void *const *here, const uint64_t *there) {
    struct region *region = malloc(sizeof *region + (size_t)g->ranks * sizeof *region->of);
    if (!region) return -1;
    region->number = number, region->bytes = bytes;
    for (int r = 0; r < g->ranks; r++) region->of[r] = (struct place){here[r], there[r]};
    pthread_mutex_lock(&lock);
    region->next = g->regions;
    g->regions = region;
    pthread_mutex_unlock(&lock);
    return 0;
}

void phx_withdraw(phx_group *g, uint32_t number) {
    pthread_mutex_lock(&lock);
    for (struct region **at = &g->regions; *at; at = &(*at)->next)
        if ((*at)->number == number) {
            struct region *gone = *at;
            *at = gone->next;
            free(gone);
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* Nobody is in a call: no lock, which a forked process may have come with. */
void phx_regions_close(phx_group *g) {
    for (struct region *one; (one = g->regions); free(one)) g->regions = one->next;
}

uint32_t phx_region_of(phx_group *g, const void *data, size_t bytes) {
    uint32_t number = 0;
    if (bytes < PHX_REGION) return 0;
    pthread_mutex_lock(&lock);
    for (struct region *one = g->regions; one && !number; one = one->next) {
        const uint8_t *own = one->of[g->rank].here, *at = data;
        if (at >= own && at + bytes <= own + one->bytes) number = one->number;
    }
    pthread_mutex_unlock(&lock);
    return number;
}

/* Where the tensors of all ranks are, if they lie in one region: all ranks say the same number, so all know it. */
static int find(phx_group *g, uint32_t turn, size_t bytes, uint8_t **at) {
    uint32_t number = notice_of(g, 0, turn)->region;
    for (int r = 1; r < g->ranks; r++)
        if (notice_of(g, r, turn)->region != number) number = 0;
    if (!number) return 0;
    pthread_mutex_lock(&lock);
    struct region *one = g->regions;
    while (one && one->number != number) one = one->next;
    for (int r = 0; one && r < g->ranks; r++) {
        uint64_t offset = notice_of(g, r, turn)->address - one->of[r].there;
        if (offset > one->bytes || bytes > one->bytes - offset) one = NULL;
        else at[r] = one->of[r].here + offset;
    }
    pthread_mutex_unlock(&lock);
    return one ? 1 : -1;
}

int phx_fold_mapped(phx_group *g, const struct phx_call *c, uint32_t turn) {
    uint8_t *at[PHX_MOST];
    size_t item = phx_itemsize(c->dtype), count = c->out[0].bytes / item, most = less(g->piece, PIECE) / item;
    int found = find(g, turn, c->out[0].bytes, at);
    if (found <= 0) return found ? phx_give_up(g, PHX_FAILED) : -1;
    size_t ranks = (size_t)g->ranks, rank = (size_t)g->rank, each = count / ranks, more = count % ranks;
    size_t from = each * rank + less(rank, more), to = from + each + (rank < more);
    for (size_t i = from; i < to; i += most) {
        const void *inputs[PHX_MOST];
        size_t some = less(to - i, most);
        for (int r = 0; r < g->ranks; r++) inputs[r] = at[r] + i * item;
        phx_reduce(g->scratch, inputs, g->ranks, some, c->dtype, c->op, c->before, c->average);
        for (int r = 0; r < g->ranks; r++) memcpy(at[r] + i * item, g->scratch, some * item);
        phx_fault(g);
    }
    return phx_meet(g);
}
