// What the parts of the driver share.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>

#include "queues.h"

#define API extern "C" __attribute__((visibility("default")))

namespace driver {

using Address = uint64_t;

// As CUDA numbers them.
enum Result : int {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_PTX = 218, INVALID_HANDLE = 400, NOT_FOUND = 500,
    NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801,
};

constexpr int MAX_DEVICES = 64;

// Read once from the environment; README.md says what each means.
struct Settings {
    int devices, capability;
    uint64_t memory, delay_us, seed, max_threads, tuner, blocks;
    bool count_only, abort_at_error, quiet, real_time;
    const char *stats, *ptx;
    FILE *log;
};
const Settings &settings();

struct Context {
    int device;
    std::atomic<int> error; // of a kernel; as with CUDA, nothing works on the device afterwards
};
Context *context_of(int device);
Context *current_context();

// Says that the program did what it may not, counts it, and gives `result` back.
Result wrong(Result result, const std::string &what);
long errors();

// The stream may be used now: it is there, its device is current and has had no error.
Result usable(Queue *stream, const char *call);
void wait_for(Queue *);
void wait_for_device(int device);
double seconds();
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Memory. Says what is wrong and gives the error, or OK.
Result may_touch(int device, Address, uint64_t bytes, bool write, const char *who);
// A kernel's access on this thread's device; throws ptx::Fault.
void check_kernel(Address, uint64_t bytes, bool write);
extern thread_local int running_device;

class Traffic;
extern thread_local Traffic *traffic; // of the launch that this thread runs, where it is wanted

// The clock of the stream that this thread serves: what the autotuner sees.
extern thread_local double virtual_clock;

struct Counts {
    std::atomic<long> modules, launches, skipped, events, host_waits, frees;
    std::atomic<long> up, up_bytes, down, down_bytes, across, across_bytes;
    std::atomic<long> now[MAX_DEVICES], peak[MAX_DEVICES];
};
extern Counts counts;
void write_stats(const char *path);

} // namespace driver
