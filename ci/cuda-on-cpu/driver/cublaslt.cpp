// cuBLASLt's products on the driver's streams, column after column as there. It is stricter than
// the real one: what that only documents is an error here.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "driver.h"

namespace driver {

namespace {

enum Status : int { SUCCESS = 0, NOT_INITIALIZED = 1, BAD_VALUE = 7, UNSUPPORTED = 15 };
enum Type : int { FLOAT = 0, BFLOAT = 14 };
constexpr int COMPUTE_FLOAT = 68, COMPUTE_TF32 = 77;
enum Kind : int { HANDLE = 0x51a1, PRODUCT, MATRIX, PREFERENCE, FREED };

struct Object { Kind kind; };
struct Handle : Object { int device; };
struct Product : Object {
    int compute, scale, turned[2];
    unsigned epilogue;
    Address vector; // a number for each row of D, in its type
};
constexpr unsigned NOTHING = 1, ADD_BIAS = 4, SUM_A = 256; // epilogues
struct Matrix : Object {
    int type;
    uint64_t rows, columns;
    int64_t pitch;
    int batch;
    int64_t stride;
};
struct Preference : Object { uint64_t workspace; unsigned reductions, alignment[4]; };

// What an algorithm was proposed for, which what it is used for must equal.
struct Algorithm {
    uint64_t problem;
    unsigned workspace, alignment[4];
    char rest[64 - sizeof(uint64_t) - 5 * sizeof(unsigned)];
};
static_assert(sizeof(Algorithm) == 64);
struct Proposal {
    Algorithm algorithm;
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};
static_assert(sizeof(Proposal) == 96);

Status fault(const std::string &what) {
    wrong(INVALID_VALUE, "cuBLASLt: " + what);
    return BAD_VALUE;
}

bool is(const Object *object, Kind kind, const char *name) {
    if (object && object->kind == kind) return true;
    fault(std::string("no ") + name + (object && object->kind == FREED ? ": it was freed" : ""));
    return false;
}

template <class T> Status set(T &to, const void *from, size_t bytes, const char *name) {
    if (!from || bytes != sizeof(T)) return fault(std::string(name) + " of another size");
    memcpy(&to, from, bytes);
    return SUCCESS;
}

Status release(Object *object, Kind kind, const char *name) {
    if (!is(object, kind, name)) return BAD_VALUE;
    object->kind = FREED; // kept, so that a later use is found
    return SUCCESS;
}

struct Sizes { uint64_t m, n, k; };

// The sizes of D = op(A)·op(B), where everything fits together.
Status sizes(const Product &p, const Matrix &a, const Matrix &b, const Matrix &d, Sizes &out) {
    out = {p.turned[0] ? a.columns : a.rows, p.turned[1] ? b.rows : b.columns,
           p.turned[0] ? a.rows : a.columns};
    uint64_t depth = p.turned[1] ? b.columns : b.rows;
    if (depth != out.k || d.rows != out.m || d.columns != out.n)
        return fault("shapes that do not fit together");
    if (!out.m || !out.n || !out.k) return fault("an empty matrix");
    if (a.batch != b.batch || a.batch != d.batch) return fault("batches of different lengths");
    for (const Matrix *x : {&a, &b, &d}) {
        if (x->pitch < (int64_t)x->rows) return fault("columns that overlap");
        if (x->stride < 0) return fault("a negative stride");
    }
    if (d.batch > 1 && d.stride < (int64_t)(d.pitch * (d.columns - 1) + d.rows))
        return fault("results that overlap");
    bool fits = a.type == b.type && (a.type == BFLOAT || a.type == FLOAT)
        && (d.type == FLOAT || (d.type == BFLOAT && a.type == BFLOAT));
    if (!fits || p.scale != FLOAT) return UNSUPPORTED;
    if (p.compute != COMPUTE_FLOAT && !(p.compute == COMPUTE_TF32 && a.type == FLOAT))
        return UNSUPPORTED;
    return SUCCESS;
}

uint64_t fingerprint(const Product &p, const Matrix &a, const Matrix &b, const Matrix &d) {
    uint64_t hash = 1469598103934665603ull;
    auto add = [&](uint64_t x) { hash = (hash ^ x) * 1099511628211ull; };
    for (int x : {p.compute, p.scale, p.turned[0], p.turned[1], (int)p.epilogue}) add(x);
    for (const Matrix *m : {&a, &b, &d})
        for (uint64_t x : {(uint64_t)m->type, m->rows, m->columns, (uint64_t)m->pitch,
                           (uint64_t)m->batch, (uint64_t)m->stride}) add(x);
    return hash;
}

float read(const void *at, int type, uint64_t i) {
    if (type == FLOAT) return ((const float *)at)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The nearest number of 10 bits behind the point.
float as_tf32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000) != 0x7f800000) bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&x, &bits, 4);
    return x;
}

