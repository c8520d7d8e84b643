// Modules, launches and tensor maps.
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unistd.h>
#include <vector>

#include "../interpreter/program.h"
#include "../interpreter/tensor_map.h"
#include "driver.h"
#include "traffic.h"

namespace driver {

namespace {

struct Function { ptx::Kernel *kernel; ptx::Module *module; };

// Never destroyed, as streams may still run when the process ends.
std::mutex &functions_lock = *new std::mutex;
auto &functions = *new std::vector<std::unique_ptr<Function>>;

struct Launch {
    Function *function = nullptr;
    ptx::Size grid, block;
    unsigned shared = 0;
    std::unique_ptr<unsigned char, void (*)(void *)> params{nullptr, free};
    int device = 0, stream = 0;
    uint32_t seed = 0;
};

// cubecl measures the device with these before it tunes.
bool is_probe(const std::string &name) {
    auto starts = [&](const char *with) { return name.rfind(with, 0) == 0; };
    return name.find("_throughput") != std::string::npos || starts("launch_overhead")
        || starts("prime_buffer") || starts("memory_probe");
}

// What the tuner is to think that a kernel takes. It measures the device first and stops once a
// candidate is near what the device can do. So the device is slow and all else is fast: the first
// that works is taken. With a tuner's seed the device is fast: all are tried, and the seed says
// which of them is the fastest.
double virtual_seconds(const std::string &name) {
    if (!settings().tuner) return !is_probe(name) ? 1e-6 : name[0] == 'l' ? 0.01 : 20;
    if (is_probe(name)) return 1e-6;
    uint32_t hash = 2166136261u ^ settings().tuner;
    for (char c : name) hash = (hash ^ (unsigned char)c) * 16777619u;
    return 1e-6 * (1 + (hash >> 8) % 1000);
}

bool is_executed(const Launch &l) {
    const std::string &name = l.function->kernel->name;
    bool probe = !settings().real_time && is_probe(name);
    if (probe || (settings().count_only && !settings().blocks)) return false;
    if (settings().blocks) return true;
    // The tuner and the measuring of peaks run products of a size that would take hours here.
    uint64_t most = settings().max_threads;
    if (most && l.grid.all() * l.block.all() >= most) {
        if (!counts.skipped++)
            fprintf(stderr, "[cuda-on-cpu] not executed, as it is too large: %s\n", name.c_str());
        return false;
    }
    return true;
}

// Launches of no more threads are executed whole where others are sampled: what they make, as
// lists of tokens, says how long others walk.
constexpr uint64_t WHOLE = 16384;

// What a launch did.
struct Did { double instructions, flop; Traffic::Bytes bytes; };

// What a sampled launch is told apart by: all but where its memory is.
std::string sizes_of(const Launch &l) {
    const ptx::Kernel &kernel = *l.function->kernel;
    std::string key;
    auto add = [&](const auto &x) { key.append((const char *)&x, sizeof x); };
    add(l.function->kernel);
    for (unsigned n : {l.grid.x, l.grid.y, l.grid.z, l.block.x, l.block.y, l.block.z}) add(n);
    for (auto [offset, size] : kernel.params)
        if (size != sizeof(Address)) key.append((const char *)l.params.get() + offset, size);
    return key;
}

Did sampled(const Launch &l, bool whole) {
    ptx::Kernel &kernel = *l.function->kernel;
    uint64_t blocks = l.grid.all();
    Traffic all(kernel, l.params.get());
    traffic = &all;
    uint64_t instructions = 0, flop = 0, ran = 0;
    ptx::Sample sample{whole ? blocks : settings().blocks, [&](uint64_t i, uint64_t f) {
        instructions += i;
        flop += f;
        ran++;
        all.end_block();
    }};
    ptx::launch(kernel, *l.function->module, l.grid, l.block, l.shared, l.params.get(), l.seed,
                &sample);
    traffic = nullptr;
    double each = (double)blocks / ran;
    return {instructions * each, flop * each, all.bytes(each)};
}

void execute(const Launch &l) {
    ptx::Kernel &kernel = *l.function->kernel;
    if (!settings().blocks)
        return ptx::launch(kernel, *l.function->module, l.grid, l.block, l.shared, l.params.get(),
                           l.seed, nullptr);
    uint64_t threads = l.grid.all() * l.block.all();
    bool whole = threads <= WHOLE;
    // A model's layers and micro-batches launch the same again and again: one of each is sampled.
    static std::mutex &lock = *new std::mutex;
    static auto &known = *new std::map<std::string, Did>;
    std::string key = sizes_of(l);
    std::unique_lock<std::mutex> guard(lock);
    auto found = known.find(key);
    if (whole || found == known.end()) {
        guard.unlock();
        Did did = sampled(l, whole);
        guard.lock();
        found = known.insert_or_assign(key, did).first;
    }
    auto [instructions, flop, bytes] = found->second;
    log_line("did %d s%d %s warps %lu instructions %.0f flop %.0f read %.0f written %.0f "
             "asked %.0f", l.device, l.stream, kernel.name.c_str(),
             l.grid.all() * ((l.block.all() + 31) / 32), instructions, flop, bytes.read,
             bytes.written, bytes.asked);
}

void run(void *argument) {
    std::unique_ptr<Launch> l((Launch *)argument);
    ptx::Kernel &kernel = *l->function->kernel;
    running_device = l->device;
    double began = seconds();
    virtual_clock += virtual_seconds(kernel.name);
    // What follows a probe must not be there before the tuner has looked.
    if (is_probe(kernel.name) && kernel.name[0] != 'l') usleep(25000);
    Context *context = context_of(l->device);
    std::string where = kernel.name + " on device " + std::to_string(l->device) + ": ";
    try {
        if (!context->error && is_executed(*l)) execute(*l);
    } catch (const ptx::Fault &fault) {
        context->error = wrong(ILLEGAL_ADDRESS, where + fault.what);
    } catch (const ptx::Unsupported &unsupported) {
        context->error = wrong(LAUNCH_FAILED, where + "not supported: " + unsupported.what);
    }
    log_line("run %d s%d %.6f %s", l->device, l->stream, seconds() - began, kernel.name.c_str());
}

unsigned char *packed(const ptx::Kernel &kernel, void **params) {
    auto *all = (unsigned char *)aligned_alloc(128, (kernel.param_bytes + 255) / 128 * 128);
    for (size_t n = 0; n < kernel.params.size(); n++)
        memcpy(all + kernel.params[n].first, params[n], kernel.params[n].second);
    return all;
}

uint32_t elements_bytes(int type) { // of CUtensorMapDataType
    static const uint32_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    return type < 13 ? bytes[type] : 1;
}

} // namespace

void write_stats(const char *path) {
    FILE *to = fopen(path, "w");
    if (!to) return;
    for (auto &f : functions) {
        const ptx::Kernel &k = *f->kernel;
        fprintf(to, "%lu launches, %.3f s, %lu instructions, %zu not supported: %s\n",
                k.launches.load(), k.nanoseconds * 1e-9, k.instructions.load(),
                k.unsupported.size(), k.name.c_str());
    }
    fclose(to);
}

} // namespace driver

