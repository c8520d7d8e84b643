// mov, cvt, comparisons and choices.
#include <cmath>

#include "machine.h"

namespace ptx {

double get_number(Warp &w, const Operand &o, int lane, Type t) {
    u64 v = get(w, o, lane);
    switch (t) {
    case F32: case TF32: return to_float((u32)v);
    case F64: return to_double(v);
    case F16: return from_f16(v);
    case BF16: return from_bf16(v);
    default: return is_signed(t) ? (double)sign_extended(v, t) : (double)zero_extended(v, t);
    }
}

namespace {

// --- mov ------------------------------------------------------------------------------------

void pack(Warp &w, const Instruction &i, u32 lanes) { // mov.b64 %rd, {%r0, %r1}
    auto &parts = i.operands[1].parts;
    u32 bits = bits_of(i.type) / parts.size();
    EACH_LANE(l, lanes) {
        u64 v = 0;
        for (size_t n = 0; n < parts.size(); n++)
            v |= (get(w, parts[n], l) & (~0ull >> (64 - bits))) << (n * bits);
        set(w, i.operands[0], l, v);
    }
}

void unpack(Warp &w, const Instruction &i, u32 lanes) {
    u32 bits = bits_of(i.type) / i.data.size();
    EACH_LANE(l, lanes) {
        u64 v = get(w, i.operands[1], l);
        for (size_t n = 0; n < i.data.size(); n++)
            set(w, i.data[n], l, v >> (n * bits) & (~0ull >> (64 - bits)));
    }
}

void bind_move(Instruction &i) {
    const Operand &to = i.operands[0], &from = i.operands[1];
    if (from.kind == Operand::Name) throw Unsupported{"address of " + from.name};
    if (from.parameter && from.space == Space::Local) throw Unsupported{"parameter's address"};
    bool same = from.kind == Operand::Constant || from.width == to.width;
    if (from.kind == Operand::Vector && to.kind == Operand::Vector) {
        throw Unsupported{"vector to vector"};
    } else if (from.kind == Operand::Vector) {
        i.execute = pack;
    } else if (to.kind == Operand::Vector) {
        i.execute = unpack;
    } else if (i.type == PRED) {
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) set(w, i.operands[0], l, get_predicate(w, i.operands[1], l));
        };
    } else if (same && to.width == 8) {
        i.execute = unary<u64>([](u64 a) { return a; });
    } else if (same) {
        i.execute = unary<u32>([](u32 a) { return a; });
    } else {
        i.execute = per_lane([](const Instruction &, u64 *x) { return x[0]; });
    }
}

// --- cvt ------------------------------------------------------------------------------------

enum Rounding { Keep, Nearest, Zero, Down, Up }; // variant of a cvt: to a whole number

double rounded(double x, int to) {
    switch (to) {
    case Nearest: return std::nearbyint(x);
    case Zero: return std::trunc(x);
    case Down: return std::floor(x);
    case Up: return std::ceil(x);
    default: return x;
    }
}

u64 float_to_float(const Instruction &i, double x) {
    x = rounded(x, i.variant);
    if (i.has("relu")) x = x > 0 ? x : 0;
    if (i.has("sat")) x = x > 0 ? (x < 1 ? x : 1) : 0;
    switch (i.type) {
    case F32: return float_bits((float)x);
    case F64: return double_bits(x);
    case F16: return to_f16((float)x);
    default: return i.has("rz") ? to_bf16_towards_zero((float)x) : to_bf16((float)x);
    }
}

// What does not fit becomes the nearest that does; a NaN becomes 0.
u64 float_to_whole(const Instruction &i, double x) {
    x = rounded(x, i.variant == Keep ? Zero : i.variant);
    int bits = bits_of(i.type);
    if (std::isnan(x)) return 0;
    if (is_signed(i.type)) {
        double limit = std::ldexp(1, bits - 1);
        s64 most = (s64)(~0ull >> (65 - bits));
        return x <= -limit ? (u64)(-most - 1) : x >= limit ? (u64)most : (u64)(s64)x;
    }
    return x <= 0 ? 0 : x >= std::ldexp(1, bits) ? ~0ull >> (64 - bits) : (u64)x;
}

