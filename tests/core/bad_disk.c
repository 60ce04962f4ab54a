/* Makes some file calls fail in a process that is started with this library in LD_PRELOAD.
 *
 * $BAD_CALLS lists the failing calls with their errors: "rename=5,fsync=5" (numbers of errno.h).
 * They fail below the directory $BAD_DISK. All other calls are executed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The error that a call gets at a path; 0: none. */
static int refused(const char *call, const char *path)
{
    const char *root = getenv("BAD_DISK"), *calls = getenv("BAD_CALLS");
    if (root == NULL || calls == NULL || path == NULL || strstr(path, root) == NULL)
        return 0;
    for (const char *at = calls; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, call, strlen(call)) == 0 && at[strlen(call)] == '=')
            return atoi(at + strlen(call) + 1);
    }
    return 0;
}

static int refused_at(const char *call, int descriptor)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return refused(call, path);
}

#define REAL(name) static __typeof__(&name) real; if (real == NULL) real = dlsym(RTLD_NEXT, #name)

int rename(const char *from, const char *to)
{
    REAL(rename);
    int error = refused("rename", from);
    return error ? (errno = error, -1) : real(from, to);
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    REAL(renameat2);
    int error = refused("renameat2", from);
    return error ? (errno = error, -1) : real(a, from, b, to, flags);
}

int symlink(const char *target, const char *path)
{
    REAL(symlink);
    int error = refused("symlink", path);
    return error ? (errno = error, -1) : real(target, path);
}

int fsync(int descriptor)
{
    REAL(fsync);
    int error = refused_at("fsync", descriptor);
    return error ? (errno = error, -1) : real(descriptor);
}