void write(void *at, int type, uint64_t i, float x) {
    if (type == FLOAT) { ((float *)at)[i] = x; return; }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bool nan = std::isnan(x);
    ((uint16_t *)at)[i] = nan ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

struct Work {
    int device;
    Product p;
    Matrix a, b, d;
    Sizes s;
    float alpha, beta;
    const char *at_a, *at_b;
    char *at_d, *room;
    uint64_t room_bytes;
    bool skipped;
};

uint64_t bytes(int type) { return type == FLOAT ? 4 : 2; }

Result may(const Work &w) {
    auto touch = [&](const Matrix &m, const char *at, bool writes) {
        uint64_t last = (m.batch - 1) * m.stride + (m.columns - 1) * m.pitch + m.rows;
        return may_touch(w.device, (Address)at, last * bytes(m.type), writes, "cuBLASLt");
    };
    Result r = touch(w.a, w.at_a, false);
    if (!r) r = touch(w.b, w.at_b, false);
    if (!r) r = touch(w.d, w.at_d, true);
    if (!r && w.p.epilogue != NOTHING)
        r = may_touch(w.device, w.p.vector, w.s.m * bytes(w.d.type), w.p.epilogue == SUM_A,
                      "cuBLASLt's vector");
    if (!r) r = may_touch(w.device, (Address)w.room, w.room_bytes, true, "cuBLASLt's workspace");
    return r;
}

void multiply(void *argument) {
    std::unique_ptr<Work> w((Work *)argument);
    Context *context = context_of(w->device);
    virtual_clock += 1e-6;
    if (context->error) return;
    if (Result r = may(*w)) { context->error = r; return; }
    if (w->skipped) return;
    memset(w->room, 0xff, w->room_bytes);
    auto [m, n, k] = w->s;
    std::vector<float> a(m * k), column(m);
    auto factor = [&](const void *at, int type, uint64_t i) {
        float x = read(at, type, i);
        return w->p.compute == COMPUTE_TF32 ? as_tf32(x) : x;
    };
    for (int batch = 0; batch < w->d.batch; batch++) {
        const char *at_a = w->at_a + batch * w->a.stride * bytes(w->a.type);
        const char *at_b = w->at_b + batch * w->b.stride * bytes(w->b.type);
        char *at_d = w->at_d + batch * w->d.stride * bytes(w->d.type);
        for (uint64_t l = 0; l < k; l++)
            for (uint64_t i = 0; i < m; i++) {
                uint64_t at = w->p.turned[0] ? l + i * w->a.pitch : i + l * w->a.pitch;
                a[l * m + i] = factor(at_a, w->a.type, at);
            }
        for (uint64_t i = 0; w->p.epilogue == SUM_A && i < m; i++) {
            float sum = 0;
            for (uint64_t l = 0; l < k; l++) sum += a[l * m + i];
            write((void *)w->p.vector, w->d.type, i, sum);
        }
        for (uint64_t j = 0; j < n; j++) {
            std::fill(column.begin(), column.end(), 0.0f);
            for (uint64_t l = 0; l < k; l++) {
                uint64_t at = w->p.turned[1] ? j + l * w->b.pitch : l + j * w->b.pitch;
                float b = factor(at_b, w->b.type, at);
                for (uint64_t i = 0; i < m; i++) column[i] += a[l * m + i] * b;
            }
            for (uint64_t i = 0; i < m; i++) {
                uint64_t at = i + j * w->d.pitch;
                float x = w->alpha * column[i];
                if (w->beta != 0) x += w->beta * read(at_d, w->d.type, at);
                if (w->p.epilogue == ADD_BIAS) x += read((void *)w->p.vector, w->d.type, i);
                write(at_d, w->d.type, at, x);
            }
        }
    }
}

} // namespace

} // namespace driver