template <class X> u64 whole_to_float(Type t, X x) {
    switch (t) {
    case F32: return float_bits((float)x);
    case F64: return double_bits((double)x);
    case F16: return to_f16((float)x);
    default: return to_bf16((float)x);
    }
}

u64 whole_to_whole(const Instruction &i, u64 v) {
    s64 x = is_signed(i.other) ? sign_extended(v, i.other) : (s64)zero_extended(v, i.other);
    if (i.has("sat")) {
        if (!is_signed(i.type) || size_of(i.type) == 8) throw Unsupported{i.text};
        s64 most = (s64)(~0ull >> (65 - bits_of(i.type)));
        x = x < -most - 1 ? -most - 1 : x > most ? most : x;
    }
    return is_signed(i.type) ? (u64)sign_extended((u64)x, i.type) : zero_extended(x, i.type);
}

u64 to_tf32(const Instruction &i, u32 bits) {
    return (i.has("rz") ? bits : bits + 0x1000) & 0xffffe000;
}

void convert(Warp &w, const Instruction &i, u32 lanes) {
    EACH_LANE(l, lanes) {
        u64 v = get(w, i.operands[1], l), out;
        if (i.type == TF32) {
            out = to_tf32(i, v);
        } else if (is_float(i.other)) {
            double x = get_number(w, i.operands[1], l, i.other);
            out = is_float(i.type) ? float_to_float(i, x) : float_to_whole(i, x);
        } else if (!is_float(i.type)) {
            out = whole_to_whole(i, v);
        } else if (is_signed(i.other)) {
            out = whole_to_float(i.type, sign_extended(v, i.other));
        } else {
            out = whole_to_float(i.type, zero_extended(v, i.other));
        }
        set(w, i.operands[0], l, is_signed(i.type) ? out : zero_extended(out, i.type));
    }
}

void convert_pair(Warp &w, const Instruction &i, u32 lanes) { // the first is the upper half
    bool zero = i.has("rz"), relu = i.has("relu");
    auto half = [&](float x) -> u32 {
        if (relu) x = x > 0 ? x : 0;
        if (i.type == F16X2) return to_f16(x);
        return zero ? to_bf16_towards_zero(x) : to_bf16(x);
    };
    EACH_LANE(l, lanes) {
        u32 upper = half(to_float(get(w, i.operands[1], l)));
        set(w, i.operands[0], l, upper << 16 | half(to_float(get(w, i.operands[2], l))));
    }
}

void bind_convert(Instruction &i) {
    i.type = nth_type(i, 0);
    i.other = nth_type(i, 1);
    if (i.other == NONE) throw Unsupported{"types"};
    i.variant = variant_of(i, {"", "rni", "rzi", "rmi", "rpi"});
    if (i.variant < 0) i.variant = Keep;
    bool plain = !i.has("relu") && !i.has("sat");
    if (is_pair(i.type)) {
        if (i.operands.size() != 3) throw Unsupported{"pair"};
        i.execute = convert_pair;
    } else if (i.type == F32 && i.other == BF16 && plain) {
        i.execute = unary<u32>([](u32 a) { return a << 16; });
    } else if (i.type == BF16 && i.other == F32 && plain && i.has("rn")) {
        i.execute = unary<u32>([](u32 a) { return (u32)to_bf16(to_float(a)); });
    } else {
        i.execute = convert;
    }
}

// --- Comparisons ----------------------------------------------------------------------------

enum Comparison { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_, LO, LS, HI, HS };

int comparison_of(const Instruction &i) {
    int c = variant_of(i, {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu",
                           "geu", "num", "nan", "lo", "ls", "hi", "hs"});
    if (c < 0) throw Unsupported{"comparison"};
    return c;
}

