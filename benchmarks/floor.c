/* The cheapest client of benchmarks/clients.py: a closed loop that reads responses and counts bytes.

       cc -O2 floor.c -o floor
       floor PORT CONCURRENCY REQUESTS BODY

   It opens CONCURRENCY connections to the server on the loopback interface, and sends REQUESTS requests with
   the JSON text BODY. A connection sends its next request when its response has ended. Nothing is decoded or
   kept and no time is taken, so no client with one read(2) for each arrival can be cheaper. It prints the
   numbers of reads and of received bytes. */

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

#define MAX_READY_CONNECTIONS 1024
#define EPOLL_TIMEOUT_MS 10000

/* The last chunk of a chunked body, with which a response ends. */
static const char LAST_CHUNK[] = "0\r\n\r\n";
static const ssize_t LAST_CHUNK_BYTES = sizeof LAST_CHUNK - 1;

static char read_buffer[1 << 18];

/* The bytes of the HTTP request that every connection sends, and how many they are. */
static char request[1 << 16];
static ssize_t request_bytes;

/* What has happened so far on all connections together. */
struct progress {
    long sent_requests;
    long ended_responses;
    long reads;
    long received_bytes;
};

/* Exit with a message and the text of errno. */
static void fail(const char *message) {
    perror(message);
    exit(1);
}

/* Write the HTTP request with this body to `request` and its length to `request_bytes`. */
static void format_request(int port, const char *body) {
    request_bytes = snprintf(request, sizeof request,
                             "POST /v1/chat/completions HTTP/1.1\r\n"
                             "Host: 127.0.0.1:%d\r\n"
                             "Content-Type: application/json\r\n"
                             "Content-Length: %zu\r\n\r\n%s",
                             port, strlen(body), body);
    if (request_bytes >= (ssize_t)sizeof request) {
        fprintf(stderr, "the body is too long\n");
        exit(2);
    }
}

/* Connect to a port of the loopback interface, and return the socket. */
static int connect_to_server(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);

    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect");

    int enabled = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &enabled, sizeof enabled);
    return fd;
}

/* Send the request on a connection and count it. */
static void send_request(int fd, struct progress *progress) {
    if (write(fd, request, request_bytes) != request_bytes) fail("write");
    progress->sent_requests++;
}

/* Open a connection, register it for epoll and send its first request. */
static void start_connection(int epoll_fd, int port, struct progress *progress) {
    int fd = connect_to_server(port);
    struct epoll_event registration = {.events = EPOLLIN, .data.fd = fd};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &registration)) fail("epoll_ctl");
    send_request(fd, progress);
}

/* Return whether received data ends a response. The last chunk may come in a read of its own, but the server
 * writes its five bytes at once, so that no read has only a part of them. */
static int ends_response(const char *data, ssize_t length) {
    return length >= LAST_CHUNK_BYTES &&
           !memcmp(data + length - LAST_CHUNK_BYTES, LAST_CHUNK, LAST_CHUNK_BYTES);
}

/* Read what has arrived on a connection. At the end of a response, send the next request, or close the
 * connection if all requests have been sent. */
static void read_connection(int fd, long total_requests, struct progress *progress) {
    ssize_t length = read(fd, read_buffer, sizeof read_buffer);
    if (length <= 0) fail("the server closed a connection");
    progress->reads++;
    progress->received_bytes += length;

    if (!ends_response(read_buffer, length)) return;
    progress->ended_responses++;
    if (progress->sent_requests < total_requests) {
        send_request(fd, progress);
    } else {
        close(fd);
    }
}

/* Read from all connections until every response has ended. */
static void read_all_responses(int epoll_fd, long total_requests, struct progress *progress) {
    struct epoll_event ready[MAX_READY_CONNECTIONS];
    while (progress->ended_responses < total_requests) {
        int ready_count = epoll_wait(epoll_fd, ready, MAX_READY_CONNECTIONS, EPOLL_TIMEOUT_MS);
        if (ready_count < 0 && errno == EINTR) continue;
        if (ready_count <= 0) fail("epoll_wait");

        for (int i = 0; i < ready_count; i++) {
            read_connection(ready[i].data.fd, total_requests, progress);
        }
    }
}

/* Run the closed loop as the command line says, and print the reads and received bytes as JSON. */
int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: floor PORT CONCURRENCY REQUESTS BODY\n");
        return 2;
    }
    int port = atoi(argv[1]);
    int concurrency = atoi(argv[2]);
    long total_requests = atol(argv[3]);
    format_request(port, argv[4]);

    struct progress progress = {0};
    int epoll_fd = epoll_create1(0);
    while (progress.sent_requests < concurrency && progress.sent_requests < total_requests) {
        start_connection(epoll_fd, port, &progress);
    }
    read_all_responses(epoll_fd, total_requests, &progress);

    printf("{\"reads\": %ld, \"bytes\": %ld}\n", progress.reads, progress.received_bytes);
    return 0;
}