using namespace driver;

API size_t cublasLtGetVersion() { return 131000; }
API const char *cublasLtGetStatusString(int) { return "see what [cuda-on-cpu] wrote"; }
API int cublasLtCreate(Handle **handle) {
    if (!current_context()) { fault("a handle without a context"); return NOT_INITIALIZED; }
    *handle = new Handle{{HANDLE}, current_context()->device};
    return SUCCESS;
}
API int cublasLtDestroy(Handle *handle) { return release(handle, HANDLE, "handle"); }

API int cublasLtMatmulDescCreate(Product **product, int compute, int scale) {
    *product = new Product{{PRODUCT}, compute, scale, {0, 0}, NOTHING, 0};
    return SUCCESS;
}
API int cublasLtMatmulDescSetAttribute(Product *p, int attribute, const void *from, size_t size) {
    if (!is(p, PRODUCT, "product")) return BAD_VALUE;
    if (attribute == 7) {
        if (Status s = set(p->epilogue, from, size, "an epilogue")) return s;
        bool known = p->epilogue == NOTHING || p->epilogue == ADD_BIAS || p->epilogue == SUM_A;
        return known ? SUCCESS : fault("an epilogue");
    }
    if (attribute == 8) return set(p->vector, from, size, "the place of a vector");
    if (attribute != 3 && attribute != 4) return fault("an attribute of a product");
    int &turned = p->turned[attribute - 3];
    if (Status s = set(turned, from, size, "a transposition")) return s;
    return turned == 0 || turned == 1 ? SUCCESS : fault("a transposition that is none");
}
API int cublasLtMatmulDescDestroy(Product *p) { return release(p, PRODUCT, "product"); }

API int cublasLtMatrixLayoutCreate(Matrix **matrix, int type, uint64_t rows, uint64_t columns,
                                   int64_t pitch) {
    *matrix = new Matrix{{MATRIX}, type, rows, columns, pitch, 1, 0};
    return SUCCESS;
}
API int cublasLtMatrixLayoutSetAttribute(Matrix *m, int attribute, const void *from, size_t size) {
    if (!is(m, MATRIX, "matrix")) return BAD_VALUE;
    if (attribute == 5) return set(m->batch, from, size, "the batch");
    if (attribute == 6) return set(m->stride, from, size, "the stride of a batch");
    return fault("an attribute of a matrix");
}
API int cublasLtMatrixLayoutDestroy(Matrix *m) { return release(m, MATRIX, "matrix"); }

API int cublasLtMatmulPreferenceCreate(Preference **preference) {
    *preference = new Preference{{PREFERENCE}, 0, 7, {256, 256, 256, 256}};
    return SUCCESS;
}
API int cublasLtMatmulPreferenceSetAttribute(Preference *p, int attribute, const void *from,
                                             size_t size) {
    if (!is(p, PREFERENCE, "preference")) return BAD_VALUE;
    if (attribute == 1) return set(p->workspace, from, size, "the workspace");
    if (attribute == 3) return set(p->reductions, from, size, "reductions");
    if (attribute >= 5 && attribute <= 8)
        return set(p->alignment[attribute - 5], from, size, "an alignment");
    return fault("an attribute of a preference");
}
API int cublasLtMatmulPreferenceDestroy(Preference *p) {
    return release(p, PREFERENCE, "preference");
}

