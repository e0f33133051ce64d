/* Preloaded into a process: writes the name of every variable that native code reads to the file ENVLOG. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

static char *find(const char *name) {
    size_t length = strlen(name);
    for (char **entry = environ; entry && *entry; entry++)
        if (!strncmp(*entry, name, length) && (*entry)[length] == '=') return *entry + length + 1;
    return 0;
}

char *getenv(const char *name) {
    const char *path = find("ENVLOG");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
        (void)!write(fd, name, strlen(name));
        (void)!write(fd, "\n", 1);
        close(fd);
    }
    return find(name);
}

char *secure_getenv(const char *name) { return getenv(name); }
