// Settings, devices, contexts, and what is said at the end.
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>

#include "../interpreter/program.h"
#include "driver.h"

namespace driver {

Counts counts;
static std::atomic<long> error_count;
static thread_local Context *current;

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, nullptr, 0) : otherwise;
}

const Settings &settings() {
    static const Settings all = [] {
        Settings s;
        s.devices = number("CUDA_ON_CPU_DEVICES", 1);
        s.capability = number("CUDA_ON_CPU_CAPABILITY", 90);
        s.memory = number("CUDA_ON_CPU_MEMORY", 8ull << 30);
        s.delay_us = number("CUDA_ON_CPU_DELAY_US", 0);
        s.seed = number("CUDA_ON_CPU_SEED", 0);
        s.max_threads = number("CUDA_ON_CPU_MAX_THREADS", 300000);
        s.tuner = number("CUDA_ON_CPU_TUNER", 0);
        s.blocks = number("CUDA_ON_CPU_BLOCKS", 0);
        s.count_only = number("CUDA_ON_CPU_COUNT", 0) || s.blocks;
        s.abort_at_error = number("CUDA_ON_CPU_ABORT", 0);
        s.quiet = number("CUDA_ON_CPU_QUIET", 0);
        s.real_time = number("CUDA_ON_CPU_REAL_TIME", 0);
        s.stats = getenv("CUDA_ON_CPU_STATS");
        s.ptx = getenv("CUDA_ON_CPU_PTX");
        const char *log = getenv("CUDA_ON_CPU_LOG");
        s.log = log ? fopen(log, "w") : nullptr;
        return s;
    }();
    return all;
}

Context *context_of(int device) {
    static Context *all = [] {
        auto *all = new Context[MAX_DEVICES]();
        for (int d = 0; d < MAX_DEVICES; d++) all[d].device = d;
        return all;
    }();
    return &all[device];
}
Context *current_context() { return current; }

Result wrong(Result result, const std::string &what) {
    if (error_count++ < 20)
        fprintf(stderr, "[cuda-on-cpu] error %d: %s\n", result, what.c_str());
    if (settings().abort_at_error) abort();
    return result;
}
long errors() { return error_count; }

double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

void log_line(const char *format, ...) {
    FILE *to = settings().log;
    if (!to) return;
    static std::mutex one;
    std::lock_guard<std::mutex> guard(one);
    va_list arguments;
    va_start(arguments, format);
    fprintf(to, "%.6f ", seconds());
    vfprintf(to, format, arguments);
    fputc('\n', to);
    va_end(arguments);
}

namespace {
struct AtEnd {
    AtEnd() { ptx::check_global = check_kernel; }
    ~AtEnd() {
        auto n = [](const std::atomic<long> &x) { return x.load(); };
        if (settings().stats) write_stats(settings().stats);
        if (settings().log) fflush(settings().log);
        if (settings().quiet || !counts.modules) return;
        fprintf(stderr,
                "[cuda-on-cpu] %ld errors; %ld modules, %ld launches (%ld skipped), %ld events, "
                "%ld host waits, %ld frees, up %ld (%ld B), down %ld (%ld B), across %ld (%ld B)"
                "; peak MB",
                errors(), n(counts.modules), n(counts.launches), n(counts.skipped),
                n(counts.events), n(counts.host_waits), n(counts.frees), n(counts.up),
                n(counts.up_bytes), n(counts.down), n(counts.down_bytes), n(counts.across),
                n(counts.across_bytes));
        for (int d = 0; d < settings().devices; d++) fprintf(stderr, " %ld", counts.peak[d] >> 20);
        fprintf(stderr, "\n");
    }
} at_end;
} // namespace

} // namespace driver

using namespace driver;

API int cuInit(unsigned) { return settings().devices ? OK : NO_DEVICE; }
API int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
API int cuDeviceGetCount(int *n) { *n = settings().devices; return OK; }
API int cuDeviceGet(int *device, int n) {
    if (n < 0 || n >= settings().devices) return INVALID_DEVICE;
    *device = n;
    return OK;
}
// A name that zeropp knows the peak rate of: of others it measures a product of 4096 first, which
// would take an hour here.
API int cuDeviceGetName(char *name, int room, int) {
    snprintf(name, room, "NVIDIA H100 80GB HBM3");
    return OK;
}
API int cuDeviceGetUuid_v2(char *id, int device) { memset(id, 7 + device, 16); return OK; }
API int cuDeviceGetUuid(char *id, int device) { return cuDeviceGetUuid_v2(id, device); }
API int cuDeviceGetPCIBusId(char *id, int room, int device) {
    snprintf(id, room, "0000:%02x:00.0", device + 1);
    return OK;
}
API int cuDeviceTotalMem_v2(size_t *bytes, int) { *bytes = settings().memory; return OK; }
API int cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (!current) return wrong(INVALID_CONTEXT, "cuMemGetInfo without a context");
    *total = settings().memory;
    *free = *total - counts.now[current->device];
    return OK;
}

// Those of an H100, by CUdevice_attribute; others are 1, which says that a device can do something.
API int cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break; // threads of a block: all, x, y
    case 4: *value = 64; break;                   // z
    case 5: *value = 2147483647; break;           // blocks of a grid: x
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;                // shared memory of a block
    case 10: *value = 32; break;                  // lanes of a warp
    case 13: *value = 1980000; break;             // kHz
    case 16: *value = 132; break;                 // multiprocessors
    case 38: *value = 50 << 20; break;            // L2
    case 39: *value = 2048; break;                // threads of a multiprocessor
    case 75: *value = settings().capability / 10; break;
    case 76: *value = settings().capability % 10; break;
    case 81: *value = 233472; break;              // shared memory of a multiprocessor
    case 97: *value = 232448; break;              // of a block that asks for it
    default: *value = 1;
    }
    return OK;
}

API int cuDevicePrimaryCtxRetain(Context **context, int device) {
    *context = context_of(device);
    return OK;
}
API int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API int cuCtxSetCurrent(Context *context) { current = context; return OK; }
API int cuCtxGetCurrent(Context **context) { *context = current; return OK; }
API int cuCtxGetDevice(int *device) {
    if (!current) return INVALID_CONTEXT;
    *device = current->device;
    return OK;
}
API int cuCtxSynchronize() {
    if (!current) return wrong(INVALID_CONTEXT, "cuCtxSynchronize without a context");
    wait_for_device(current->device);
    return current->error;
}
API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return OK;
}
API int cuGetErrorName(int, const char **name) { *name = "CUDA_ERROR_ON_CPU"; return OK; }
API int cuGetErrorString(int, const char **text) {
    *text = "see what [cuda-on-cpu] wrote to the standard error output";
    return OK;
}
// NVRTC asks for a table of functions that are not documented, and manages without.
API int cuGetExportTable(const void **table, const void *) { *table = nullptr; return NOT_FOUND; }
