/* A host that misbehaves, preloaded into a command. What it does stands in the folder $ATTACK, and may change in
   mid-run: a file `slow` makes every write to files below $ATTACK_BELOW wait that many ms, a file `errno` makes each of
   them, and each opening for writing, fail with that number; `address` is the address of every name that ends in .test. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int told(const char *name, char *text, int most) {
    char path[512];
    const char *folder = getenv("ATTACK");
    if (!folder) return 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    if (file < 0) return 0;
    int got = syscall(SYS_read, file, text, most - 1);
    syscall(SYS_close, file);
    text[got > 0 ? got : 0] = 0;
    return got > 0;
}

static int below(const char *path) {
    const char *folder = getenv("ATTACK_BELOW");
    return folder && !strncmp(path, folder, strlen(folder));
}

static int refuses(int fd) {
    char link[64], path[512], text[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    if (!below(path)) return 0;
    if (told("slow", text, sizeof text)) usleep(1000 * atoi(text));
    if (!told("errno", text, sizeof text)) return 0;
    errno = atoi(text);
    return 1;
}

ssize_t write(int fd, const void *data, size_t count) {
    return refuses(fd) ? -1 : syscall(SYS_write, fd, data, count);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    return refuses(fd) ? -1 : syscall(SYS_writev, fd, parts, count);
}

static int opening(int folder, const char *path, int flags, mode_t mode) {
    char text[32];
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && below(path) && told("errno", text, sizeof text)) {
        errno = atoi(text);
        return -1;
    }
    return syscall(SYS_openat, folder, path, flags, mode);
}

#define MODE va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more);
int open(const char *path, int flags, ...) { MODE return opening(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opening(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return opening(folder, path, flags, mode); }

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT, "getaddrinfo");
    char text[64];
    size_t length = name ? strlen(name) : 0;
    if (length > 5 && !strcmp(name + length - 5, ".test")) {
        if (!told("address", text, sizeof text)) return EAI_AGAIN;
        name = text;
    }
    return real(name, service, hints, found);
}
