// What the lanes of a warp do together: shuffles, votes, reductions.
#include "machine.h"

namespace ptx {

namespace {

enum Shuffle { Up, Down, Butterfly, Index };

void shuffle(Warp &w, const Instruction &i, u32 lanes) {
    u32 from[32], result[32];
    bool found[32];
    for (int l = 0; l < 32; l++) from[l] = get(w, i.operands[1], l);
    EACH_LANE(l, lanes) {
        // The third operand: the last lane of a part, and in bits 8 to 12 which bits name the part.
        u32 by = get(w, i.operands[2], l) & 31, c = get(w, i.operands[3], l);
        int last = c & 31, part = c >> 8 & 31, j;
        int limit = (l & part) | (last & ~part);
        switch (i.variant) {
        case Up: j = l - (int)by; found[l] = j >= limit; break;
        case Down: j = l + by; found[l] = j <= limit; break;
        case Butterfly: j = l ^ by; found[l] = j <= limit; break;
        default: j = (l & part) | ((int)by & ~part); found[l] = j <= limit;
        }
        result[l] = from[found[l] ? j : l];
    }
    EACH_LANE(l, lanes) {
        set(w, i.data[0], l, result[l]);
        if (i.data.size() > 1) set(w, i.data[1], l, found[l]);
    }
}

void vote(Warp &w, const Instruction &i, u32 lanes) {
    u32 yes = 0;
    EACH_LANE(l, lanes) yes |= (u32)get_predicate(w, i.operands[1], l) << l;
    u32 results[] = {yes, yes != 0, yes == lanes, yes == lanes || !yes};
    EACH_LANE(l, lanes) set(w, i.operands[0], l, results[i.variant]);
}

const std::initializer_list<const char *> REDUCTIONS = {"add", "min", "max", "and", "or", "xor"};

void reduce(Warp &w, const Instruction &i, u32 lanes) {
    std::string operation = *(REDUCTIONS.begin() + i.variant);
    int first = __builtin_ctz(lanes);
    u64 all = get(w, i.operands[1], first);
    EACH_LANE(l, lanes)
        if (l != first) all = combine(i.type, operation, all, get(w, i.operands[1], l), 0);
    EACH_LANE(l, lanes) set(w, i.operands[0], l, all);
}

void elect(Warp &w, const Instruction &i, u32 lanes) {
    int leader = __builtin_ctz(lanes);
    EACH_LANE(l, lanes) {
        set(w, i.data[0], l, leader);
        if (i.data.size() > 1) set(w, i.data[1], l, l == leader);
    }
}

void match(Warp &w, const Instruction &i, u32 lanes) {
    u32 result[32] = {};
    EACH_LANE(l, lanes)
        EACH_LANE(j, lanes)
            if (get(w, i.operands[1], j) == get(w, i.operands[1], l)) result[l] |= 1u << j;
    EACH_LANE(l, lanes) set(w, i.data[0], l, result[l]);
}

void bind_together(Instruction &i, Execute execute, int mask_operand, int variant) {
    if (variant < 0) throw Unsupported{"kind"};
    i.control = Control::Together;
    i.execute = execute;
    i.mask_operand = mask_operand;
    i.variant = variant;
}

} // namespace

void add_together(Binders &all) {
    all["shfl"] = [](Instruction &i) {
        bind_together(i, shuffle, 4, variant_of(i, {"up", "down", "bfly", "idx"}));
    };
    all["vote"] = [](Instruction &i) {
        bind_together(i, vote, 2, variant_of(i, {"ballot", "any", "all", "uni"}));
    };
    all["redux"] = [](Instruction &i) {
        bind_together(i, reduce, 2, variant_of(i, REDUCTIONS));
    };
    all["elect"] = [](Instruction &i) { bind_together(i, elect, 1, 0); };
    all["match"] = [](Instruction &i) {
        bind_together(i, match, 2, variant_of(i, {"any"}));
    };
    all["activemask"] = [](Instruction &i) {
        i.execute = [](Warp &w, const Instruction &i, u32 lanes) {
            EACH_LANE(l, lanes) set(w, i.operands[0], l, lanes);
        };
    };
}

} // namespace ptx
