// Copies that run beside the program: cp.async, cp.async.bulk (TMA) and the mbarriers that count
// them. They are made when the program waits for them and no sooner.
#include <algorithm>

#include "machine.h"
#include "tensor_map.h"

namespace ptx {

namespace {

// --- mbarrier: our own layout of its 64 bits ----------------------------------------------

struct Barrier {
    u64 phase, pending, expected;
    s64 bytes; // still to come
    static constexpr s64 NONE_LEFT = 0x400000;

    static Barrier read(u64 at) {
        u64 v;
        memcpy(&v, (void *)at, 8);
        return {v >> 63, v >> 43 & 0xfffff, v >> 23 & 0xfffff, (s64)(v & 0x7fffff) - NONE_LEFT};
    }
    u64 bits() const {
        return phase << 63 | pending << 43 | expected << 23 | (u64)(bytes + NONE_LEFT);
    }
    void write(u64 at) {
        if (pending == 0 && bytes == 0) {
            phase ^= 1;
            pending = expected;
        }
        u64 v = bits();
        memcpy((void *)at, &v, 8);
    }
};

void make_loads(Block &, u64 barrier);
void make_lane_copies(Warp &, int lane, int up_to_group);

enum BarrierKind { Init, Inval, Arrive, ExpectBytes, ArriveExpect, Wait };

void barrier(Warp &w, const Instruction &i, u32 lanes) {
    auto argument = [&](int lane, u64 otherwise) {
        size_t n = i.count + 1;
        return n < i.operands.size() ? get(w, i.operands[n], lane) : otherwise;
    };
    EACH_LANE(l, lanes) {
        u64 at = address(w, i, i.operands[i.count], Space::Shared, l, 8, true);
        Barrier b = Barrier::read(at);
        u64 before = b.bits();
        switch (i.variant) {
        case Init: b = {0, argument(l, 0), argument(l, 0), 0}; break;
        case Inval: continue;
        case Arrive: b.pending -= argument(l, 1); break;
        case ExpectBytes: b.bytes += argument(l, 0); break;
        case ArriveExpect:
            b.bytes += argument(l, 0);
            b.pending--;
            break;
        case Wait: {
            make_loads(*w.block, at);
            u64 of = argument(l, 0);
            bool done = (i.flag ? of & 1 : of >> 63) != Barrier::read(at).phase;
            set(w, i.operands[0], l, done);
            w.yields |= !done;
            continue;
        }
        }
        b.write(at);
        if (i.count) set(w, i.operands[0], l, before); // the state of the phase that it arrived in
    }
}

void bind_barrier(Instruction &i) {
    const std::string &kind = i.modifiers.at(0);
    if (i.has("noComplete")) throw Unsupported{"noComplete"};
    i.flag = i.has("parity");
    i.count = i.operands.at(0).kind != Operand::Memory; // operands before the barrier
    if (kind == "init") i.variant = Init;
    else if (kind == "inval") i.variant = Inval;
    else if (kind == "arrive") i.variant = i.has("expect_tx") ? ArriveExpect : Arrive;
    else if (kind == "expect_tx") i.variant = ExpectBytes;
    else if (kind == "try_wait" || kind == "test_wait") i.variant = Wait;
    else throw Unsupported{"kind"};
    i.execute = barrier;
}

// --- cp.async: each lane's own, in groups -------------------------------------------------

void lane_copy(Warp &w, const Instruction &i, u32 lanes) {
    EACH_LANE(l, lanes) {
        u32 bytes = i.operands[2].value, present = bytes;
        if (i.operands.size() > 3 && !i.flag)
            present = std::min<u64>(bytes, get(w, i.operands[3], l));
        u64 to = address(w, i, i.operands[0], Space::Shared, l, bytes, true), from = 0;
        if (present) from = address(w, i, i.operands[1], Space::Global, l, present, false);
        w.copies.push_back({l, to, from, bytes, present, w.groups[l]});
    }
}

void make_lane_copies(Warp &w, int lane, int up_to_group) {
    auto rest = w.copies.begin();
    for (auto &c : w.copies) {
        if (c.lane != lane || c.group >= up_to_group) {
            *rest++ = c;
            continue;
        }
        memset((void *)c.to, 0, c.bytes);
        memcpy((void *)c.to, (void *)c.from, c.present);
    }
    w.copies.erase(rest, w.copies.end());
}

constexpr int ALL_GROUPS = 1 << 30;

void bind_copy_wait(Instruction &i) { // operand 0 of wait_group: how many groups may be left
    if (i.has("wait_all")) {
        i.execute = [](Warp &w, const Instruction &, u32 lanes) {
            EACH_LANE(l, lanes) make_lane_copies(w, l, ALL_GROUPS);
        };
    } else {
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) make_lane_copies(w, l, w.groups[l] - i.operands[0].value);
        };
    }
}

