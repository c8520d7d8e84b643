#include "queues.h"

/* What pretend.c calls at its hooks. A queue's first member is the stream that pretend.c sees. */
static void before_each(void *stream);
static int may_touch(void *stream, const void *at, size_t bytes, int write);
#define BEFORE_EACH(stream) before_each(stream)
#define MAY_TOUCH(stream, at, bytes, write) may_touch(stream, at, bytes, write)
#include "pretend.c" /* zeropp-comm/tests/nccl, by -I */

struct Queue {
    Stream stream;
    int device, number;
    uint64_t random;
};

static void before_each(void *stream) { driver_delay(&((Queue *)stream)->random); }
static int may_touch(void *stream, const void *at, size_t bytes, int write) {
    return driver_may_touch(((Queue *)stream)->device, at, bytes, write);
}

Queue *queue_start(int device, int number) {
    Queue *q = calloc(1, sizeof *q);
    q->device = device;
    q->number = number;
    q->random = number;
    pthread_mutex_init(&q->stream.lock, NULL);
    pthread_cond_init(&q->stream.bell, NULL);
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, &q->stream)) abort();
    pthread_detach(thread);
    return q;
}

void queue_end(Queue *q) { pretendStreamFree(&q->stream); }
int queue_device(const Queue *q) { return q->device; }
int queue_number(const Queue *q) { return q->number; }
void queue_add(Queue *q, void (*run)(void *), void *argument) {
    enqueue(&q->stream, run, argument);
}
