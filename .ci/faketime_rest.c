/* What libfaketime 0.9 gets wrong for this suite; preloaded before it by .ci/surroundings. It moves waits for an instant
   of the monotonic clock, though told to leave that clock alone, and leaves the kernel's stamps of packets as they are. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

int timerfd_settime(int fd, int flags, const struct itimerspec *value, struct itimerspec *old) {
    return syscall(SYS_timerfd_settime, fd, flags, value, old);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    ssize_t got = syscall(SYS_recvmsg, fd, message, flags);
    struct timespec moved, real;
    clock_gettime(CLOCK_REALTIME, &moved);
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
    long by = moved.tv_sec - real.tv_sec, days = (by + (by > 0 ? 43200 : -43200)) / 86400;
    if (got > 0)
        for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part)) {
            struct timespec *stamp = (struct timespec *)CMSG_DATA(part);
            if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SO_TIMESTAMPNS && stamp->tv_sec)
                stamp->tv_sec += days * 86400;
        }
    return got;
}