// Arrives once the lane's copies so far are made, which is now.
void arrive_with_copies(Warp &w, const Instruction &i, u32 lanes) {
    EACH_LANE(l, lanes) {
        u64 at = address(w, i, i.operands[0], Space::Shared, l, 8, true);
        make_lane_copies(w, l, ALL_GROUPS);
        Barrier b = Barrier::read(at);
        if (i.has("noinc")) b.pending--;
        b.write(at);
    }
}

// --- cp.async.bulk ------------------------------------------------------------------------

enum Bulk { Load, LoadTensor, Store, StoreTensor };

bool loads(const Instruction &i) { return i.variant == Load || i.variant == LoadTensor; }

// The bytes of shared memory lie in another order, so that columns of a tile meet all banks.
u64 swizzled(u64 offset, u32 swizzle) {
    static const u64 masks[] = {0, 0x10, 0x30, 0x70};
    return offset ^ (offset >> 3 & masks[swizzle & 3]);
}

u64 box_bytes(const TensorMap &map) {
    u64 bytes = map.element_bytes;
    for (u32 d = 0; d < map.rank; d++) bytes *= map.box[d];
    return bytes;
}

// operands: shared memory, the tensor map, coordinates. What is outside of the tensor reads as 0.
void copy_tile(Block &b, const BulkCopy &c, bool load) {
    const TensorMap &map = *(const TensorMap *)c.operands[1];
    u64 bytes = map.element_bytes, first = c.operands[0] - (u64)b.shared;
    for (u64 n = 0; n < box_bytes(map) / bytes; n++) {
        u64 rest = n, global = map.base;
        bool inside = true;
        for (u32 d = 0; d < map.rank; d++) {
            s64 at = (s32)c.operands[2 + d] + (s64)(rest % map.box[d]);
            rest /= map.box[d];
            inside &= at >= 0 && (u64)at < map.extent[d];
            global += at * map.stride[d];
        }
        u8 *shared = b.shared + swizzled(first + n * bytes, map.swizzle);
        if (inside && check_global) check_global(global, bytes, !load);
        if (!load && inside) memcpy((void *)global, shared, bytes);
        if (load && inside) memcpy(shared, (void *)global, bytes);
        if (load && !inside) memset(shared, 0, bytes);
    }
}

void make_bulk(Block &b, const BulkCopy &c) {
    const Instruction &i = *c.instruction;
    if (i.variant == LoadTensor || i.variant == StoreTensor) {
        copy_tile(b, c, loads(i));
    } else { // operands: to, from, bytes
        u64 global = c.operands[loads(i)];
        if (check_global) check_global(global, c.operands[2], !loads(i));
        memcpy((void *)c.operands[0], (void *)c.operands[1], c.operands[2]);
    }
}

u64 bytes_of(const BulkCopy &c) {
    return c.instruction->variant == LoadTensor ? box_bytes(*(const TensorMap *)c.operands[1])
                                                : c.operands[2];
}

