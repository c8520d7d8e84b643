// Device memory, which is the host's, and copies. All that was allocated is known, so that whoever
// touches something else, or another device's, is found. An address is never used twice.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <sys/mman.h>
#include <vector>

#include "../interpreter/program.h"
#include "driver.h"
#include "traffic.h"

namespace driver {

thread_local int running_device = -1;

namespace {

struct Allocation { uint64_t bytes; int device; };

// Never destroyed, as streams may still run when the process ends.
std::shared_mutex &lock = *new std::shared_mutex;
auto &allocations = *new std::map<Address, Allocation>, &freed = *new std::map<Address, Allocation>;
std::atomic<uint64_t> frees_so_far; // makes what a thread remembers of an allocation stale
std::mutex &pinned_lock = *new std::mutex;
auto &pinned = *new std::map<Address, uint64_t>;

constexpr uint64_t GUARD = 4096; // before and after, for whoever runs over the end

uint64_t mapped(uint64_t bytes) { return ((bytes + 4095) & ~4095ull) + 2 * GUARD; }

// Which of them holds the address.
const std::pair<const Address, Allocation> *holder(const std::map<Address, Allocation> &all,
                                                   Address at) {
    auto after = all.upper_bound(at);
    if (after == all.begin()) return nullptr;
    auto &found = *--after;
    return at < found.first + found.second.bytes ? &found : nullptr;
}

// What is wrong with an access; empty where nothing is.
std::string trouble(int device, Address at, uint64_t bytes, bool write) {
    static thread_local struct { Address at; Allocation of; uint64_t frees; } last;
    uint64_t frees = frees_so_far;
    if (last.frees == frees && last.of.device == device && at >= last.at
        && at + bytes <= last.at + last.of.bytes) return "";
    std::shared_lock<std::shared_mutex> guard(lock);
    auto *found = holder(allocations, at);
    std::string what = (write ? "writes " : "reads ") + std::to_string(bytes) + " bytes ";
    if (!found) {
        auto *old = holder(freed, at);
        return what + (old ? "of memory that was freed" : "outside of all allocations");
    }
    if (at + bytes > found->first + found->second.bytes)
        return what + "over the end of an allocation of "
            + std::to_string(found->second.bytes) + " bytes";
    if (found->second.device != device)
        return what + "of device " + std::to_string(found->second.device);
    last = {found->first, found->second, frees};
    return "";
}

Result allocate(Address *out, size_t bytes) {
    Context *context = current_context();
    if (!context) return wrong(INVALID_CONTEXT, "memory without a context");
    if (context->error) return (Result)context->error.load();
    auto &now = counts.now[context->device], &peak = counts.peak[context->device];
    if (!bytes) return INVALID_VALUE;
    if ((uint64_t)now + bytes > settings().memory) return OUT_OF_MEMORY;
    void *start = mmap(nullptr, mapped(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    // NaN for floats of all widths. Not for what the tuner only measures bandwidth with.
    if (!settings().count_only && bytes < 256 << 20) memset(start, 0xff, mapped(bytes));
    *out = (Address)start + GUARD;
    std::unique_lock<std::shared_mutex> guard(lock);
    allocations[*out] = {bytes, context->device};
    now += bytes;
    if (now > peak) peak = now.load();
    log_line("alloc %d %zu", context->device, bytes);
    return OK;
}

Result release(Address at) {
    std::unique_lock<std::shared_mutex> guard(lock);
    auto found = allocations.find(at);
    if (found == allocations.end()) {
        bool twice = freed.count(at);
        return wrong(INVALID_VALUE, twice ? "memory is freed twice"
                                          : "what is freed is no allocation");
    }
    Allocation a = found->second;
    // The pages go back; the addresses stay taken.
    mmap((void *)(at - GUARD), mapped(a.bytes), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    freed[at] = a;
    allocations.erase(found);
    frees_so_far++;
    counts.now[a.device] -= a.bytes;
    counts.frees++;
    log_line("free %d %zu", a.device, (size_t)a.bytes);
    return OK;
}

bool is_pinned(const void *at) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto after = pinned.upper_bound((Address)at);
    if (after == pinned.begin()) return false;
    --after;
    return (Address)at < after->first + after->second;
}

// Rows of bytes; device memory is checked when the copy is asked for and again when it is made.
struct Copy {
    int device;
    const char *from;
    char *to;
    size_t from_pitch, to_pitch, width, height;
    bool from_device, to_device;
    std::vector<char> own; // of what may change once the call is over

    // Small things that come up, as ids and sizes, say where kernels read and how long they walk.
    bool is_made() const {
        return !settings().count_only
            || (settings().blocks && to_device && !from_device && width * height <= 1 << 20);
    }

    Result check() const {
        size_t from_bytes = (height - 1) * from_pitch + width;
        size_t to_bytes = (height - 1) * to_pitch + width;
        Result r = OK;
        if (from_device) r = may_touch(device, (Address)from, from_bytes, false, "a copy");
        if (!r && to_device) r = may_touch(device, (Address)to, to_bytes, true, "a copy");
        return r;
    }
};

void make_copy(void *argument) {
    auto *c = (Copy *)argument;
    if (Result r = c->check()) {
        context_of(c->device)->error = r;
    } else if (c->is_made()) {
        for (size_t row = 0; row < c->height; row++)
            memmove(c->to + row * c->to_pitch, c->from + row * c->from_pitch, c->width);
    } else if (!c->to_device) { // what no kernel has computed is zero, not what lay there
        for (size_t row = 0; row < c->height; row++)
            memset(c->to + row * c->to_pitch, 0, c->width);
    }
    delete c;
}

Result add_copy(Queue *stream, Copy c) {
    if (Result r = usable(stream, "a copy")) return r;
    if (!c.width || !c.height) return OK;
    c.device = queue_device(stream);
    if (Result r = c.check()) return r;
    bool up = !c.from_device, down = !c.to_device;
    (up ? counts.up : down ? counts.down : counts.across)++;
    (up ? counts.up_bytes : down ? counts.down_bytes : counts.across_bytes) += c.width * c.height;
    log_line("%s %d s%d %zu", up ? "up" : down ? "down" : "across", c.device,
             queue_number(stream), c.width * c.height);
    auto *kept = new Copy(std::move(c));
    if (up && kept->is_made() && !is_pinned(kept->from)) {
        kept->own.resize((kept->height - 1) * kept->from_pitch + kept->width);
        memcpy(kept->own.data(), kept->from, kept->own.size());
        kept->from = kept->own.data();
    }
    queue_add(stream, make_copy, kept);
    return OK;
}

struct Fill { int device; Address to; unsigned char value; size_t bytes; };

void make_fill(void *argument) {
    auto *f = (Fill *)argument;
    if (Result r = may_touch(f->device, f->to, f->bytes, true, "a memset"))
        context_of(f->device)->error = r;
    else if (!settings().count_only) memset((void *)f->to, f->value, f->bytes);
    delete f;
}

void make_release(void *argument) { release((Address)argument); }

} // namespace

Result may_touch(int device, Address at, uint64_t bytes, bool write, const char *who) {
    if (!bytes) return OK;
    std::string what = trouble(device, at, bytes, write);
    if (what.empty()) return OK;
    return wrong(ILLEGAL_ADDRESS,
                 std::string(who) + " on device " + std::to_string(device) + " " + what);
}

void check_kernel(Address at, uint64_t bytes, bool write) {
    std::string what = trouble(running_device, at, bytes, write);
    if (!what.empty()) throw ptx::Fault{what};
    if (traffic) traffic->add(at, bytes, write);
}

extern "C" int driver_may_touch(int device, const void *at, size_t bytes, int write) {
    return may_touch(device, (Address)at, bytes, write, "NCCL") == OK;
}

} // namespace driver

using namespace driver;

API int cuMemAlloc_v2(Address *at, size_t bytes) { return allocate(at, bytes); }
API int cuMemAllocAsync(Address *at, size_t bytes, Queue *) { return allocate(at, bytes); }
API int cuMemFree_v2(Address at) { // waits for the device, as the real one does
    if (current_context()) wait_for_device(current_context()->device);
    return release(at);
}
API int cuMemFreeAsync(Address at, Queue *stream) {
    if (Result r = usable(stream, "cuMemFreeAsync")) return r;
    queue_add(stream, make_release, (void *)at);
    return OK;
}

API int cuMemAllocHost_v2(void **at, size_t bytes) {
    void *start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    if (!settings().count_only) memset(start, 0xff, bytes); // as new memory of a device
    *at = start;
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[(Address)start] = bytes;
    return OK;
}
API int cuMemHostAlloc(void **at, size_t bytes, unsigned) { return cuMemAllocHost_v2(at, bytes); }
API int cuMemFreeHost(void *at) { // waits for all devices, as the real one does
    for (int d = 0; d < settings().devices; d++) wait_for_device(d);
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto found = pinned.find((Address)at);
    if (found == pinned.end()) return wrong(INVALID_VALUE, "cuMemFreeHost: no pinned memory");
    munmap(at, found->second);
    pinned.erase(found);
    return OK;
}

static Copy line(const void *from, bool from_device, void *to, bool to_device, size_t bytes) {
    return Copy{0, (const char *)from, (char *)to, bytes, bytes, bytes, 1, from_device, to_device,
                {}};
}
API int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, Queue *stream) {
    return add_copy(stream, line(from, false, (void *)to, true, bytes));
}
API int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, Queue *stream) {
    return add_copy(stream, line((void *)from, true, to, false, bytes));
}
API int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Queue *stream) {
    return add_copy(stream, line((void *)from, true, (void *)to, true, bytes));
}
API int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Queue *stream) {
    if (Result r = usable(stream, "cuMemsetD8Async")) return r;
    queue_add(stream, make_fill, new Fill{queue_device(stream), to, value, bytes});
    return OK;
}

// CUDA_MEMCPY2D.
struct Side { size_t x, y; int type; void *host; Address device; void *array; size_t pitch; };
struct Rectangle { Side from, to; size_t width, height; };

API int cuMemcpy2DAsync_v2(const Rectangle *r, Queue *stream) {
    constexpr int HOST = 1;
    auto start = [](const Side &s) {
        return (s.type == HOST ? (char *)s.host : (char *)s.device) + s.y * s.pitch + s.x;
    };
    return add_copy(stream, Copy{0, start(r->from), start(r->to), r->from.pitch, r->to.pitch,
                                 r->width, r->height, r->from.type != HOST, r->to.type != HOST,
                                 {}});
}