// Those with U are also true where one is a NaN, which only a float can be.
template <class X> bool compare(int c, X x, X y) {
    bool nan = x != x || y != y;
    switch (c) {
    case EQ: return x == y;
    case NE: return !nan && x != y;
    case LT: case LO: return x < y;
    case LE: case LS: return x <= y;
    case GT: case HI: return x > y;
    case GE: case HS: return x >= y;
    case EQU: return nan || x == y;
    case NEU: return nan || x != y;
    case LTU: return nan || x < y;
    case LEU: return nan || x <= y;
    case GTU: return nan || x > y;
    case GEU: return nan || x >= y;
    case NUM: return !nan;
    default: return nan;
    }
}

bool compare_bits(int c, Type t, u64 a, u64 b) {
    switch (t) {
    case F32: return compare(c, to_float(a), to_float(b));
    case F64: return compare(c, to_double(a), to_double(b));
    case F16: return compare(c, from_f16(a), from_f16(b));
    case BF16: return compare(c, from_bf16(a), from_bf16(b));
    default: break;
    }
    if (is_signed(t)) return compare(c, sign_extended(a, t), sign_extended(b, t));
    return compare(c, zero_extended(a, t), zero_extended(b, t));
}

void set_predicate(Warp &w, const Instruction &i, u32 lanes) {
    EACH_LANE(l, lanes) {
        bool yes = compare_bits(i.variant, i.type, get(w, i.operands[1], l),
                                get(w, i.operands[2], l));
        bool no = !yes;
        if (i.count >= 0) {
            bool with = get_predicate(w, i.operands[3], l);
            auto join = [&](bool x) {
                return i.count == 0 ? x && with : i.count == 1 ? x || with : x != with;
            };
            yes = join(yes);
            no = join(no);
        }
        set(w, i.data[0], l, yes);
        if (i.data.size() > 1) set(w, i.data[1], l, no);
    }
}

void set_value(Warp &w, const Instruction &i, u32 lanes) { // type: the result's, other: compared
    EACH_LANE(l, lanes) {
        bool yes = compare_bits(i.variant, i.other, get(w, i.operands[1], l),
                                get(w, i.operands[2], l));
        u64 one = is_float(i.type) ? whole_to_float(i.type, 1) : ~0ull;
        set(w, i.operands[0], l, yes ? zero_extended(one, i.type) : 0);
    }
}

void bind_set_predicate(Instruction &i) {
    i.variant = comparison_of(i);
    i.count = variant_of(i, {"and", "or", "xor"});
    if (is_pair(i.type)) throw Unsupported{"pairs"};
    i.execute = set_predicate;
}

void bind_set(Instruction &i) {
    i.variant = comparison_of(i);
    i.type = nth_type(i, 0);
    i.other = nth_type(i, 1);
    if (i.operands.size() > 3 || is_pair(i.other)) throw Unsupported{"pairs or a third operand"};
    i.execute = set_value;
}

void choose_by_sign(Warp &w, const Instruction &i, u32 lanes) { // slct
    EACH_LANE(l, lanes) {
        u64 by = get(w, i.operands[3], l);
        bool first = i.type == F32 ? to_float(by) >= 0 : (s32)by >= 0;
        set(w, i.operands[0], l, get(w, i.operands[first ? 1 : 2], l));
    }
}

} // namespace

void add_conversions(Binders &all) {
    all["mov"] = bind_move;
    all["cvt"] = bind_convert;
    all["setp"] = bind_set_predicate;
    all["set"] = bind_set;
    all["selp"] = [](Instruction &i) {
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) {
                bool first = get_predicate(w, i.operands[3], l);
                set(w, i.operands[0], l, get(w, i.operands[first ? 1 : 2], l));
            }
        };
    };
    all["slct"] = [](Instruction &i) { i.execute = choose_by_sign; };
}

} // namespace ptx
