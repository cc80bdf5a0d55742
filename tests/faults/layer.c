/* Faults under all writes of a process below one folder; loaded by LD_PRELOAD, used by tests/faults/layer.py.

   What a process asks of the C library to change files is an operation: open for writing, write, truncate, fsync, rename,
   mkdir. Operations are told apart by kind, path, and how often this process has asked for the same; random names of
   scratch files count as equal. Each one fails once: what has failed is remembered in shared memory, so that children see
   what their siblings have been through. Short writes are no errors, and all writes are short at once. */

#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OFF, FAIL, STAY_FULL, SHORT, KILL };
enum { SLOTS = 1 << 14, NAME = 1024 };

struct shared {
    uint64_t failed[SLOTS]; /* operations that have had their fault */
    char hit[NAME];         /* the one of this attempt */
};

static struct shared *shared;
static char folder[PATH_MAX];
static int mode, error_number, struck, full;
static uint64_t asked[SLOTS]; /* by this process, since it was armed */

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void make_shared(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void faults_arm(const char *below, int how, int number) {
    snprintf(folder, sizeof folder, "%s", below);
    mode = how, error_number = number, struck = full = 0;
    memset(asked, 0, sizeof asked);
    shared->hit[0] = 0;
}

const char *faults_hit(void) { return shared->hit; }

void faults_forget(void) { memset(shared, 0, sizeof *shared); }

/* Without what is random in the names of scratch files: .NAME.01234567.incomplete, .tmpAbCdEf */
static void plain(char *name) {
    char *end = strstr(name, ".incomplete"), *temporary = strstr(name, "/.tmp");
    if (end && end - name > 8) {
        int hex = 1;
        for (char *c = end - 8; c < end; c++) hex &= isxdigit((unsigned char)*c) != 0;
        if (hex) memset(end - 8, '*', 8);
    }
    if (temporary && strlen(temporary) >= 11) memset(temporary + 5, '*', 6);
}

static uint64_t hash(const char *text, uint64_t seed) {
    uint64_t value = 14695981039346656037ull ^ seed;
    for (; *text; text++) value = (value ^ (unsigned char)*text) * 1099511628211ull;
    return value | 1;
}

/* Puts a value into a table; whether it was there. */
static int put(uint64_t *table, uint64_t value) {
    for (uint64_t at = value % SLOTS;; at = (at + 1) % SLOTS) {
        if (table[at] == value) return 1;
        if (!table[at]) return table[at] = value, 0;
    }
}

/* Whether an operation on a path is to go wrong now. */
static int strikes(const char *kind, const char *path) {
    char name[NAME], text[NAME];
    size_t length = strlen(folder);
    if (mode == OFF || !path || strncmp(path, folder, length) || (path[length] && path[length] != '/')) return 0;
    if (full) return 1;
    if (mode == SHORT) return !strcmp(kind, "write");
    if (struck) return 0;
    snprintf(name, sizeof name, "%s", path + length);
    plain(name);
    uint64_t times = 0, key;
    do snprintf(text, sizeof text, "%s %s #%d", kind, name, (int)times++);
    while (put(asked, key = hash(text, 0)));
    if (put(shared->failed, key)) return 0;
    snprintf(shared->hit, sizeof shared->hit, "%s", text);
    struck = 1;
    full = mode == STAY_FULL;
    return 1;
}

static int fails(const char *kind, const char *path) {
    if (!strikes(kind, path)) return 0;
    if (mode == KILL) kill(getpid(), SIGKILL);
    errno = error_number;
    return 1;
}

static const char *path_of(int fd, char *path) {
    char link[64];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    errno = saved;
    return length < 0 ? NULL : (path[length] = 0, path);
}

/* As the C library would open it: absolute. */
static const char *absolute(int at, const char *path, char *made) {
    char start[PATH_MAX];
    if (*path == '/') return path;
    if (at == AT_FDCWD ? !getcwd(start, sizeof start) : !path_of(at, start)) return NULL;
    snprintf(made, PATH_MAX, "%.2000s/%.2000s", start, path);
    return made;
}

static int opens(int at, const char *path, int flags) {
    char made[PATH_MAX];
    return mode != OFF && (flags & O_ACCMODE) != O_RDONLY && fails("open", absolute(at, path, made));
}

#define MODE(flags) \
    mode_t permissions = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        permissions = va_arg(rest, mode_t); \
        va_end(rest); \
    }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        MODE(flags) \
        return opens(AT_FDCWD, path, flags) ? -1 : real(path, flags, permissions); \
    }
#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        REAL(name); \
        MODE(flags) \
        return opens(at, path, flags) ? -1 : real(at, path, flags, permissions); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

/* A disk that fills takes half of a write, and then nothing more; a killed process leaves half. */
ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    char path[PATH_MAX];
    int was_full = full;
    if (mode == OFF || fd < 3 || !strikes("write", path_of(fd, path))) return real(fd, data, size);
    if (mode == FAIL || was_full || (mode == STAY_FULL && size < 2)) return errno = error_number, -1;
    ssize_t written = real(fd, data, size - size / 2);
    if (mode == KILL) kill(getpid(), SIGKILL);
    return written;
}

int fsync(int fd) {
    REAL(fsync);
    char path[PATH_MAX];
    return mode != OFF && fails("fsync", path_of(fd, path)) ? -1 : real(fd);
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    char path[PATH_MAX];
    return mode != OFF && fails("truncate", path_of(fd, path)) ? -1 : real(fd, size);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    char made[PATH_MAX];
    return mode != OFF && fails("rename", absolute(AT_FDCWD, to, made)) ? -1 : real(from, to);
}

int mkdir(const char *path, mode_t permissions) {
    REAL(mkdir);
    char made[PATH_MAX];
    if (mode == OFF || !access(path, F_OK)) return real(path, permissions);
    return fails("mkdir", absolute(AT_FDCWD, path, made)) ? -1 : real(path, permissions);
}
