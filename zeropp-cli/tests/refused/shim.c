/* Refuses one call of the system, as a full disk or a limit would: preloaded into a run by
 * tests/refused.rs.
 *
 * ZEROPP_REFUSE=CALL:N    the N-th call of CALL fails, and no other one
 * ZEROPP_REFUSE=CALL:N+   the N-th and all that follow
 * ZEROPP_COUNTS=FILE      at the end, how often each was called: a line "CALL COUNT" each
 *
 * CALL is thread, map, open, mkdir, write, sync or rename. Of files, only regular ones count; of
 * memory, files and what is larger than the small stack that Rust's library maps for each thread,
 * as it cannot do without; and only calls by the program itself: not those that load a library.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { THREAD, MAP, OPEN, MKDIR, WRITE, SYNC, RENAME, KINDS };
static const char *const names[KINDS] = {
    "thread", "map", "open", "mkdir", "write", "sync", "rename",
};
static const int errors[KINDS] = {EAGAIN, ENOMEM, EMFILE, ENOSPC, ENOSPC, EIO, EIO};

static atomic_long counts[KINDS];
static long refused_from[KINDS], refused_to[KINDS];

__attribute__((constructor)) static void begin(void) {
    const char *wish = getenv("ZEROPP_REFUSE");
    for (int kind = 0; wish && kind < KINDS; kind++) {
        size_t length = strlen(names[kind]);
        if (strncmp(wish, names[kind], length) != 0 || wish[length] != ':') continue;
        char *end;
        refused_from[kind] = strtol(wish + length + 1, &end, 10);
        refused_to[kind] = *end == '+' ? -1 : refused_from[kind];
    }
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("ZEROPP_COUNTS");
    FILE *file = path ? fopen(path, "w") : NULL;
    for (int kind = 0; file && kind < KINDS; kind++)
        fprintf(file, "%s %ld\n", names[kind], (long)counts[kind]);
    if (file) fclose(file);
}

/* Whether this call is to fail; errno says why. */
static int refuses(int kind) {
    long n = atomic_fetch_add(&counts[kind], 1) + 1;
    if (refused_from[kind] == 0 || n < refused_from[kind]) return 0;
    if (refused_to[kind] > 0 && n > refused_to[kind]) return 0;
    errno = errors[kind];
    return 1;
}

static int is_file(int fd) {
    struct stat found;
    return fd > 2 && fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

static int is_large(int fd, size_t length) { return fd >= 0 || length >= 64 << 10; }

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *),
                   void *with) {
    REAL(pthread_create);
    return refuses(THREAD) ? EAGAIN : real(thread, how, body, with);
}

void *mmap(void *at, size_t length, int access, int flags, int fd, off_t offset) {
    REAL(mmap);
    if (is_large(fd, length) && refuses(MAP)) return MAP_FAILED;
    return real(at, length, access, flags, fd, offset);
}

void *mmap64(void *at, size_t length, int access, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    if (is_large(fd, length) && refuses(MAP)) return MAP_FAILED;
    return real(at, length, access, flags, fd, offset);
}

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        return refuses(OPEN) ? -1 : real(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return refuses(MKDIR) ? -1 : real(path, mode);
}

ssize_t write(int fd, const void *bytes, size_t length) {
    REAL(write);
    return is_file(fd) && refuses(WRITE) ? -1 : real(fd, bytes, length);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    return is_file(fd) && refuses(WRITE) ? -1 : real(fd, parts, count);
}

int fsync(int fd) {
    REAL(fsync);
    return refuses(SYNC) ? -1 : real(fd);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return refuses(RENAME) ? -1 : real(from, to);
}
