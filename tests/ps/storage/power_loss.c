/* Preloaded into a process: writes down, in order, what it changes below a folder, and what it has synced.

The journal (JOURNAL, opened with O_APPEND) holds one record a call, each written with one write():

    char kind, then as little-endian 64-bit numbers: inode, offset, length of the path, of the second path, of the data

    W data at an offset of a file       T a file's new size (in the offset)      S a file is synced
    C a new file      L another name of a file      R a name is another one's from now on    U a name goes
    D the names in a folder are synced

A call is written down before the record of any call that saw its effect, since the journal's lock is held around both.
Only what our servers call is taken; what it does not know of would be missed, so the test compares the files at the end.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *root;
static int journal = -1;

#define REAL(name, type, ...)                                 \
  static type (*real)(__VA_ARGS__);                           \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("POWER_LOSS_JOURNAL");
  root = getenv("POWER_LOSS_FOLDER");
  if (path && root) journal = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int below(const char *path) { return journal >= 0 && !strncmp(path, root, strlen(root)); }

static int name_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = journal < 0 ? -1 : readlink(link, path, PATH_MAX - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path);
}

static uint64_t inode_of(int fd) {
  struct stat found;
  return fstat(fd, &found) ? 0 : found.st_ino;
}

static uint64_t inode_at(const char *path) {
  struct stat found;
  return lstat(path, &found) ? 0 : found.st_ino;
}

static void note(char kind, uint64_t inode, uint64_t offset, const char *path, const char *second,
                 const struct iovec *data, int count, size_t length) {
  uint64_t numbers[5] = {inode, offset, path ? strlen(path) : 0, second ? strlen(second) : 0, length};
  struct iovec *parts = malloc((count + 4) * sizeof *parts);
  int used = 0;
  parts[used++] = (struct iovec){&kind, 1};
  parts[used++] = (struct iovec){numbers, sizeof numbers};
  parts[used++] = (struct iovec){(void *)path, numbers[2]};
  parts[used++] = (struct iovec){(void *)second, numbers[3]};
  for (int at = 0; at < count && length; at++) {
    size_t size = data[at].iov_len < length ? data[at].iov_len : length;
    parts[used++] = (struct iovec){data[at].iov_base, size};
    length -= size;
  }
  REAL("writev", ssize_t, int, const struct iovec *, int);
  if (real(journal, parts, used) < 0) abort();
  free(parts);
}

static int opened(int fd, int existed, int flags, const char *path) {
  if (fd >= 0 && below(path) && (flags & O_CREAT) && !existed) note('C', inode_of(fd), 0, path, 0, 0, 0, 0);
  if (fd >= 0 && below(path) && existed && (flags & O_TRUNC)) note('T', inode_of(fd), 0, path, 0, 0, 0, 0);
  return fd;
}

#define OPEN(symbol)                                            \
  int symbol(const char *path, int flags, ...) {                \
    va_list rest;                                               \
    va_start(rest, flags);                                      \
    mode_t mode = va_arg(rest, mode_t);                         \
    va_end(rest);                                               \
    REAL(#symbol, int, const char *, int, ...);                 \
    if (!below(path)) return real(path, flags, mode);           \
    pthread_mutex_lock(&lock);                                  \
    int existed = inode_at(path) != 0;                          \
    int fd = opened(real(path, flags, mode), existed, flags, path); \
    pthread_mutex_unlock(&lock);                                \
    return fd;                                                  \
  }
OPEN(open)
OPEN(open64)

static void wrote(int fd, const struct iovec *data, int count, off_t offset, ssize_t done) {
  char path[PATH_MAX];
  if (done > 0 && name_of(fd, path)) note('W', inode_of(fd), offset, path, 0, data, count, done);
}

#define LOCKED(expression)       \
  pthread_mutex_lock(&lock);     \
  expression;                    \
  pthread_mutex_unlock(&lock)

#define PWRITEV(symbol)                                                      \
  ssize_t symbol(int fd, const struct iovec *data, int count, off_t offset) { \
    REAL(#symbol, ssize_t, int, const struct iovec *, int, off_t);           \
    LOCKED(ssize_t done = real(fd, data, count, offset); wrote(fd, data, count, offset, done)); \
    return done;                                                             \
  }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PWRITEV2(symbol)                                                      \
  ssize_t symbol(int fd, const struct iovec *data, int count, off_t offset, int flags) { \
    REAL(#symbol, ssize_t, int, const struct iovec *, int, off_t, int);      \
    LOCKED(ssize_t done = real(fd, data, count, offset, flags); wrote(fd, data, count, offset, done)); \
    return done;                                                             \
  }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

#define PWRITE(symbol)                                                       \
  ssize_t symbol(int fd, const void *data, size_t size, off_t offset) {      \
    REAL(#symbol, ssize_t, int, const void *, size_t, off_t);                \
    struct iovec part = {(void *)data, size};                                \
    LOCKED(ssize_t done = real(fd, data, size, offset); wrote(fd, &part, 1, offset, done)); \
    return done;                                                             \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t write(int fd, const void *data, size_t size) {
  REAL("write", ssize_t, int, const void *, size_t);
  char path[PATH_MAX];
  if (fd == journal || !name_of(fd, path)) return real(fd, data, size);
  struct iovec part = {(void *)data, size};
  LOCKED(off_t at = lseek(fd, 0, SEEK_CUR); ssize_t done = real(fd, data, size); wrote(fd, &part, 1, at, done));
  return done;
}

static void resized(int fd) {
  char path[PATH_MAX];
  struct stat found;
  if (name_of(fd, path) && !fstat(fd, &found)) note('T', found.st_ino, found.st_size, path, 0, 0, 0, 0);
}

#define TRUNCATE(symbol)                                  \
  int symbol(int fd, off_t size) {                        \
    REAL(#symbol, int, int, off_t);                       \
    LOCKED(int failed = real(fd, size); resized(fd));     \
    return failed;                                        \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ALLOCATE(symbol)                                       \
  int symbol(int fd, off_t offset, off_t size) {               \
    REAL(#symbol, int, int, off_t, off_t);                     \
    LOCKED(int failed = real(fd, offset, size); resized(fd));  \
    return failed;                                             \
  }
ALLOCATE(posix_fallocate)
ALLOCATE(posix_fallocate64)

static void synced(int fd, int failed) {
  char path[PATH_MAX];
  struct stat found;
  if (failed || !name_of(fd, path) || fstat(fd, &found)) return;
  note(S_ISDIR(found.st_mode) ? 'D' : 'S', found.st_ino, 0, path, 0, 0, 0, 0);
}

/* What is synced is what was written when the call began: the lock is held all the while. */
#define SYNC(symbol)                                           \
  int symbol(int fd) {                                         \
    REAL(#symbol, int, int);                                   \
    LOCKED(int failed = real(fd); synced(fd, failed));         \
    return failed;                                             \
  }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *old, const char *new) {
  REAL("rename", int, const char *, const char *);
  LOCKED(uint64_t inode = inode_at(old); int failed = real(old, new);
         if (!failed && below(new)) note('R', inode, 0, old, new, 0, 0, 0));
  return failed;
}

int link(const char *old, const char *new) {
  REAL("link", int, const char *, const char *);
  LOCKED(int failed = real(old, new); if (!failed && below(new)) note('L', inode_at(new), 0, new, 0, 0, 0, 0));
  return failed;
}

int unlink(const char *path) {
  REAL("unlink", int, const char *);
  LOCKED(int failed = real(path); if (!failed && below(path)) note('U', 0, 0, path, 0, 0, 0, 0));
  return failed;
}