// The first proposal cannot be used, as its status says. Of bf16 at odd places there is none.
API int cublasLtMatmulAlgoGetHeuristic(Handle *handle, Product *p, Matrix *a, Matrix *b, Matrix *c,
                                       Matrix *d, Preference *preference, int asked,
                                       Proposal *proposals, int *given) {
    if (!is(handle, HANDLE, "handle") || !is(p, PRODUCT, "product") || !is(a, MATRIX, "A")
        || !is(b, MATRIX, "B") || !is(c, MATRIX, "C") || !is(d, MATRIX, "D")
        || !is(preference, PREFERENCE, "preference")) return BAD_VALUE;
    if (asked < 1) return fault("no algorithm is asked for");
    *given = 0;
    Sizes s;
    if (Status status = sizes(*p, *a, *b, *d, s)) return status;
    if (fingerprint(*p, *a, *b, *c) != fingerprint(*p, *a, *b, *d)) return fault("C is not as D");
    unsigned *least = preference->alignment;
    for (int i = 0; i < 4; i++) {
        if (!least[i] || (least[i] & (least[i] - 1))) return fault("an alignment of no power of 2");
        if (a->type == BFLOAT && i < 2 && least[i] < 4) return UNSUPPORTED;
    }
    if (p->epilogue != NOTHING && !p->vector) return fault("a vector without a place");
    if (p->epilogue == SUM_A && d->batch > 1) return UNSUPPORTED;
    unsigned room = std::min<uint64_t>(preference->workspace, 65536);
    Algorithm algorithm{fingerprint(*p, *a, *b, *d), room,
                        {least[0], least[1], least[2], least[3]}, {}};
    for (; *given < asked && *given < 2; ++*given) {
        int status = *given == 0 && asked > 1 ? UNSUPPORTED : SUCCESS;
        proposals[*given] = {algorithm, algorithm.workspace, status, 1, {}};
    }
    return SUCCESS;
}

API int cublasLtMatmul(Handle *handle, Product *p, const float *alpha, const void *at_a, Matrix *a,
                       const void *at_b, Matrix *b, const float *beta, const void *at_c, Matrix *c,
                       void *at_d, Matrix *d, const Algorithm *algorithm, void *room,
                       size_t room_bytes, Queue *stream) {
    if (!is(handle, HANDLE, "handle") || !is(p, PRODUCT, "product") || !is(a, MATRIX, "A")
        || !is(b, MATRIX, "B") || !is(c, MATRIX, "C") || !is(d, MATRIX, "D")) return BAD_VALUE;
    if (Result r = usable(stream, "cublasLtMatmul")) return r;
    Sizes s;
    if (Status status = sizes(*p, *a, *b, *d, s)) return status;
    if (handle->device != queue_device(stream)) return fault("another device's handle");
    if (at_c != at_d || c != d) return fault("C is not D");
    if (algorithm->problem != fingerprint(*p, *a, *b, *d)) return fault("another's algorithm");
    const void *all[] = {at_a, at_b, at_c, at_d};
    for (int i = 0; i < 4; i++)
        if ((Address)all[i] % algorithm->alignment[i]) return fault("an alignment not as promised");
    if (room_bytes < algorithm->workspace || (Address)room % 256) return fault("the workspace");
    auto *work = new Work{queue_device(stream), *p, *a, *b, *d, s, *alpha, *beta,
                          (const char *)at_a, (const char *)at_b, (char *)at_d, (char *)room,
                          room_bytes, false};
    if (Result r = may(*work)) { delete work; return r; }
    counts.launches++;
    // As of kernels, with a thread for each element.
    uint64_t most = settings().max_threads;
    work->skipped = settings().count_only || (most && s.m * s.n * d->batch >= most);
    if (work->skipped && !settings().count_only && !counts.skipped++)
        fprintf(stderr, "[cuda-on-cpu] not executed, as it is too large: a product\n");
    log_line("product %d s%d m %lu n %lu k %lu batch %d in %lu out %lu add %d bias %d sums %d",
             work->device, queue_number(stream), s.m, s.n, s.k, d->batch, bytes(a->type),
             bytes(d->type), *beta != 0, p->epilogue == ADD_BIAS, p->epilogue == SUM_A);
    queue_add(stream, multiply, work);
    return SUCCESS;
}
