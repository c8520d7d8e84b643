// The state of a block that runs, and access to a lane's registers and memory.
#pragma once
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace ptx {

enum LaneState : u8 { RUNS, AT_BARRIER, TOGETHER, ENDED };

// A copy that was asked for and not waited for. It is made as late as it may be, so that a program
// that does not wait finds what was there before.
struct LaneCopy { int lane; u64 to, from; u32 bytes, present; int group; };
struct BulkCopy {
    const Instruction *instruction;
    int lane, group;
    std::vector<u64> operands;
};

struct Warp {
    Block *block;
    int id;
    u8 *registers;
    int pc[32];
    LaneState state[32];
    u8 barrier[32]; // that the lane stands at
    u32 alive;      // lanes that have not ended
    u64 steps, flop;
    bool yields;    // it waits for another warp
    std::vector<LaneCopy> copies;     // cp.async
    std::deque<BulkCopy> bulk_stores; // cp.async.bulk to global memory
    int groups[32], bulk_groups[32];  // committed by the lane
};

struct Block {
    const Kernel *kernel;
    const Module *module;
    const u8 *params;
    u8 *shared;
    u64 dynamic_shared;
    u8 *local;
    u64 local_bytes; // of a thread
    Size grid, threads, at;
    std::vector<Warp> warps;
    struct { int arrived, wanted; } barriers[16];
    std::deque<BulkCopy> bulk_loads; // to shared memory
};

inline u8 *lanes_of(Warp &w, const Operand &o) {
    return o.kind == Operand::Register ? w.registers + o.offset
                                       : const_cast<u8 *>(w.block->kernel->pool.data()) + o.offset;
}
inline u64 get(Warp &w, const Operand &o, int lane) {
    u8 *at = lanes_of(w, o);
    return o.width == 8 ? ((u64 *)at)[lane] : ((u32 *)at)[lane];
}
inline void set(Warp &w, const Operand &o, int lane, u64 v) {
    if (o.kind != Operand::Register) return;
    u8 *at = w.registers + o.offset;
    if (o.width == 8) ((u64 *)at)[lane] = v; else ((u32 *)at)[lane] = (u32)v;
}
inline bool get_predicate(Warp &w, const Operand &o, int lane) {
    return (get(w, o, lane) & 1) != o.inverted;
}
double get_number(Warp &, const Operand &, int lane, Type);

#define EACH_LANE(l, lanes) for (int l = 0; l < 32; l++) if ((lanes) >> l & 1)

// Lanes of an operand as an array. All-lanes loops over these become vector instructions.
template <class X> const X *values(Warp &w, const Operand &o) {
    u8 *at = lanes_of(w, o);
    return (const X *)(o.kind == Operand::Register || sizeof(X) == 8 ? at : at + 256);
}

template <class X, class F> void for_lanes(X *to, u32 lanes, F f) {
    if (lanes == ~0u) {
        X result[32];
        for (int l = 0; l < 32; l++) result[l] = f(l);
        memcpy(to, result, sizeof result);
    } else {
        EACH_LANE(l, lanes) to[l] = f(l);
    }
}

// Executes of a function of one, two or three numbers, and of one that works on a lane.
template <class X, class F> Execute unary(F) {
    return [](Warp &w, const Instruction &i, u32 lanes) {
        const X *a = values<X>(w, i.operands[1]);
        for_lanes((X *)(w.registers + i.data[0].offset), lanes, [&](int l) { return F{}(a[l]); });
    };
}
template <class X, class F> Execute binary(F) {
    return [](Warp &w, const Instruction &i, u32 lanes) {
        const X *a = values<X>(w, i.operands[1]), *b = values<X>(w, i.operands[2]);
        X *to = (X *)(w.registers + i.data[0].offset);
        for_lanes(to, lanes, [&](int l) { return F{}(a[l], b[l]); });
    };
}
template <class X, class F> Execute ternary(F) {
    return [](Warp &w, const Instruction &i, u32 lanes) {
        const X *a = values<X>(w, i.operands[1]), *b = values<X>(w, i.operands[2]);
        const X *c = values<X>(w, i.operands[3]);
        X *to = (X *)(w.registers + i.data[0].offset);
        for_lanes(to, lanes, [&](int l) { return F{}(a[l], b[l], c[l]); });
    };
}
// F gives a lane's result from its operands 1, 2 and 3, as many as there are.
template <class F> Execute per_lane(F) {
    return [](Warp &w, const Instruction &i, u32 lanes) {
        u64 x[4] = {};
        EACH_LANE(l, lanes) {
            for (size_t n = 1; n < i.operands.size() && n < 5; n++)
                x[n - 1] = get(w, i.operands[n], l);
            set(w, i.operands[0], l, F{}(i, x));
        }
    };
}
inline Execute nothing() { return [](Warp &, const Instruction &, u32) {}; }

// The host's address of `mem` for a lane, once it is known that the lane may use `bytes` there.
u64 address(Warp &, const Instruction &, const Operand &mem, Space, int lane, u64 bytes,
            bool write);
void check(Warp &, const Instruction &, Space, u64 address, u64 bytes, bool write, int lane);
u64 origin(Warp &, Space, int lane);
Space space_of(const Instruction &);
// The n-th of the types among the modifiers, from 0; NONE where there are fewer.
Type nth_type(const Instruction &, int n);
int variant_of(const Instruction &, std::initializer_list<const char *> names);

// What an atomic operation, or a reduction over lanes, makes of two values.
u64 combine(Type, const std::string &operation, u64 old, u64 b, u64 c);

// Copies that must have been made when the block ends.
void finish_copies(Block &);

using Binder = void (*)(Instruction &);
using Binders = std::unordered_map<std::string, Binder>;
void add_arithmetic(Binders &);
void add_functions(Binders &);
void add_bits(Binders &);
void add_conversions(Binders &);
void add_memory(Binders &);
void add_together(Binders &);
void add_tensor_cores(Binders &);
void add_async_copies(Binders &);

} // namespace ptx