using namespace driver;

API int cuModuleLoadData(ptx::Module **module, const void *image) {
    long number = counts.modules++;
    if (settings().ptx) {
        char path[512];
        snprintf(path, sizeof path, "%s/%05ld.ptx", settings().ptx, number);
        if (FILE *to = fopen(path, "w")) {
            fputs((const char *)image, to);
            fclose(to);
        }
    }
    try {
        *module = ptx::parse((const char *)image).release();
    } catch (const ptx::Unsupported &unsupported) {
        return wrong(INVALID_PTX, "a module that cannot be read: " + unsupported.what);
    }
    for (auto &[name, kernel] : (*module)->kernels)
        for (auto &text : kernel->unsupported)
            fprintf(stderr, "[cuda-on-cpu] %s: not supported: %s\n", name.c_str(), text.c_str());
    return OK;
}
API int cuModuleUnload(ptx::Module *) { return OK; } // its kernels may still run
API int cuModuleGetFunction(Function **function, ptx::Module *module, const char *name) {
    auto found = module->kernels.find(name);
    if (found == module->kernels.end()) return NOT_FOUND;
    std::lock_guard<std::mutex> guard(functions_lock);
    functions.push_back(std::make_unique<Function>(Function{found->second.get(), module}));
    *function = functions.back().get();
    return OK;
}
API int cuFuncSetAttribute(Function *, int, int) { return OK; }
API int cuFuncGetAttribute(int *value, int, Function *) { *value = 1024; return OK; }

API int cuLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                       unsigned by, unsigned bz, unsigned shared, Queue *stream, void **params,
                       void **) {
    static std::atomic<uint32_t> number;
    if (Result r = usable(stream, "a launch")) return r;
    ptx::Size grid{gx, gy, gz}, block{bx, by, bz};
    if (!grid.all() || !block.all() || block.all() > 1024 || shared > 232448)
        return wrong(INVALID_VALUE, f->kernel->name + ": sizes of a launch");
    auto *l = new Launch;
    l->function = f;
    l->grid = grid;
    l->block = block;
    l->shared = shared;
    l->params.reset(packed(*f->kernel, params));
    l->device = queue_device(stream);
    l->stream = queue_number(stream);
    // Another order of blocks and warps for each launch.
    l->seed = settings().seed ? settings().seed * 1000003 + ++number : 0;
    counts.launches++;
    log_line("launch %d s%d %s grid %u %u %u block %u %u %u smem %u", l->device, l->stream,
             f->kernel->name.c_str(), gx, gy, gz, bx, by, bz, shared);
    queue_add(stream, run, l);
    return OK;
}

API int cuTensorMapEncodeTiled(uint64_t *out, int type, unsigned rank, void *base,
                               const uint64_t *extent, const uint64_t *stride,
                               const uint32_t *box, const uint32_t *, int, int swizzle, int, int) {
    if (rank < 1 || rank > 5 || swizzle > 3) return wrong(INVALID_VALUE, "a tensor map's sizes");
    auto *map = new ptx::TensorMap{}; // never freed: CUDA has no call that says it is done with
    map->base = (uint64_t)base;
    map->rank = rank;
    map->element_bytes = elements_bytes(type);
    for (unsigned d = 0; d < rank; d++) {
        map->extent[d] = extent[d];
        map->stride[d] = d ? stride[d - 1] : map->element_bytes;
        map->box[d] = box[d];
    }
    map->swizzle = swizzle;
    memset(out, 0, 128);
    out[0] = ptx::TENSOR_MAP_MARK;
    out[1] = (uint64_t)map;
    return OK;
}
API int cuTensorMapEncodeIm2col() { return NOT_SUPPORTED; }
