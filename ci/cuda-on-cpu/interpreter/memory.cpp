// Loads, stores, atomics, and the check that every access goes through.
#include <mutex>

#include "machine.h"

namespace ptx {

void (*check_global)(u64 address, u64 bytes, bool write) = nullptr;

// Shared, local and parameter addresses count from 0; generic ones are the host's.
u64 origin(Warp &w, Space space, int lane) {
    Block &b = *w.block;
    switch (space) {
    case Space::Param: return (u64)b.params;
    case Space::Shared: return (u64)b.shared;
    case Space::Local: return (u64)b.local + b.local_bytes * (w.id * 32 + lane);
    default: return 0;
    }
}

Space space_of(const Instruction &i) {
    for (auto &m : i.modifiers) {
        if (m == "global" || m == "const") return Space::Global;
        if (m.rfind("shared", 0) == 0) return Space::Shared;
        if (m == "local") return Space::Local;
        if (m.rfind("param", 0) == 0) return Space::Param;
    }
    return Space::Generic;
}

static bool within(u64 a, u64 n, u64 start, u64 size) {
    return a >= start && n <= size && a - start <= size - n;
}

static bool in_shared(const Block &b, u64 a, u64 n) {
    u64 base = (u64)b.shared;
    return within(a, n, base, b.kernel->shared_bytes)
        || within(a, n, base + DYNAMIC_SHARED, b.dynamic_shared);
}

static bool in_module(const Module &m, u64 a, u64 n) {
    for (auto &global : m.globals)
        if (within(a, n, global.second.at, global.second.size)) return true;
    return false;
}

void check(Warp &w, const Instruction &i, Space space, u64 a, u64 n, bool write, int lane) {
    Block &b = *w.block;
    u64 local = origin(w, Space::Local, lane);
    bool own = false;
    switch (space) {
    case Space::Param: own = within(a, n, (u64)b.params, b.kernel->param_bytes); break;
    case Space::Shared: own = in_shared(b, a, n); break;
    case Space::Local: own = within(a, n, local, b.local_bytes); break;
    case Space::Generic:
        own = in_shared(b, a, n) || within(a, n, local, b.local_bytes)
            || within(a, n, (u64)b.params, b.kernel->param_bytes) || in_module(*b.module, a, n);
        break;
    default: own = in_module(*b.module, a, n);
    }
    if (a % (n & -n) && n <= 16)
        throw Fault{i.text + ": address " + std::to_string(a) + " is not aligned"};
    if (own) return;
    if (space == Space::Global || space == Space::Generic) {
        if (check_global) check_global(a, n, write);
        return;
    }
    throw Fault{i.text + ": offset " + std::to_string((s64)(a - origin(w, space, lane)))
                + " is outside of its memory"};
}

u64 address(Warp &w, const Instruction &i, const Operand &mem, Space space, int lane, u64 bytes,
            bool write) {
    // A parameter of a function that was put in lies in its caller's local memory.
    if (space == Space::Param && mem.space == Space::Local) space = Space::Local;
    const Operand &base = mem.parts[0];
    u64 a = (base.kind == Operand::None ? 0 : get(w, base, lane)) + mem.value;
    a += origin(w, space, lane);
    check(w, i, space, a, bytes, write, lane);
    return a;
}

namespace {

void load(Warp &w, const Instruction &i, u32 lanes) {
    int size = size_of(i.type);
    EACH_LANE(l, lanes) {
        u64 a = address(w, i, i.operands[1], i.space, l, (u64)size * i.count, false);
        for (int n = 0; n < i.count; n++) {
            u64 v = 0;
            memcpy(&v, (void *)(a + n * size), size);
            set(w, i.data[n], l, is_signed(i.type) ? (u64)sign_extended(v, i.type) : v);
        }
    }
}

void store(Warp &w, const Instruction &i, u32 lanes) {
    int size = size_of(i.type);
    EACH_LANE(l, lanes) {
        u64 a = address(w, i, i.operands[0], i.space, l, (u64)size * i.count, true);
        for (int n = 0; n < i.count; n++) {
            u64 v = get(w, i.data[n], l);
            memcpy((void *)(a + n * size), &v, size);
        }
    }
}

int vector_length(const Instruction &i) {
    int n = variant_of(i, {"v2", "v4", "v8"});
    return n < 0 ? 1 : 2 << n;
}

void bind_load(Instruction &i) {
    i.count = vector_length(i);
    if (size_of(i.type) > 8 || (int)i.data.size() != i.count) throw Unsupported{"width"};
    i.execute = load;
}

void bind_store(Instruction &i) {
    i.count = vector_length(i);
    const Operand &from = i.operands[1];
    i.data = from.kind == Operand::Vector ? from.parts : std::vector<Operand>{from};
    if (size_of(i.type) > 8 || (int)i.data.size() != i.count) throw Unsupported{"width"};
    i.execute = store;
}

const std::initializer_list<const char *> OPERATIONS = {
    "add", "exch", "cas", "min", "max", "and", "or", "xor", "inc", "dec",
};

template <bool RETURNS> void atomic(Warp &w, const Instruction &i, u32 lanes) {
    static std::mutex one; // streams run at the same time
    std::lock_guard<std::mutex> guard(one);
    const Operand *operands = i.operands.data() + RETURNS;
    std::string operation = *(OPERATIONS.begin() + i.variant);
    int size = size_of(i.type);
    EACH_LANE(l, lanes) {
        u64 a = address(w, i, operands[0], i.space, l, size, true);
        u64 old = 0, c = i.operands.size() > RETURNS + 2 ? get(w, operands[2], l) : 0;
        memcpy(&old, (void *)a, size);
        u64 now = combine(i.type, operation, old, get(w, operands[1], l), c);
        memcpy((void *)a, &now, size);
        if (RETURNS) set(w, i.operands[0], l, old);
    }
}

template <bool RETURNS> void bind_atomic(Instruction &i) {
    i.variant = variant_of(i, OPERATIONS);
    if (i.variant < 0 || i.has("v2") || i.has("v4") || i.has("async")) throw Unsupported{"kind"};
    i.execute = atomic<RETURNS>;
}

template <bool TO_SPACE> void convert_address(Warp &w, const Instruction &i, u32 lanes) {
    EACH_LANE(l, lanes) {
        u64 v = get(w, i.operands[1], l), base = origin(w, i.space, l);
        set(w, i.operands[0], l, TO_SPACE ? v - base : v + base);
    }
}

void is_in_space(Warp &w, const Instruction &i, u32 lanes) {
    EACH_LANE(l, lanes) {
        u64 a = get(w, i.operands[1], l);
        bool shared = in_shared(*w.block, a, 1);
        bool local = within(a, 1, origin(w, Space::Local, l), w.block->local_bytes);
        bool yes = i.space == Space::Shared ? shared
            : i.space == Space::Local ? local : i.space == Space::Global && !shared && !local;
        set(w, i.operands[0], l, yes);
    }
}

u64 sum(Type t, u64 a, u64 b) {
    if (t == F32) return float_bits(to_float(a) + to_float(b));
    if (t == F64) return double_bits(to_double(a) + to_double(b));
    if (!is_half(t)) return a + b;
    u32 result = 0;
    for (int shift = 0; shift < (is_pair(t) ? 32 : 16); shift += 16) {
        float x = from_half(a >> shift, is_bf16(t)) + from_half(b >> shift, is_bf16(t));
        result |= (u32)to_half(x, is_bf16(t)) << shift;
    }
    return result;
}

bool less(Type t, u64 a, u64 b) {
    if (t == F32) return to_float(a) < to_float(b);
    if (is_float(t)) throw Unsupported{"the least of such floats"};
    return is_signed(t) ? sign_extended(a, t) < sign_extended(b, t)
                        : zero_extended(a, t) < zero_extended(b, t);
}

} // namespace

u64 combine(Type t, const std::string &operation, u64 old, u64 b, u64 c) {
    if (operation == "add") return sum(t, old, b);
    if (operation == "exch") return b;
    if (operation == "cas") return zero_extended(old, t) == zero_extended(b, t) ? c : old;
    if (operation == "and") return old & b;
    if (operation == "or") return old | b;
    if (operation == "xor") return old ^ b;
    if (operation == "min") return less(t, b, old) ? b : old;
    if (operation == "max") return less(t, old, b) ? b : old;
    if (operation == "inc") return (u32)old >= (u32)b ? 0 : old + 1;
    return (u32)old == 0 || (u32)old > (u32)b ? b : old - 1; // dec
}

void add_memory(Binders &all) {
    all["ld"] = all["ldu"] = bind_load;
    all["st"] = bind_store;
    all["atom"] = bind_atomic<true>;
    all["red"] = bind_atomic<false>;
    all["cvta"] = [](Instruction &i) {
        i.execute = i.has("to") ? convert_address<true> : convert_address<false>;
    };
    all["isspacep"] = [](Instruction &i) { i.execute = is_in_space; };
    all["mapa"] = [](Instruction &i) { // a cluster is one block
        i.execute = per_lane([](const Instruction &, u64 *x) { return x[0]; });
    };
    all["createpolicy"] = [](Instruction &i) {
        i.execute = per_lane([](const Instruction &, u64 *) { return (u64)0; });
    };
}

} // namespace ptx
