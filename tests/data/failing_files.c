/* A library for LD_PRELOAD: calls of the system fail for chosen files, as on a disk or a file server
   that does not answer.

   FAIL_PATH   the calls fail for files with this text in their path
   FAIL_ERRNO  the number of the error; of several, separated by commas, one is drawn for each call
   FAIL_CALLS  which calls fail, letters: o open, r read, s stat, l list a folder, k lock, w write,
               shorten and flush, m rename or link, u remove, d make a folder
   FAIL_CHANCE percentage of the calls that fail, drawn at random; without it all of them
   FAIL_SEED   seed of what is drawn; each process draws other numbers
   FAIL_WHILE  the calls fail only while a file of this path exists; without it they always fail
   FAIL_COUNT  a file to which the letter of each chosen call is appended, whether it fails or not;
               it numbers the calls of all processes, from 1
   FAIL_FIRST  the number of the first call that fails, and it surely does; needs FAIL_COUNT. With 0
               no call fails
   FAIL_LAST   the number of the last call that fails; without it there is no last one
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

/* Append one letter to a file, and return how long the file is with it: this is the number of the
   letter, also if other processes append at the same time. Return 0 if it cannot be appended. */
static long append(const char *file, char letter) {
    int fd = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_APPEND | O_CREAT, 0666);
    if (fd < 0) return 0;
    long n_written = syscall(SYS_write, fd, &letter, 1);
    long number = n_written == 1 ? syscall(SYS_lseek, fd, 0, SEEK_CUR) : 0;
    syscall(SYS_close, fd);
    return number;
}

/* Return whether a call fails that is one of the chosen calls for one of the chosen files. */
static int is_due(char call) {
    const char *while_file = getenv("FAIL_WHILE"), *chance = getenv("FAIL_CHANCE");
    const char *count_file = getenv("FAIL_COUNT");
    const char *first_text = getenv("FAIL_FIRST"), *last_text = getenv("FAIL_LAST");
    long number = count_file ? append(count_file, call) : 0;
    long first = first_text ? atol(first_text) : 1, last = last_text ? atol(last_text) : 0;
    if (first_text && (!first || number < first)) return 0;
    if (last && number > last) return 0;
    if (while_file && syscall(SYS_access, while_file, F_OK) != 0) return 0;
    if (first_text && number == first) return 1;
    return !chance || draw(100) < (unsigned int)atoi(chance);
}

static int must_fail(const char *path, char call) {
    const char *wanted = getenv("FAIL_PATH"), *calls = getenv("FAIL_CALLS");
    const char *numbers = getenv("FAIL_ERRNO"), *log_file = getenv("FAIL_LOG");
    if (!path || !wanted || !calls || !numbers || !strchr(calls, call) || !strstr(path, wanted))
        return 0;
    int errno_before = errno;
    int fails = is_due(call);
    if (fails && log_file) append(log_file, call);
    errno = fails ? draw_number(numbers) : errno_before;
    return fails;
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

int fstat(int fd, struct stat *result) {
    REAL("fstat", int (*)(int, struct stat *));
    return fd_must_fail(fd, 's') ? -1 : real(fd, result);
}

int fstat64(int fd, struct stat64 *result) {
    REAL("fstat64", int (*)(int, struct stat64 *));
    return fd_must_fail(fd, 's') ? -1 : real(fd, result);
}

int access(const char *path, int mode) {
    REAL("access", int (*)(const char *, int));
    return must_fail(path, 's') ? -1 : real(path, mode);
}

int faccessat(int folder, const char *path, int mode, int flags) {
    REAL("faccessat", int (*)(int, const char *, int, int));
    return entry_must_fail(folder, path, 's') ? -1 : real(folder, path, mode, flags);
}

/* A folder that is open already, as Python lists it for os.scandir(fd). */
DIR *fdopendir(int fd) {
    REAL("fdopendir", DIR *(*)(int));
    return fd_must_fail(fd, 'l') ? NULL : real(fd);
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

int ftruncate(int fd, off_t length) {
    REAL("ftruncate", int (*)(int, off_t));
    return fd_must_fail(fd, 'w') ? -1 : real(fd, length);
}

int ftruncate64(int fd, off64_t length) {
    REAL("ftruncate64", int (*)(int, off64_t));
    return fd_must_fail(fd, 'w') ? -1 : real(fd, length);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    REAL("linkat", int (*)(int, const char *, int, const char *, int));
    return entry_must_fail(to_folder, to, 'm') ? -1
                                               : real(from_folder, from, to_folder, to, flags);
}

int link(const char *from, const char *to) {
    REAL("link", int (*)(const char *, const char *));
    return must_fail(to, 'm') ? -1 : real(from, to);
}

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
