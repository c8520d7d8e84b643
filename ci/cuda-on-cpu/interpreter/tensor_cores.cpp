// Products of small matrices by a warp: mma.sync with its ldmatrix and stmatrix, and wmma.
#include "machine.h"

namespace ptx {

namespace {

struct Shape { int m, n, k; };

Shape shape_of(const Instruction &i) {
    for (auto &modifier : i.modifiers) {
        Shape s;
        if (sscanf(modifier.c_str(), "m%dn%dk%d", &s.m, &s.n, &s.k) == 3) return s;
    }
    throw Unsupported{"shape"};
}

// c[m][n] += a[m][k] · b[k][n], in fp32.
void multiply(Shape s, const float *a, const float *b, float *c) {
    for (int m = 0; m < s.m; m++)
        for (int k = 0; k < s.k; k++)
            for (int n = 0; n < s.n; n++) c[m * s.n + n] += a[m * s.k + k] * b[k * s.n + n];
}

// --- ldmatrix, stmatrix: up to four matrices of 8 × 8 halves ------------------------------

struct Eight { u16 at[8][8]; };

void load_matrices(Warp &w, const Instruction &i, u32) {
    Eight tiles[4];
    for (int row = 0; row < i.count * 8; row++) { // lane n gives the address of row n
        u64 a = address(w, i, i.operands[1], i.space, row, 16, false);
        memcpy(tiles[row / 8].at[row % 8], (void *)a, 16);
    }
    for (int l = 0; l < 32; l++)
        for (int n = 0; n < i.count; n++) {
            int row = l / 4, column = l % 4 * 2;
            auto &t = tiles[n].at;
            u32 v = i.flag ? t[column][row] | (u32)t[column + 1][row] << 16
                           : t[row][column] | (u32)t[row][column + 1] << 16;
            set(w, i.data[n], l, v);
        }
}

void store_matrices(Warp &w, const Instruction &i, u32) {
    Eight tiles[4];
    for (int l = 0; l < 32; l++)
        for (int n = 0; n < i.count; n++) {
            int row = l / 4, column = l % 4 * 2;
            u32 v = get(w, i.data[n], l);
            auto &t = tiles[n].at;
            (i.flag ? t[column][row] : t[row][column]) = v;
            (i.flag ? t[column + 1][row] : t[row][column + 1]) = v >> 16;
        }
    for (int row = 0; row < i.count * 8; row++) {
        u64 a = address(w, i, i.operands[0], i.space, row, 16, true);
        memcpy((void *)a, tiles[row / 8].at[row % 8], 16);
    }
}

void bind_matrices(Instruction &i, Execute execute) {
    i.control = Control::Together;
    i.flag = i.has("trans");
    i.count = i.has("x4") ? 4 : i.has("x2") ? 2 : 1;
    if (!i.has("m8n8") || !i.has("b16") || (int)i.data.size() != i.count)
        throw Unsupported{"matrices"};
    i.execute = execute;
}

// --- mma.sync: m16 n8, the layout that the manual gives -----------------------------------

// Halves come in pairs of neighbours of a row of a, of a column of b.
float part_of(Type t, u32 bits, int half) {
    return t == TF32 ? as_tf32(bits) : from_half(bits >> 16 * half, is_bf16(t));
}

void multiply_accumulate(Warp &w, const Instruction &i, u32) {
    Shape s{16, 8, i.count};
    float a[16 * 32], b[32 * 8], c[16 * 8];
    int each = i.type == TF32 ? 1 : 2; // numbers in a register
    auto &ra = i.operands[1].parts, &rb = i.operands[2].parts, &rc = i.operands[3].parts;
    for (int l = 0; l < 32; l++) {
        int group = l / 4, place = l % 4;
        for (int r = 0; r < (int)ra.size(); r++)
            for (int h = 0; h < each; h++) {
                int row = group + r % 2 * 8, k = place * each + h + r / 2 * 4 * each;
                a[row * s.k + k] = part_of(i.type, get(w, ra[r], l), h);
            }
        for (int r = 0; r < (int)rb.size(); r++)
            for (int h = 0; h < each; h++) {
                int k = place * each + h + r * 4 * each;
                b[k * 8 + group] = part_of(i.type, get(w, rb[r], l), h);
            }
        for (int n = 0; n < 4; n++) {
            int at = (group + n / 2 * 8) * 8 + place * 2 + n % 2;
            c[at] = i.other == F32 ? to_float(get(w, rc[n], l))
                                   : from_f16(get(w, rc[n / 2], l) >> 16 * (n % 2));
        }
    }
    multiply(s, a, b, c);
    for (int l = 0; l < 32; l++) {
        float *at = c + l / 4 * 8 + l % 4 * 2;
        if (i.other == F32) {
            for (int n = 0; n < 4; n++) set(w, i.data[n], l, float_bits(at[n / 2 * 64 + n % 2]));
        } else {
            for (int n = 0; n < 2; n++)
                set(w, i.data[n], l, to_f16(at[n * 64]) | (u32)to_f16(at[n * 64 + 1]) << 16);
        }
    }
}

void bind_mma(Instruction &i) {
    Shape s = shape_of(i);
    i.control = Control::Together;
    i.count = s.k;
    i.other = nth_type(i, 0);
    i.type = nth_type(i, 1);
    if (s.m != 16 || s.n != 8 || s.k > 32) throw Unsupported{"shape"};
    if (i.type != BF16 && i.type != F16 && i.type != TF32) throw Unsupported{"type"};
    for (int n = 1; n < 4; n++) {
        Operand &o = i.operands.at(n);
        if (o.kind == Operand::Vector) continue;
        Operand one = o;
        o = Operand();
        o.kind = Operand::Vector;
        o.parts = {one};
    }
    i.warp_flop = 2 * s.m * s.n * s.k;
    i.execute = multiply_accumulate;
}

// --- wmma: which lane has which element is left open, so this is a layout of our own ----------

// Element e of a matrix is on lane e % 32, its e / 32-th; halves are two in a register.
float element(Warp &w, const std::vector<Operand> &fragment, Type t, int e) {
    int lane = e % 32, n = e / 32;
    if (size_of(t) == 4) return to_float(get(w, fragment[n], lane));
    return from_half(get(w, fragment[n / 2], lane) >> 16 * (n % 2), is_bf16(t));
}
void set_element(Warp &w, const std::vector<Operand> &fragment, Type t, int e, float x) {
    int lane = e % 32, n = e / 32;
    if (size_of(t) == 4) return set(w, fragment[n], lane, float_bits(x));
    if (n / 2 >= (int)fragment.size()) return;
    u32 old = get(w, fragment[n / 2], lane), shift = 16 * (n % 2);
    u32 now = (old & ~(0xffffu << shift)) | (u32)to_half(x, is_bf16(t)) << shift;
    set(w, fragment[n / 2], lane, now);
}

enum Matrix { A, B, C }; // variant of a load

// The address of an element, of a matrix of `columns` unless a stride was given. flag: by columns.
struct Walk {
    Warp &w;
    const Instruction &i;
    const Operand &mem;
    int rows, columns, stride, bytes;
    bool write;
    Walk(Warp &w, const Instruction &i, int mem, int rows, int columns)
        : w(w), i(i), mem(i.operands[mem]), rows(rows), columns(columns),
          bytes(size_of(i.type)), write(mem == 0) {
        stride = i.operands.size() > 2 ? (int)get(w, i.operands[2], 0) : i.flag ? rows : columns;
    }
    template <class F> void each(F f) {
        u64 first = address(w, i, mem, i.space, 0, bytes, write);
        Space space = i.space;
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) {
                u64 a = first + (u64)bytes * (i.flag ? c * (s64)stride + r : r * (s64)stride + c);
                check(w, i, space, a, bytes, write, 0);
                f(r * columns + c, (void *)a);
            }
    }
};

void wmma_load(Warp &w, const Instruction &i, u32) {
    Shape s = shape_of(i);
    int rows = i.variant == B ? s.k : s.m, columns = i.variant == A ? s.k : s.n;
    Walk(w, i, 1, rows, columns).each([&](int e, void *from) {
        u32 v = 0;
        memcpy(&v, from, size_of(i.type));
        float x = size_of(i.type) == 4 ? to_float(v) : from_half(v, is_bf16(i.type));
        set_element(w, i.data, i.type, e, x);
    });
}

void wmma_store(Warp &w, const Instruction &i, u32) {
    Shape s = shape_of(i);
    Walk(w, i, 0, s.m, s.n).each([&](int e, void *to) {
        float x = element(w, i.operands[1].parts, i.type, e);
        u32 v = size_of(i.type) == 4 ? float_bits(x) : to_half(x, is_bf16(i.type));
        memcpy(to, &v, size_of(i.type));
    });
}

void wmma_multiply(Warp &w, const Instruction &i, u32) { // type: of the factors, other: of sums
    Shape s = shape_of(i);
    std::vector<float> a(s.m * s.k), b(s.k * s.n), c(s.m * s.n);
    auto read = [&](std::vector<float> &to, int operand, Type t) {
        for (size_t e = 0; e < to.size(); e++) {
            to[e] = element(w, i.operands[operand].parts, t, e);
            if (t == TF32) to[e] = as_tf32(float_bits(to[e]));
        }
    };
    read(a, 1, i.type);
    read(b, 2, i.type);
    read(c, 3, i.other);
    multiply(s, a.data(), b.data(), c.data());
    for (size_t e = 0; e < c.size(); e++) set_element(w, i.data, i.other, e, c[e]);
}

void bind_wmma(Instruction &i) {
    i.control = Control::Together;
    Shape s = shape_of(i);
    const std::string &kind = i.modifiers[0];
    Type first = nth_type(i, 0), second = nth_type(i, 1);
    if (kind == "load" || kind == "store") {
        i.flag = i.has("col");
        i.type = first;
        i.variant = i.modifiers[1] == "a" ? A : i.modifiers[1] == "b" ? B : C;
        i.execute = kind == "load" ? wmma_load : wmma_store;
    } else {
        // Where both are fp16 only the types of the sums are named.
        i.type = nth_type(i, 2) == NONE ? F16 : second;
        i.other = first;
        i.warp_flop = 2 * s.m * s.n * s.k;
        i.execute = wmma_multiply;
    }
    if (!is_float(i.type) || i.type == F64) throw Unsupported{"type"};
}

} // namespace

void add_tensor_cores(Binders &all) {
    all["ldmatrix"] = [](Instruction &i) { bind_matrices(i, load_matrices); };
    all["stmatrix"] = [](Instruction &i) {
        const Operand &from = i.operands[1];
        i.data = from.kind == Operand::Vector ? from.parts : std::vector<Operand>{from};
        bind_matrices(i, store_matrices);
    };
    all["mma"] = bind_mma;
    all["wmma"] = bind_wmma;
}

} // namespace ptx