// The barrier of a load is its last operand.
void make_loads(Block &b, u64 barrier) {
    for (size_t n = 0; n < b.bulk_loads.size();) {
        BulkCopy c = b.bulk_loads[n];
        if (c.operands.back() != barrier) {
            n++;
            continue;
        }
        b.bulk_loads.erase(b.bulk_loads.begin() + n);
        make_bulk(b, c);
        Barrier state = Barrier::read(barrier);
        state.bytes -= bytes_of(c);
        state.write(barrier);
    }
}

void make_stores(Warp &w, int lane, int up_to_group) {
    for (size_t n = 0; n < w.bulk_stores.size();) {
        BulkCopy c = w.bulk_stores[n];
        if (lane >= 0 && (c.lane != lane || c.group >= up_to_group)) {
            n++;
            continue;
        }
        w.bulk_stores.erase(w.bulk_stores.begin() + n);
        make_bulk(*w.block, c);
    }
}

void tile_operands(Warp &w, const Instruction &i, int lane, BulkCopy &c) {
    const Operand &map = i.operands[loads(i) ? 1 : 0], &tile = i.operands[loads(i) ? 0 : 1];
    u64 a = address(w, i, map, Space::Generic, lane, 16, false), words[2];
    memcpy(words, (void *)a, 16);
    if (words[0] != TENSOR_MAP_MARK) throw Fault{i.text + ": no tensor map"};
    const TensorMap &m = *(const TensorMap *)words[1];
    u64 shared = address(w, i, tile, Space::Shared, lane, box_bytes(m), loads(i));
    c.operands = {shared, words[1]};
    for (u32 d = 0; d < m.rank; d++)
        c.operands.push_back(get(w, map.parts.at(1).parts.at(d), lane));
}

void bulk(Warp &w, const Instruction &i, u32 lanes) {
    EACH_LANE(l, lanes) {
        BulkCopy c{&i, l, w.bulk_groups[l], {}};
        if (i.variant == LoadTensor || i.variant == StoreTensor) {
            tile_operands(w, i, l, c);
        } else {
            u64 bytes = get(w, i.operands[2], l);
            Space to = loads(i) ? Space::Shared : Space::Global;
            Space from = loads(i) ? Space::Global : Space::Shared;
            c.operands = {address(w, i, i.operands[0], to, l, bytes, true),
                          address(w, i, i.operands[1], from, l, bytes, false), bytes};
        }
        if (!loads(i)) {
            w.bulk_stores.push_back(c);
            continue;
        }
        const Operand &barrier = i.operands[i.variant == Load ? 3 : 2];
        c.operands.push_back(address(w, i, barrier, Space::Shared, l, 8, true));
        w.block->bulk_loads.push_back(c);
    }
}

void bind_bulk(Instruction &i) {
    if (i.has("reduce") || i.has("prefetch") || i.has("im2col") || i.has("multicast::cluster"))
        throw Unsupported{"kind"};
    bool load = i.modifiers.size() > 2 && i.text.find(".mbarrier") != std::string::npos;
    i.variant = i.has("tensor") ? load ? LoadTensor : StoreTensor : load ? Load : Store;
    i.execute = bulk;
}

void bind_copy(Instruction &i) {
    bool of_bulk = i.has("bulk");
    if (i.has("commit_group")) {
        i.flag = of_bulk;
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) (i.flag ? w.bulk_groups : w.groups)[l]++;
        };
    } else if (of_bulk && i.has("wait_group")) {
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) make_stores(w, l, w.bulk_groups[l] - i.operands[0].value);
        };
    } else if (i.has("wait_group") || i.has("wait_all")) {
        bind_copy_wait(i);
    } else if (of_bulk) {
        bind_bulk(i);
    } else if (i.has("mbarrier")) {
        i.execute = arrive_with_copies;
    } else {
        i.flag = i.has("L2::cache_hint");
        i.execute = lane_copy;
    }
}

} // namespace

void finish_copies(Block &b) {
    for (auto &w : b.warps) {
        make_stores(w, -1, 0);
        w.copies.clear();
    }
    b.bulk_loads.clear();
}

void add_async_copies(Binders &all) {
    all["mbarrier"] = bind_barrier;
    all["cp"] = bind_copy;
}

} // namespace ptx
