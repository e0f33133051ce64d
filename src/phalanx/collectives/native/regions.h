/* Regions: memory that all ranks of a group have mapped. */
#ifndef PHX_REGIONS_H
#define PHX_REGIONS_H

#include "group.h"

/* Return the number of the region that contains all of this memory; 0: none, or it is too small to be worth it. */
uint32_t phx_region_of(phx_group *, const void *data, size_t bytes);

/* Translate the address of each rank's tensor to this process. Return 0, or -1: there is no such region, or a tensor is
   not in it. */
int phx_region_find(phx_group *, uint32_t number, const uint64_t *remote, size_t bytes, uint8_t **local);

void phx_regions_close(phx_group *);

#endif
