/* Regions: memory that all ranks of a group have mapped. All ranks change the list of a group in the same way. */
#define _GNU_SOURCE
#include "regions.h"

#include <pthread.h>
#include <stdlib.h>

struct place {
    uint8_t *local;  /* address of a rank's region in this process */
    uint64_t remote; /* address in the rank's own process */
};

struct region {
    struct region *next;
    uint32_t number;
    size_t bytes;
    struct place of[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the lists of all groups: held briefly */

int phx_add_region(phx_group *g, uint32_t number, size_t bytes, void *const *local, const uint64_t *remote) {
    struct region *region = malloc(sizeof *region + (size_t)g->ranks * sizeof *region->of);
    if (!region) return -1;
    region->number = number, region->bytes = bytes;
    for (int r = 0; r < g->ranks; r++) region->of[r] = (struct place){local[r], remote[r]};
    pthread_mutex_lock(&lock);
    region->next = g->regions;
    g->regions = region;
    pthread_mutex_unlock(&lock);
    return 0;
}

void phx_remove_region(phx_group *g, uint32_t number) {
    pthread_mutex_lock(&lock);
    for (struct region **at = &g->regions; *at; at = &(*at)->next)
        if ((*at)->number == number) {
            struct region *removed = *at;
            *at = removed->next;
            free(removed);
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* No thread is in a call. Do not take the lock: a forked process may have inherited it locked. */
void phx_regions_close(phx_group *g) {
    for (struct region *one; (one = g->regions); free(one)) g->regions = one->next;
}

uint32_t phx_region_of(phx_group *g, const void *data, size_t bytes) {
    uint32_t number = 0;
    if (bytes < PHX_REGION) return 0;
    pthread_mutex_lock(&lock);
    for (struct region *one = g->regions; one && !number; one = one->next) {
        const uint8_t *own = one->of[g->rank].local, *at = data;
        if (at >= own && at + bytes <= own + one->bytes) number = one->number;
    }
    pthread_mutex_unlock(&lock);
    return number;
}

int phx_region_find(phx_group *g, uint32_t number, const uint64_t *remote, size_t bytes, uint8_t **local) {
    pthread_mutex_lock(&lock);
    struct region *one = g->regions;
    while (one && one->number != number) one = one->next;
    for (int r = 0; one && r < g->ranks; r++) {
        uint64_t offset = remote[r] - one->of[r].remote;
        if (offset > one->bytes || bytes > one->bytes - offset) one = NULL;
        else local[r] = one->of[r].local + offset;
    }
    pthread_mutex_unlock(&lock);
    return one ? 0 : -1;
}
