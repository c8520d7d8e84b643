// Roots, logarithms and what else has a unit of its own. A GPU's approximations differ from these
// in the last bits.
#include <cmath>

#include "machine.h"

namespace ptx {

template <class F> static void bind_function(Instruction &i, F f) {
    if (i.type == F32) i.execute = unary<float>(f);
    else if (i.type == F64) i.execute = unary<double>(f);
    else throw Unsupported{"type"};
}

void add_functions(Binders &all) {
    all["lg2"] = [](Instruction &i) { bind_function(i, [](auto a) { return std::log2(a); }); };
    all["sin"] = [](Instruction &i) { bind_function(i, [](auto a) { return std::sin(a); }); };
    all["cos"] = [](Instruction &i) { bind_function(i, [](auto a) { return std::cos(a); }); };
    all["sqrt"] = [](Instruction &i) { bind_function(i, [](auto a) { return std::sqrt(a); }); };
    all["rcp"] = [](Instruction &i) { bind_function(i, [](auto a) { return 1 / a; }); };
    all["rsqrt"] = [](Instruction &i) {
        bind_function(i, [](auto a) { return 1 / std::sqrt(a); });
    };
    all["copysign"] = [](Instruction &i) {
        if (i.type == F64)
            i.execute = binary<double>([](double a, double b) { return std::copysign(b, a); });
        else i.execute = binary<float>([](float a, float b) { return std::copysign(b, a); });
    };
    all["testp"] = [](Instruction &i) {
        i.variant = variant_of(i, {"finite", "infinite", "number", "notanumber", "normal"});
        if (i.variant < 0) throw Unsupported{"test"};
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) {
                double x = get_number(w, i.operands[1], l, i.type);
                bool normal = i.type == F32 ? std::isnormal((float)x) : std::isnormal(x);
                bool results[] = {std::isfinite(x), std::isinf(x), !std::isnan(x),
                                  std::isnan(x), normal};
                set(w, i.operands[0], l, results[i.variant]);
            }
        };
    };
}

} // namespace ptx
