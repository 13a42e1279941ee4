/* A library for LD_PRELOAD: calls of the system fail for chosen files, as on a disk or a file server
   that does not answer.

   FAIL_PATH   the calls fail for files with this text in their path
   FAIL_ERRNO  the number of the error; of several, separated by commas, one is drawn for each call
   FAIL_CALLS  which calls fail, letters: o open, r read, s stat, l list a folder, k lock, w write
               and flush, m rename, u remove, d make a folder
   FAIL_CHANCE percentage of the calls that fail, drawn at random; without it all of them
   FAIL_SEED   seed of what is drawn; each process draws other numbers
   FAIL_WHILE  the calls fail only while a file of this path exists; without it they always fail
   FAIL_LOG    a file to which a byte is appended for each call that failed */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name, type) \
    static __typeof__(type) real; if (!real) real = (__typeof__(type))dlsym(RTLD_NEXT, name)

/* Return a random number below a limit. */
static unsigned int draw(unsigned int limit) {
    static __thread unsigned int state;
    if (!state) {
        const char *seed = getenv("FAIL_SEED");
        state = (seed ? atoi(seed) : 0) * 2654435761u + syscall(SYS_gettid) * 40503u + 1;
    }
    return rand_r(&state) % limit;
}

/* Return one of the numbers in a text, which are separated by commas. */
static int draw_number(const char *numbers) {
    unsigned int count = 1;
    for (const char *c = numbers; *c; c++) count += *c == ',';
    for (unsigned int skip = count > 1 ? draw(count) : 0; skip; skip--)
        numbers = strchr(numbers, ',') + 1;
    return atoi(numbers);
}

static int must_fail(const char *path, char call) {
    const char *wanted = getenv("FAIL_PATH"), *calls = getenv("FAIL_CALLS");
    const char *while_file = getenv("FAIL_WHILE"), *number = getenv("FAIL_ERRNO");
    const char *log_file = getenv("FAIL_LOG");
    if (!path || !wanted || !calls || !number || !strchr(calls, call) || !strstr(path, wanted))
        return 0;
    const char *chance = getenv("FAIL_CHANCE");
    if (while_file && syscall(SYS_access, while_file, F_OK) != 0) return 0;
    if (chance && draw(100) >= (unsigned int)atoi(chance)) return 0;
    if (log_file) {
        int log = syscall(SYS_openat, AT_FDCWD, log_file, O_WRONLY | O_APPEND | O_CREAT, 0600);
        if (log >= 0) { syscall(SYS_write, log, "x", 1); syscall(SYS_close, log); }
    }
    errno = draw_number(number);
    return 1;
}

static const char *path_of(int fd, char *buffer, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buffer, size - 1);
    if (n < 0) return NULL;
    buffer[n] = 0;
    return buffer;
}

