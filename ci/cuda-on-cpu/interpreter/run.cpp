// Runs blocks one after the other, and the warps of a block in turns. The lanes of a warp that are
// at the lowest instruction run together until they come to where others wait.
#include <chrono>
#include <climits>
#include <random>

#include "machine.h"

namespace ptx {

static u32 lanes_in(const Warp &w, LaneState state, int pc) {
    u32 lanes = 0;
    for (int l = 0; l < 32; l++)
        if (w.state[l] == state && (pc < 0 || w.pc[l] == pc)) lanes |= 1u << l;
    return lanes;
}

static void put(Warp &w, u32 lanes, LaneState state, int pc) {
    EACH_LANE(l, lanes) {
        w.state[l] = state;
        w.pc[l] = pc;
    }
}

static u32 predicated(const Warp &w, const Instruction &i, u32 lanes) {
    if (i.predicate < 0) return lanes;
    const u32 *p = (const u32 *)(w.registers + i.predicate);
    u32 yes = 0;
    for (int l = 0; l < 32; l++) yes |= (p[l] & 1) << l;
    return lanes & (i.predicate_inverted ? ~yes : yes);
}

// The lanes come to a barrier, those in `these`; the others go on.
static void at_barrier(Warp &w, const Instruction &i, u32 lanes, u32 these, int pc) {
    int first = __builtin_ctz(these);
    int id = i.operands.empty() ? 0 : (int)get(w, i.operands[0], first) & 15;
    put(w, lanes & ~these, RUNS, pc + 1);
    put(w, these, AT_BARRIER, pc + 1);
    EACH_LANE(l, these) w.barrier[l] = id;
    auto &barrier = w.block->barriers[id];
    barrier.arrived += __builtin_popcount(these);
    barrier.wanted = i.operands.size() > 1 ? (int)get(w, i.operands[1], first) : 0;
}

// True when all that take part are there and the instruction was executed; `lanes` are then all of
// them. Else those that came wait.
static bool together(Warp &w, const Instruction &i, u32 &lanes, u32 these, int pc) {
    u32 named = i.mask_operand < 0
        ? ~0u : (u32)get(w, i.operands[i.mask_operand], __builtin_ctz(these));
    u32 wanted = named & w.alive, here = these | lanes_in(w, TOGETHER, pc);
    if ((here & wanted) != wanted) {
        put(w, lanes & ~these, RUNS, pc + 1);
        put(w, these, TOGETHER, pc);
        return false;
    }
    i.execute(w, i, here);
    w.flop += i.warp_flop;
    EACH_LANE(l, here) w.state[l] = RUNS;
    lanes |= here;
    return true;
}

// Runs `lanes`, which are all at `pc`, until they come to `next`, part, stop or have had `budget`.
static void run_lanes(Warp &w, u32 lanes, int pc, int next, long &budget) {
    const Kernel &k = *w.block->kernel;
    while (budget-- > 0) {
        const Instruction &i = k.code[pc];
        u32 these = predicated(w, i, lanes);
        w.steps++;
        switch (i.control) {
        case Control::Plain:
            if (these) i.execute(w, i, these);
            pc++;
            break;
        case Control::Branch:
            if (these && these != lanes) {
                put(w, lanes & ~these, RUNS, pc + 1);
                return put(w, these, RUNS, i.target);
            }
            pc = these ? i.target : pc + 1;
            break;
        case Control::Exit:
            put(w, these, ENDED, pc);
            w.alive &= ~these;
            lanes &= ~these;
            if (!lanes) return;
            pc++;
            break;
        case Control::Barrier:
            if (these) return at_barrier(w, i, lanes, these, pc);
            pc++;
            break;
        case Control::Together:
            if (these && !together(w, i, lanes, these, pc)) return;
            pc++;
            break;
        }
        if (pc >= next || w.yields) break;
    }
    put(w, lanes, RUNS, pc);
}

// No lane runs. Lanes that wait for others that have ended, or for ones that stand at a barrier of
// the warp's own, go on without them. False where there are none.
static bool release_together(Warp &w) {
    if (lanes_in(w, AT_BARRIER, -1)) return false;
    int pc = INT_MAX;
    for (int l = 0; l < 32; l++)
        if (w.state[l] == TOGETHER) pc = std::min(pc, w.pc[l]);
    if (pc == INT_MAX) return false;
    u32 lanes = lanes_in(w, TOGETHER, pc);
    const Instruction &i = w.block->kernel->code[pc];
    i.execute(w, i, lanes);
    put(w, lanes, RUNS, pc + 1);
    return true;
}

static void run_warp(Warp &w, long budget) {
    w.yields = false;
    while (budget > 0 && !w.yields) {
        int pc = INT_MAX, next = INT_MAX;
        for (int l = 0; l < 32; l++)
            if (w.state[l] == RUNS) pc = std::min(pc, w.pc[l]);
        if (pc == INT_MAX) {
            if (!release_together(w)) return;
            continue;
        }
        for (int l = 0; l < 32; l++)
            if (w.state[l] == RUNS && w.pc[l] != pc) next = std::min(next, w.pc[l]);
        run_lanes(w, lanes_in(w, RUNS, pc), pc, next, budget);
    }
}

// Lets all pass that stand at a barrier at which everybody has arrived.
static bool release_barriers(Block &b) {
    int alive = 0;
    for (auto &w : b.warps) alive += __builtin_popcount(w.alive);
    bool released = false;
    for (int id = 0; id < 16; id++) {
        auto &barrier = b.barriers[id];
        int wanted = barrier.wanted ? barrier.wanted : alive;
        if (!barrier.arrived || barrier.arrived < wanted) continue;
        for (auto &w : b.warps)
            for (int l = 0; l < 32; l++)
                if (w.state[l] == AT_BARRIER && w.barrier[l] == id) w.state[l] = RUNS;
        barrier.arrived = 0;
        released = true;
    }
    return released;
}

static void start_block(Block &b) {
    u32 threads = b.threads.all();
    memset(b.barriers, 0, sizeof b.barriers);
    for (auto &w : b.warps) {
        w.steps = w.flop = 0;
        w.alive = 0;
        for (int l = 0; l < 32; l++) {
            bool there = w.id * 32 + l < (int)threads;
            w.pc[l] = 0;
            w.state[l] = there ? RUNS : ENDED;
            w.alive |= (u32)there << l;
            w.groups[l] = w.bulk_groups[l] = 0;
        }
        for (auto &[offset, value] : b.kernel->specials)
            for (int l = 0; l < 32; l++)
                ((u32 *)(w.registers + offset))[l] = value(b, w.id * 32 + l);
    }
}

static std::string place(const Block &b) {
    return "block " + std::to_string(b.at.x) + " " + std::to_string(b.at.y) + " "
        + std::to_string(b.at.z) + ": ";
}

static u64 run_block(Block &b, std::minstd_rand *random) {
    start_block(b);
    std::vector<Warp *> turns;
    for (auto &w : b.warps) turns.push_back(&w);
    for (;;) {
        u64 before = 0, after = 0;
        if (random) std::shuffle(turns.begin(), turns.end(), *random);
        for (auto *w : turns) {
            before += w->steps;
            run_warp(*w, random ? 1 + (*random)() % 500 : 20000);
            after += w->steps;
        }
        bool released = release_barriers(b), ended = true;
        for (auto &w : b.warps) ended &= !w.alive;
        if (ended) break;
        if (before == after && !released) throw Fault{place(b) + "its threads wait for ever"};
    }
    finish_copies(b);
    u64 steps = 0;
    for (auto &w : b.warps) steps += w.steps;
    return steps;
}

namespace {
// Kept between launches by each thread.
struct Store {
    std::vector<u8> bytes;
    u8 *aligned(u64 size, u64 to) {
        if (bytes.size() < size + to) bytes.resize(size + to);
        return (u8 *)(((u64)bytes.data() + to - 1) / to * to);
    }
};
} // namespace

static thread_local Store shared_store, register_store, local_store;

void launch(Kernel &k, const Module &m, Size grid, Size threads, u32 dynamic_shared,
            const u8 *params, u32 seed, const Sample *sample) {
    auto began = std::chrono::steady_clock::now();
    u64 warps = (threads.all() + 31) / 32, shared_bytes = DYNAMIC_SHARED + dynamic_shared;
    u64 registers = (k.register_bytes + 511) / 256 * 256, local = (k.local_bytes + 63) / 64 * 64;
    Block b;
    b.kernel = &k;
    b.module = &m;
    b.params = params;
    b.shared = shared_store.aligned(shared_bytes + 64, 1024);
    b.dynamic_shared = dynamic_shared;
    u8 *register_file = register_store.aligned(registers * warps, 256);
    b.local = local_store.aligned(local * warps * 32, 64);
    b.local_bytes = local;
    b.grid = grid;
    b.threads = threads;
    b.warps.resize(warps);
    for (u64 w = 0; w < warps; w++) {
        b.warps[w].block = &b;
        b.warps[w].id = w;
        b.warps[w].registers = register_file + registers * w;
    }
    std::minstd_rand random(seed ? seed : 1);
    u64 blocks = grid.all(), steps = 0;
    // Any odd step through the blocks' numbers that shares no factor with their count meets all.
    u64 step = 1, first = 0;
    if (seed) {
        first = random() % blocks;
        step = random() % blocks | 1;
        auto common = [](u64 a, u64 b) { while (b) { u64 r = a % b; a = b; b = r; } return a; };
        while (common(step, blocks) != 1) step += 2;
    }
    u64 runs = sample ? std::min(sample->blocks, blocks) : blocks;
    for (u64 n = 0, at = first; n < runs; n++, at = (at + step) % blocks) {
        if (runs < blocks) at = runs > 1 ? n * (blocks - 1) / (runs - 1) : 0;
        b.at = Size{(u32)(at % grid.x), (u32)(at / grid.x % grid.y), (u32)(at / grid.x / grid.y)};
        // Registers are left as they are; memory that was not written is NaN.
        memset(b.shared, 0xff, k.shared_bytes);
        memset(b.shared + DYNAMIC_SHARED, 0xff, dynamic_shared);
        memset(b.local, 0xff, local * warps * 32);
        u64 of_block = run_block(b, seed ? &random : nullptr), flop = 0;
        for (auto &w : b.warps) flop += w.flop;
        if (sample) sample->ended(of_block, flop);
        steps += of_block;
    }
    k.launches++;
    k.instructions += steps;
    k.nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
}

} // namespace ptx
