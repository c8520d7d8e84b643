// Streams, which are threads, and events.
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <vector>
#include <unistd.h>

#include "driver.h"

namespace driver {

// Never destroyed, as streams may still run when the process ends.
static std::mutex &streams_lock = *new std::mutex;
static auto &streams = *new std::set<Queue *>;
thread_local double virtual_clock;

// Short for most, so that all orders of two streams come up and a run still ends.
extern "C" void driver_delay(uint64_t *random) {
    uint64_t most = settings().delay_us;
    if (!most) return;
    *random = *random * 6364136223846793005u + (settings().seed * 2 + 1442695040888963407u);
    double x = (*random >> 33) / 2147483648.0;
    usleep(most * x * x * x);
}

static void wait_until(Event *end) {
    counts.host_waits++;
    pretendJoin(end);
    pretendEventFree(end);
}

void wait_for(Queue *stream) { wait_until(pretendRecord(stream)); }

void wait_for_device(int device) {
    std::vector<Event *> ends;
    {
        // A stream that is destroyed meanwhile still comes to its end; it is not touched then.
        std::lock_guard<std::mutex> guard(streams_lock);
        for (auto *s : streams) if (queue_device(s) == device) ends.push_back(pretendRecord(s));
    }
    for (auto *end : ends) wait_until(end);
}

Result usable(Queue *stream, const char *call) {
    std::string what = call;
    if (!stream) return wrong(INVALID_HANDLE, what + ": no stream");
    Context *context = current_context();
    if (!context) return wrong(INVALID_CONTEXT, what + " without a context");
    if (queue_device(stream) != context->device)
        return wrong(INVALID_HANDLE, what + ": a stream of device "
                     + std::to_string(queue_device(stream)) + " while device "
                     + std::to_string(context->device) + " is current");
    return (Result)context->error.load();
}

// An event is the state of its last record.
struct MyEvent {
    int device;
    std::mutex lock;
    Event *last = nullptr;
    std::shared_ptr<std::atomic<double>> when = std::make_shared<std::atomic<double>>(0);

    bool done() {
        std::lock_guard<std::mutex> guard(lock);
        return !last || pretendIsDone(last);
    }
    Event *end() {
        std::lock_guard<std::mutex> guard(lock);
        return last ? pretendShare(last) : nullptr;
    }
    void replace(Event *by) {
        std::lock_guard<std::mutex> guard(lock);
        if (last) pretendEventFree(last);
        last = by;
    }
};

static void stamp(void *argument) {
    auto *when = (std::shared_ptr<std::atomic<double>> *)argument;
    **when = settings().real_time ? seconds() : virtual_clock;
    delete when;
}

} // namespace driver

using namespace driver;

API int cuStreamCreate(Queue **stream, unsigned) {
    static std::atomic<int> number;
    Context *context = current_context();
    if (!context) return wrong(INVALID_CONTEXT, "cuStreamCreate without a context");
    *stream = queue_start(context->device, ++number);
    std::lock_guard<std::mutex> guard(streams_lock);
    streams.insert(*stream);
    return OK;
}
API int cuStreamCreateWithPriority(Queue **stream, unsigned flags, int) {
    return cuStreamCreate(stream, flags);
}
API int cuStreamDestroy_v2(Queue *stream) {
    {
        std::lock_guard<std::mutex> guard(streams_lock);
        if (!streams.erase(stream)) return wrong(INVALID_HANDLE, "cuStreamDestroy: no stream");
    }
    queue_end(stream);
    return OK;
}
API int cuStreamSynchronize(Queue *stream) {
    if (!stream) return wrong(INVALID_HANDLE, "cuStreamSynchronize: no stream");
    wait_for(stream);
    return context_of(queue_device(stream))->error;
}
// Done, if what is asked for next is done at once.
API int cuStreamQuery(Queue *stream) {
    Event *end = pretendRecord(stream);
    for (int n = 0; n < 20 && !pretendIsDone(end); n++) usleep(100);
    bool done = pretendIsDone(end);
    pretendEventFree(end);
    return done ? context_of(queue_device(stream))->error.load() : NOT_READY;
}
API int cuStreamGetCtx(Queue *stream, Context **context) {
    *context = context_of(queue_device(stream));
    return OK;
}
API int cuStreamIsCapturing(Queue *, int *capturing) { *capturing = 0; return OK; }

API int cuEventCreate(MyEvent **event, unsigned) {
    Context *context = current_context();
    if (!context) return wrong(INVALID_CONTEXT, "cuEventCreate without a context");
    *event = new MyEvent;
    (*event)->device = context->device;
    counts.events++;
    return OK;
}
API int cuEventDestroy_v2(MyEvent *event) {
    event->replace(nullptr);
    delete event;
    return OK;
}
API int cuEventRecord(MyEvent *event, Queue *stream) {
    if (!stream) return wrong(INVALID_HANDLE, "cuEventRecord: no stream");
    if (event->device != queue_device(stream))
        return wrong(INVALID_HANDLE, "cuEventRecord: an event of device "
                     + std::to_string(event->device) + " on a stream of device "
                     + std::to_string(queue_device(stream)));
    queue_add(stream, stamp, new std::shared_ptr<std::atomic<double>>(event->when));
    event->replace(pretendRecord(stream));
    return OK;
}
API int cuStreamWaitEvent(Queue *stream, MyEvent *event, unsigned) {
    if (!stream) return wrong(INVALID_HANDLE, "cuStreamWaitEvent: no stream");
    log_line("wait %d s%d", queue_device(stream), queue_number(stream));
    std::lock_guard<std::mutex> guard(event->lock);
    if (event->last) pretendWait(stream, event->last);
    return OK;
}
API int cuEventQuery(MyEvent *event) {
    return event->done() ? context_of(event->device)->error.load() : NOT_READY;
}
API int cuEventSynchronize(MyEvent *event) {
    if (Event *end = event->end()) wait_until(end);
    return context_of(event->device)->error;
}
API int cuEventElapsedTime_v2(float *ms, MyEvent *from, MyEvent *to) {
    *ms = (*to->when - *from->when) * 1e3;
    return OK;
}
API int cuEventElapsedTime(float *ms, MyEvent *from, MyEvent *to) {
    return cuEventElapsedTime_v2(ms, from, to);
}