static int fd_must_fail(int fd, char call) {
    char buffer[4096];
    return getenv("FAIL_PATH") && must_fail(path_of(fd, buffer, sizeof buffer), call);
}

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...) {                                      \
        REAL(#name, int (*)(const char *, int, ...));                                 \
        va_list args; va_start(args, flags); int mode = va_arg(args, int); va_end(args); \
        return must_fail(path, 'o') ? -1 : real(path, flags, mode);                   \
    }
OPEN(open)
OPEN(open64)

/* Return whether a call must fail for a path that may be relative to an open folder. */
static int entry_must_fail(int folder, const char *path, char call) {
    char folder_path[4096], whole[8192];
    if (!getenv("FAIL_PATH") || !path) return 0;
    if (path[0] == '/' || folder == AT_FDCWD || !path_of(folder, folder_path, sizeof folder_path))
        return must_fail(path, call);
    snprintf(whole, sizeof whole, "%s/%s", folder_path, path);
    return must_fail(whole, call);
}

#define OPENAT(name)                                                                  \
    int name(int folder, const char *path, int flags, ...) {                          \
        REAL(#name, int (*)(int, const char *, int, ...));                            \
        va_list args; va_start(args, flags); int mode = va_arg(args, int); va_end(args); \
        return entry_must_fail(folder, path, 'o') ? -1 : real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t read(int fd, void *data, size_t n) {
    REAL("read", ssize_t (*)(int, void *, size_t));
    return fd_must_fail(fd, 'r') ? -1 : real(fd, data, n);
}

#define PREAD(name)                                                                   \
    ssize_t name(int fd, void *data, size_t n, off_t offset) {                        \
        REAL(#name, ssize_t (*)(int, void *, size_t, off_t));                         \
        return fd_must_fail(fd, 'r') ? -1 : real(fd, data, n, offset);                \
    }
PREAD(pread)
PREAD(pread64)

#define STAT(name)                                                                    \
    int name(const char *path, struct stat *result) {                                 \
        REAL(#name, int (*)(const char *, struct stat *));                            \
        return must_fail(path, 's') ? -1 : real(path, result);                        \
    }
STAT(stat)
STAT(lstat)

#define STAT64(name)                                                                  \
    int name(const char *path, struct stat64 *result) {                               \
        REAL(#name, int (*)(const char *, struct stat64 *));                          \
        return must_fail(path, 's') ? -1 : real(path, result);                        \
    }
STAT64(stat64)
STAT64(lstat64)

int fstatat(int folder, const char *path, struct stat *result, int flags) {
    REAL("fstatat", int (*)(int, const char *, struct stat *, int));
    return entry_must_fail(folder, path, 's') ? -1 : real(folder, path, result, flags);
}

int fstatat64(int folder, const char *path, struct stat64 *result, int flags) {
    REAL("fstatat64", int (*)(int, const char *, struct stat64 *, int));
    return entry_must_fail(folder, path, 's') ? -1 : real(folder, path, result, flags);
}

/* Locks of files: flock, and those of fcntl and lockf. */
int flock(int fd, int operation) {
    REAL("flock", int (*)(int, int));
    return fd_must_fail(fd, 'k') ? -1 : real(fd, operation);
}

static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||
           command == F_OFD_SETLKW;
}

#define FCNTL(name)                                                                   \
    int name(int fd, int command, ...) {                                              \
        REAL(#name, int (*)(int, int, ...));                                          \
        va_list args; va_start(args, command); void *value = va_arg(args, void *); va_end(args); \
        return is_lock(command) && fd_must_fail(fd, 'k') ? -1 : real(fd, command, value); \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

int lockf(int fd, int command, off_t length) {
    REAL("lockf", int (*)(int, int, off_t));
    return fd_must_fail(fd, 'k') ? -1 : real(fd, command, length);
}

DIR *opendir(const char *path) {
    REAL("opendir", DIR *(*)(const char *));
    return must_fail(path, 'l') ? NULL : real(path);
}

/* Calls that write. */
ssize_t write(int fd, const void *data, size_t n) {
    REAL("write", ssize_t (*)(int, const void *, size_t));
    return fd_must_fail(fd, 'w') ? -1 : real(fd, data, n);
}

#define PWRITE(name)                                                                  \
    ssize_t name(int fd, const void *data, size_t n, off_t offset) {                  \
        REAL(#name, ssize_t (*)(int, const void *, size_t, off_t));                   \
        return fd_must_fail(fd, 'w') ? -1 : real(fd, data, n, offset);                \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define FLUSH(name)                                                                   \
    int name(int fd) {                                                                \
        REAL(#name, int (*)(int));                                                    \
        return fd_must_fail(fd, 'w') ? -1 : real(fd);                                 \
    }
FLUSH(fsync)
FLUSH(fdatasync)

int rename(const char *from, const char *to) {
    REAL("rename", int (*)(const char *, const char *));
    return must_fail(to, 'm') ? -1 : real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL("renameat", int (*)(int, const char *, int, const char *));
    return entry_must_fail(to_folder, to, 'm') ? -1 : real(from_folder, from, to_folder, to);
}

int unlink(const char *path) {
    REAL("unlink", int (*)(const char *));
    return must_fail(path, 'u') ? -1 : real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL("unlinkat", int (*)(int, const char *, int));
    return entry_must_fail(folder, path, 'u') ? -1 : real(folder, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL("mkdir", int (*)(const char *, mode_t));
    return must_fail(path, 'd') ? -1 : real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL("mkdirat", int (*)(int, const char *, mode_t));
    return entry_must_fail(folder, path, 'd') ? -1 : real(folder, path, mode);
}
