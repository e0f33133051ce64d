/* For LD_PRELOAD: freed blocks of 64 KiB to 1 MiB are not used again, and each access to them is a SIGSEGV. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

void free(void *block) {
    static void (*next)(void *);
    if (!next) next = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    size_t bytes = block ? malloc_usable_size(block) : 0;
    if (bytes < 64 << 10 || bytes > 1 << 20) {
        next(block);
        return;
    }
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)block + page - 1) & -page;
    uintptr_t end = ((uintptr_t)block + bytes) & -page;
    mprotect((void *)first, end - first, PROT_NONE);
}
