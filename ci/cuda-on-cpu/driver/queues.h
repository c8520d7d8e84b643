/* The queues of devices: those of zeropp-comm/tests/nccl/pretend.c, as its NCCL works on them. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
struct Event;
#endif
typedef struct Queue Queue;

Queue *queue_start(int device, int number);
void queue_end(Queue *);
int queue_device(const Queue *);
int queue_number(const Queue *);
void queue_add(Queue *, void (*run)(void *), void *argument);

/* Given by the driver: waits as the seed wants before what a queue does next; and whether a queue
 * of `device` may use this memory, said where it may not. */
void driver_delay(uint64_t *random);
int driver_may_touch(int device, const void *at, size_t bytes, int write);

#ifdef __cplusplus
/* Of pretend.c. */
Event *pretendRecord(Queue *);
Event *pretendShare(Event *);
void pretendWait(Queue *, Event *);
int pretendIsDone(Event *);
void pretendJoin(Event *);
void pretendEventFree(Event *);
}
#endif
