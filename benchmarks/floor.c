/* The floor of benchmarks/clients.py: reads answers from one server with epoll and read(2), and counts bytes.

       cc -O2 floor.c -o floor
       floor PORT LANES REQUESTS BODY        so many lanes in a closed loop; BODY is sent with each request

   Nothing is decoded, stamped or kept: no client can be cheaper with one read(2) for each arrival. An answer ends with
   the last chunk of its chunked body. Prints the reads and the bytes. */

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static char buffer[1 << 18];
static char request[1 << 16];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "floor PORT LANES REQUESTS BODY\n");
        return 2;
    }
    int port = atoi(argv[1]), lanes = atoi(argv[2]);
    long asked = atol(argv[3]), sent = 0, ended = 0, reads = 0, bytes = 0;
    int length = snprintf(request, sizeof request,
                          "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                          "Content-Length: %zu\r\n\r\n%s", port, strlen(argv[4]), argv[4]);
    if (length >= (int)sizeof request) return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int poll = epoll_create1(0), on = 1;
    for (int lane = 0; lane < lanes && sent < asked; lane++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        if (epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event)) fail("epoll_ctl");
        if (write(fd, request, length) != length) fail("write");
        sent++;
    }
    struct epoll_event ready[1024];
    while (ended < asked) {
        int found = epoll_wait(poll, ready, 1024, 10000);
        if (found < 0 && errno == EINTR) continue;
        if (found <= 0) fail("epoll_wait");
        for (int i = 0; i < found; i++) {
            int fd = ready[i].data.fd;
            ssize_t got = read(fd, buffer, sizeof buffer);
            if (got <= 0) fail("the server closed a connection");
            reads++;
            bytes += got;
            /* the last chunk may come in a read of its own; at least these five bytes come with one read here */
            if (got >= 5 && !memcmp(buffer + got - 5, "0\r\n\r\n", 5)) {
                ended++;
                if (sent < asked) {
                    if (write(fd, request, length) != length) fail("write");
                    sent++;
                } else close(fd);
            }
        }
    }
    printf("{\"reads\": %ld, \"bytes\": %ld}\n", reads, bytes);
    return 0;
}
