// Stands before NVRTC: what was compiled once is kept, by what the source and options are. With
// CUDA_ON_CPU_COUNT kernels have no body, as none is executed; then NVRTC is not needed.
#include <atomic>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int INVALID_PROGRAM = 6;

struct Program { void *real = nullptr; std::string source, ptx; };

template <class... A> int real(const char *name, A... arguments) {
    static void *library = dlopen("libnvrtc.so.13", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "[cuda-on-cpu] %s\n", dlerror());
        abort();
    }
    return ((int (*)(A...))dlsym(library, name))(arguments...);
}

bool counts_only() {
    const char *text = getenv("CUDA_ON_CPU_COUNT");
    return text && atoi(text);
}

uint64_t hash(uint64_t h, const char *text) { // FNV-1a
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3ull;
    return h;
}

// Where this source with these options is kept, without the ending; empty without a cache. Paths
// of headers do not count: they differ between machines.
std::string place(const Program &p, int n, const char **options) {
    const char *folder = getenv("CUDA_ON_CPU_CACHE");
    if (!folder) return "";
    uint64_t a = hash(0xcbf29ce484222325ull, p.source.c_str()), b = hash(~a, p.source.c_str());
    int major = 0, minor = 0;
    real("nvrtcVersion", &major, &minor);
    auto add = [&](const char *text) {
        a = hash(a, text);
        b = hash(b, text);
    };
    add((std::to_string(major) + "." + std::to_string(minor)).c_str());
    for (int i = 0; i < n; i++)
        if (strncmp(options[i], "--include", 9)) add(options[i]);
    char name[40];
    snprintf(name, sizeof name, "/%016lx%016lx", a, b);
    return folder + std::string(name);
}

bool read(const std::string &path, std::string &to) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return false;
    std::stringstream all;
    all << file.rdbuf();
    to = all.str();
    return true;
}

// Under its name only once it is whole: several processes may write it.
void keep(const std::string &path, const std::string &text) {
    static std::atomic<int> number;
    std::string part = path + "." + std::to_string(getpid()) + "." + std::to_string(number++);
    std::ofstream(part, std::ios::binary) << text;
    rename(part.c_str(), path.c_str());
}

// The name after the `__global__` that is there, and its attributes.
std::string kernel_at(const std::string &source, size_t at) {
    const char *c = source.c_str() + at + strlen("__global__");
    auto is_part = [](char c) { return isalnum((unsigned char)c) || c == '_'; };
    while (*c) {
        while (*c && !is_part(*c)) c++;
        const char *start = c;
        while (is_part(*c)) c++;
        std::string name(start, c);
        bool attribute = name == "__launch_bounds__" || name == "__cluster_dims__";
        if (*c == '(' && !attribute) return name;
        if (*c == '(') {
            int depth = 0;
            do depth += *c == '(' ? 1 : *c == ')' ? -1 : 0; while (*c++ && depth);
        }
    }
    return "";
}

} // namespace

API int nvrtcVersion(int *major, int *minor) { return real("nvrtcVersion", major, minor); }
API int nvrtcCreateProgram(Program **out, const char *source, const char *name, int headers,
                           const char **texts, const char **names) {
    *out = new Program;
    (*out)->source = source;
    if (counts_only()) return 0;
    return real("nvrtcCreateProgram", &(*out)->real, source, name, headers, texts, names);
}
API int nvrtcCompileProgram(Program *p, int n, const char **options) {
    if (counts_only()) {
        p->ptx = ".version 9.0\n.target sm_90\n.address_size 64\n";
        size_t head = p->ptx.size(), at = 0;
        for (; (at = p->source.find("__global__", at)) != std::string::npos; at++) {
            std::string name = kernel_at(p->source, at);
            if (!name.empty()) p->ptx += ".visible .entry " + name + "()\n{\n ret;\n}\n";
        }
        return p->ptx.size() == head ? INVALID_PROGRAM : 0;
    }
    std::string at = place(*p, n, options);
    if (!at.empty() && read(at + ".ptx", p->ptx)) return 0;
    if (int failed = real("nvrtcCompileProgram", p->real, n, options)) return failed;
    size_t bytes = 0;
    real("nvrtcGetPTXSize", p->real, &bytes);
    p->ptx.resize(bytes);
    real("nvrtcGetPTX", p->real, p->ptx.data());
    p->ptx = p->ptx.c_str(); // without the zero at its end
    if (!at.empty()) {
        keep(at + ".cu", p->source);
        keep(at + ".ptx", p->ptx);
    }
    return 0;
}
API int nvrtcGetPTXSize(Program *p, size_t *bytes) { *bytes = p->ptx.size() + 1; return 0; }
API int nvrtcGetPTX(Program *p, char *to) {
    memcpy(to, p->ptx.c_str(), p->ptx.size() + 1);
    return 0;
}
API int nvrtcGetProgramLogSize(Program *p, size_t *bytes) {
    *bytes = 1;
    return p->real ? real("nvrtcGetProgramLogSize", p->real, bytes) : 0;
}
API int nvrtcGetProgramLog(Program *p, char *to) {
    *to = 0;
    return p->real ? real("nvrtcGetProgramLog", p->real, to) : 0;
}
API int nvrtcGetCUBINSize(Program *, size_t *) { return INVALID_PROGRAM; }
API int nvrtcGetCUBIN(Program *, char *) { return INVALID_PROGRAM; }
API int nvrtcDestroyProgram(Program **p) {
    if ((*p)->real) real("nvrtcDestroyProgram", &(*p)->real);
    delete *p;
    *p = nullptr;
    return 0;
}
API const char *nvrtcGetErrorString(int) { return "see NVRTC's log"; }
