// add, sub, mul, mad, fma, div, rem, neg, abs, min, max.
#include <cmath>

#include "machine.h"

namespace ptx {

namespace {

// F of the fp32 values of halves, alone or in pairs; the result is rounded to the half's type.
template <class F> Execute halves(F) {
    return [](Warp &w, const Instruction &i, u32 lanes) {
        bool bf16 = is_bf16(i.type);
        EACH_LANE(l, lanes) {
            u32 x[3] = {};
            for (size_t n = 1; n < i.operands.size() && n < 4; n++)
                x[n - 1] = get(w, i.operands[n], l);
            u32 result = 0;
            for (int shift = 0; shift < (is_pair(i.type) ? 32 : 16); shift += 16) {
                float y = F{}(from_half(x[0] >> shift, bf16), from_half(x[1] >> shift, bf16),
                              from_half(x[2] >> shift, bf16));
                result |= (u32)to_half(y, bf16) << shift;
            }
            set(w, i.operands[0], l, result);
        }
    };
}

// The same function of two numbers for floats of any width, and of whole ones of the type's width.
template <class F> bool bind_floats(Instruction &i, F f) {
    if (is_half(i.type)) i.execute = halves([](float a, float b, float) { return F{}(a, b); });
    else if (i.type == F32) i.execute = binary<float>(f);
    else if (i.type == F64) i.execute = binary<double>(f);
    else return false;
    return true;
}
template <class F> void bind_whole(Instruction &i, F f) {
    if (size_of(i.type) == 8) {
        i.execute = binary<u64>(f);
    } else if (size_of(i.type) == 4) {
        i.execute = binary<u32>(f);
    } else {
        i.execute = per_lane([](const Instruction &i, u64 *x) {
            return zero_extended(F{}(x[0], x[1]), i.type);
        });
    }
}

u64 widened(u64 v, Type t) { return is_signed(t) ? (u64)sign_extended(v, t) : zero_extended(v, t); }

u64 high_product(u64 a, u64 b, Type t) {
    if (size_of(t) == 8)
        return is_signed(t) ? (u64)((__int128)(s64)a * (s64)b >> 64)
                            : (u64)((unsigned __int128)a * b >> 64);
    u64 product = widened(a, t) * widened(b, t);
    return is_signed(t) ? (u64)((s64)product >> bits_of(t)) : product >> bits_of(t);
}

void bind_multiply(Instruction &i) {
    if (bind_floats(i, [](auto a, auto b) { return a * b; })) return;
    if (i.has("wide")) {
        i.execute = per_lane([](const Instruction &i, u64 *x) {
            return widened(x[0], i.type) * widened(x[1], i.type);
        });
    } else if (i.has("hi")) {
        i.execute = per_lane([](const Instruction &i, u64 *x) {
            return zero_extended(high_product(x[0], x[1], i.type), i.type);
        });
    } else {
        bind_whole(i, [](auto a, auto b) { return a * b; });
    }
}

void bind_multiply_add(Instruction &i) {
    if (i.has("cc") || i.has("relu")) throw Unsupported{"carry or relu"};
    if (is_half(i.type)) {
        i.execute = halves([](float a, float b, float c) { return std::fma(a, b, c); });
    } else if (i.type == F32) {
        i.execute = ternary<float>([](float a, float b, float c) { return std::fma(a, b, c); });
    } else if (i.type == F64) {
        i.execute = ternary<double>([](double a, double b, double c) { return std::fma(a, b, c); });
    } else if (i.has("wide")) {
        i.execute = per_lane([](const Instruction &i, u64 *x) {
            return widened(x[0], i.type) * widened(x[1], i.type) + x[2];
        });
    } else if (i.has("hi")) {
        i.execute = per_lane([](const Instruction &i, u64 *x) {
            return zero_extended(high_product(x[0], x[1], i.type) + x[2], i.type);
        });
    } else if (size_of(i.type) == 8) {
        i.execute = ternary<u64>([](u64 a, u64 b, u64 c) { return a * b + c; });
    } else if (size_of(i.type) == 4) {
        i.execute = ternary<u32>([](u32 a, u32 b, u32 c) { return a * b + c; });
    } else {
        i.execute = per_lane([](const Instruction &i, u64 *x) {
            return zero_extended(x[0] * x[1] + x[2], i.type);
        });
    }
}

// Division by zero gives ones everywhere, and its remainder the dividend, as on a GPU.
u64 quotient(u64 a, u64 b, Type t) {
    if (!is_signed(t)) return b ? a / b : ~0ull;
    s64 x = (s64)a, y = (s64)b;
    return y == 0 ? ~0ull : y == -1 ? -a : (u64)(x / y);
}
u64 remainder(u64 a, u64 b, Type t) {
    if (!is_signed(t)) return b ? a % b : a;
    s64 x = (s64)a, y = (s64)b;
    return y == 0 ? a : y == -1 ? 0 : (u64)(x % y);
}

void bind_divide(Instruction &i) {
    if (bind_floats(i, [](auto a, auto b) { return a / b; })) return;
    i.execute = per_lane([](const Instruction &i, u64 *x) {
        Type t = i.type;
        return zero_extended(quotient(widened(x[0], t), widened(x[1], t), t), t);
    });
}

void bind_remainder(Instruction &i) {
    i.execute = per_lane([](const Instruction &i, u64 *x) {
        Type t = i.type;
        return zero_extended(remainder(widened(x[0], t), widened(x[1], t), t), t);
    });
}

// Of one number that is a NaN the other is taken; -0 is less than 0.
template <class X> X smaller(X a, X b) {
    if (a != a) return b;
    if (b != b) return a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class X> X larger(X a, X b) { return -smaller(-a, -b); }

template <bool MAX> void bind_extreme(Instruction &i) {
    if (i.operands.size() > 3 || i.has("relu")) throw Unsupported{"of three, or relu"};
    bool bound = i.has("NaN")
        ? bind_floats(i, [](auto a, auto b) {
              auto x = MAX ? larger(a, b) : smaller(a, b);
              return a != a || b != b ? decltype(x)(NAN) : x;
          })
        : bind_floats(i, [](auto a, auto b) { return MAX ? larger(a, b) : smaller(a, b); });
    if (bound) return;
    auto pick = [](auto a, auto b) { return (a < b) == MAX ? b : a; };
    switch (i.type) {
    case S32: i.execute = binary<s32>(pick); return;
    case S64: i.execute = binary<s64>(pick); return;
    case U32: i.execute = binary<u32>(pick); return;
    case U64: i.execute = binary<u64>(pick); return;
    default: break;
    }
    i.execute = per_lane([](const Instruction &i, u64 *x) {
        bool less = is_signed(i.type)
            ? sign_extended(x[0], i.type) < sign_extended(x[1], i.type)
            : zero_extended(x[0], i.type) < zero_extended(x[1], i.type);
        return less == MAX ? x[1] : x[0];
    });
}

void bind_negate(Instruction &i) {
    if (is_half(i.type)) i.execute = halves([](float a, float, float) { return -a; });
    else if (i.type == F32) i.execute = unary<u32>([](u32 a) { return a ^ 1u << 31; });
    else if (i.type == F64) i.execute = unary<u64>([](u64 a) { return a ^ 1ull << 63; });
    else i.execute = per_lane([](const Instruction &i, u64 *x) {
        return zero_extended(-x[0], i.type);
    });
}

void bind_absolute(Instruction &i) {
    if (is_half(i.type)) i.execute = halves([](float a, float, float) { return std::fabs(a); });
    else if (i.type == F32) i.execute = unary<u32>([](u32 a) { return a & ~(1u << 31); });
    else if (i.type == F64) i.execute = unary<u64>([](u64 a) { return a & ~(1ull << 63); });
    else i.execute = per_lane([](const Instruction &i, u64 *x) {
        s64 v = sign_extended(x[0], i.type);
        return zero_extended(v < 0 ? -(u64)v : (u64)v, i.type);
    });
}

template <class F> void bind_sum(Instruction &i, F f) {
    if (i.has("cc") || i.has("sat")) throw Unsupported{"carry or saturation"};
    if (!bind_floats(i, f)) bind_whole(i, f);
}

} // namespace

void add_arithmetic(Binders &all) {
    all["add"] = [](Instruction &i) { bind_sum(i, [](auto a, auto b) { return a + b; }); };
    all["sub"] = [](Instruction &i) { bind_sum(i, [](auto a, auto b) { return a - b; }); };
    all["mul"] = bind_multiply;
    all["mad"] = all["fma"] = bind_multiply_add;
    all["div"] = bind_divide;
    all["rem"] = bind_remainder;
    all["min"] = bind_extreme<false>;
    all["max"] = bind_extreme<true>;
    all["neg"] = bind_negate;
    all["abs"] = bind_absolute;
    all["ex2"] = [](Instruction &i) {
        if (is_half(i.type)) i.execute = halves([](float a, float, float) { return exp2f(a); });
        else i.execute = unary<float>([](float a) { return exp2f(a); });
    };
    all["tanh"] = [](Instruction &i) {
        if (is_half(i.type)) i.execute = halves([](float a, float, float) { return tanhf(a); });
        else i.execute = unary<float>([](float a) { return tanhf(a); });
    };
}

} // namespace ptx
