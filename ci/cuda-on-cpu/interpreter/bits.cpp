// Logic, shifts and fields of bits.
#include <algorithm>

#include "machine.h"

namespace ptx {

namespace {

template <class F> void bind_logic(Instruction &i, F f) {
    if (i.type == PRED) {
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) {
                u32 a = get_predicate(w, i.operands[1], l), b = get_predicate(w, i.operands[2], l);
                set(w, i.operands[0], l, F{}(a, b));
            }
        };
    } else if (size_of(i.type) == 8) {
        i.execute = binary<u64>(f);
    } else {
        i.execute = binary<u32>(f);
    }
}

void bind_not(Instruction &i) {
    if (i.type == PRED) {
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) set(w, i.operands[0], l, !get_predicate(w, i.operands[1], l));
        };
    } else {
        i.execute = per_lane([](const Instruction &i, u64 *x) {
            return zero_extended(~x[0], i.type);
        });
    }
}

// Shifts by the width or more give 0, or the sign.
u64 shifted_left(const Instruction &i, u64 *x) {
    u64 by = (u32)x[1];
    return by >= bits_of(i.type) ? 0 : zero_extended(x[0] << by, i.type);
}
u64 shifted_right(const Instruction &i, u64 *x) {
    u64 by = (u32)x[1], bits = bits_of(i.type);
    if (is_signed(i.type))
        return zero_extended(sign_extended(x[0], i.type) >> std::min(by, bits - 1), i.type);
    return by >= bits ? 0 : zero_extended(x[0], i.type) >> by;
}

// shf: a window of 32 bits over two registers.
u64 funnel(const Instruction &i, u64 *x) {
    u64 both = x[1] << 32 | (u32)x[0];
    u32 by = i.has("wrap") ? x[2] & 31 : std::min<u64>((u32)x[2], 32);
    return i.has("r") ? (u32)(both >> by) : (u32)(both << by >> 32);
}

u64 field_of(const Instruction &i, u64 *x) { // bfe
    u32 bits = bits_of(i.type), from = x[1] & 255, length = x[2] & 255;
    u64 v = zero_extended(x[0], i.type), ones = ~0ull;
    if (!length) return 0;
    u64 field = from < bits ? v >> from : 0;
    if (length < 64) field &= (1ull << length) - 1;
    u32 sign = std::min(from + length - 1, bits - 1);
    u32 have = from < bits ? std::min(length, bits - from) : 0;
    if (is_signed(i.type) && v >> sign & 1 && have < bits) field |= ones << have;
    return zero_extended(field, i.type);
}
u64 with_field(const Instruction &i, u64 *x) { // bfi
    u32 bits = bits_of(i.type), from = x[2] & 255, length = x[3] & 255;
    u64 into = x[1];
    for (u32 n = 0; n < length && from + n < bits; n++) {
        u64 at = 1ull << (from + n);
        into = x[0] >> n & 1 ? into | at : into & ~at;
    }
    return into;
}

u64 permuted(const Instruction &, u64 *x) { // prmt: four bytes of eight; bit 3: the byte's sign
    u64 bytes = x[1] << 32 | (u32)x[0];
    u32 result = 0;
    for (int n = 0; n < 4; n++) {
        u32 pick = x[2] >> (4 * n) & 15, byte = bytes >> (8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * n);
    }
    return result;
}

u64 by_table(const Instruction &, u64 *x) { // lop3: bit 4a + 2b + c of the table
    u32 result = 0;
    for (int n = 0; n < 8; n++) {
        if (!(x[3] >> n & 1)) continue;
        u32 a = n & 4 ? x[0] : ~x[0], b = n & 2 ? x[1] : ~x[1], c = n & 1 ? x[2] : ~x[2];
        result |= a & b & c;
    }
    return result;
}

u64 highest(const Instruction &i, u64 *x) { // bfind
    u64 v = is_signed(i.type) && sign_extended(x[0], i.type) < 0 ? ~x[0] : x[0];
    v = zero_extended(v, i.type);
    if (!v) return ~0u;
    u32 at = 63 - __builtin_clzll(v);
    return i.has("shiftamt") ? bits_of(i.type) - 1 - at : at;
}

u64 reversed(const Instruction &i, u64 *x) {
    u64 result = 0;
    for (u32 n = 0; n < bits_of(i.type); n++) result = result << 1 | (x[0] >> n & 1);
    return result;
}

u64 leading_zeros(const Instruction &i, u64 *x) {
    u64 v = zero_extended(x[0], i.type);
    return v ? __builtin_clzll(v) - (64 - bits_of(i.type)) : bits_of(i.type);
}

template <u64 F(const Instruction &, u64 *)> void bind_bits(Instruction &i) {
    i.execute = per_lane([](const Instruction &i, u64 *x) { return F(i, x); });
}

} // namespace

void add_bits(Binders &all) {
    all["and"] = [](Instruction &i) { bind_logic(i, [](auto a, auto b) { return a & b; }); };
    all["or"] = [](Instruction &i) { bind_logic(i, [](auto a, auto b) { return a | b; }); };
    all["xor"] = [](Instruction &i) { bind_logic(i, [](auto a, auto b) { return a ^ b; }); };
    all["not"] = bind_not;
    all["shl"] = bind_bits<shifted_left>;
    all["shr"] = bind_bits<shifted_right>;
    all["shf"] = bind_bits<funnel>;
    all["bfe"] = bind_bits<field_of>;
    all["bfi"] = bind_bits<with_field>;
    all["lop3"] = bind_bits<by_table>;
    all["bfind"] = bind_bits<highest>;
    all["brev"] = bind_bits<reversed>;
    all["clz"] = bind_bits<leading_zeros>;
    all["prmt"] = [](Instruction &i) {
        if (i.modifiers.size() != 1) throw Unsupported{"mode"};
        bind_bits<permuted>(i);
    };
    all["popc"] = [](Instruction &i) {
        i.execute = per_lane([](const Instruction &i, u64 *x) {
            return (u64)__builtin_popcountll(zero_extended(x[0], i.type));
        });
    };
}

} // namespace ptx
