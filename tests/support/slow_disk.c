/* A slow disk for a process that is started with this library in LD_PRELOAD.
 *
 * Data written below $SLOW_DISK reaches the disk at the speed in the file "speed" of that folder,
 * in bytes per second; 0 stops the disk. A write only fills the page cache. A call that syncs waits
 * for all bytes that have not reached the disk. Each wait appends a line to the file "waits": the
 * call, and the number of bytes. Opening a file takes the seconds in the file "latency".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILES 4096
#define WAIT_AFTER 4

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { ino_t inode; long long dirty; } files[FILES];

static const char *root(void) { return getenv("SLOW_DISK"); }

/* The dirty bytes of a file below the root, or NULL. */
static long long *dirty_of(int descriptor)
{
    char link[64], path[4096];
    struct stat status;
    if (root() == NULL)
        return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || strncmp(path, root(), strlen(root())) != 0)
        return NULL;
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode))
        return NULL;
    for (int i = 0; i < FILES; i++)
        if (files[i].inode == status.st_ino || files[i].inode == 0) {
            files[i].inode = status.st_ino;
            return &files[i].dirty;
        }
    return NULL;
}

/* The number in a file of the root folder. fopen() calls none of the functions below. */
static double number(const char *name, double otherwise)
{
    char path[4096];
    double found = otherwise;
    snprintf(path, sizeof path, "%s/%s", root(), name);
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        if (fscanf(file, "%lf", &found) != 1)
            found = otherwise;
        fclose(file);
    }
    return found;
}

static void drain(int descriptor, const char *call, long long most)
{
    char path[4096];
    pthread_mutex_lock(&lock);
    long long *dirty = dirty_of(descriptor);
    long long bytes = dirty == NULL ? 0 : *dirty < most ? *dirty : most;
    if (dirty != NULL)
        *dirty -= bytes;
    pthread_mutex_unlock(&lock);
    if (bytes == 0)
        return;
    snprintf(path, sizeof path, "%s/waits", root());
    FILE *log = fopen(path, "a");
    if (log == NULL || fprintf(log, "%s %lld\n", call, bytes) < 0 || fclose(log) != 0)
        abort();
    /* In small steps, because the speed may change meanwhile. */
    for (double rest = bytes; rest > 0; usleep(10000))
        rest -= number("speed", 1e12) / 100;
}

ssize_t write(int descriptor, const void *data, size_t size)
{
    static ssize_t (*real)(int, const void *, size_t);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "write");
    ssize_t count = real(descriptor, data, size);
    pthread_mutex_lock(&lock);
    long long *dirty = count > 0 ? dirty_of(descriptor) : NULL;
    if (dirty != NULL)
        *dirty += count;
    pthread_mutex_unlock(&lock);
    return count;
}

int fsync(int descriptor)
{
    static int (*real)(int);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "fsync");
    drain(descriptor, "fsync", 1LL << 60);
    return real(descriptor);
}

int fdatasync(int descriptor)
{
    static int (*real)(int);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "fdatasync");
    drain(descriptor, "fdatasync", 1LL << 60);
    return real(descriptor);
}

int sync_file_range(int descriptor, off64_t offset, off64_t size, unsigned flags)
{
    static int (*real)(int, off64_t, off64_t, unsigned);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "sync_file_range");
    if (flags & WAIT_AFTER)
        drain(descriptor, "sync_file_range", size);
    return real(descriptor, offset, size, flags);
}

static void find(const char *path)
{
    if (root() != NULL && strncmp(path, root(), strlen(root())) == 0)
        usleep((useconds_t)(1e6 * number("latency", 0)));
}

#define OPENS(name)                                                                              \
    int name(const char *path, int flags, ...)                                                   \
    {                                                                                            \
        static int (*real)(const char *, int, ...);                                              \
        va_list rest;                                                                            \
        va_start(rest, flags);                                                                   \
        mode_t mode = va_arg(rest, mode_t);                                                      \
        va_end(rest);                                                                            \
        if (real == NULL)                                                                        \
            real = dlsym(RTLD_NEXT, #name);                                                      \
        find(path);                                                                              \
        return real(path, flags, mode);                                                          \
    }

OPENS(open)
OPENS(open64)
