// Which code executes an instruction, and the registers that are not variables.
#include "machine.h"
#include "parser.h"

namespace ptx {

static void flow(Binders &all) {
    all["bra"] = [](Instruction &i) { i.control = Control::Branch; };
    all["ret"] = all["exit"] = [](Instruction &i) { i.control = Control::Exit; };
    all["bar"] = all["barrier"] = [](Instruction &i) {
        i.execute = nothing();
        if (i.has("cluster")) return; // a cluster is one block
        if (i.has("warp")) {
            i.control = Control::Together;
            i.mask_operand = 0;
        } else if (i.has("sync")) {
            i.control = Control::Barrier;
        } else {
            throw Unsupported{"barrier without sync"};
        }
    };
    all["trap"] = all["brkpt"] = [](Instruction &i) {
        i.execute = [](Warp &, const Instruction &, u32) { throw Fault{"trap"}; };
    };
    // Blocks run one after the other and memory is in order: there is nothing to do.
    for (auto name : {"membar", "fence", "griddepcontrol", "nanosleep", "prefetch", "prefetchu",
                      "setmaxnreg", "discard", "applypriority"})
        all[name] = [](Instruction &i) { i.execute = nothing(); };
}

void bind(Instruction &i) {
    static const Binders all = [] {
        Binders all;
        flow(all);
        add_arithmetic(all);
        add_functions(all);
        add_bits(all);
        add_conversions(all);
        add_memory(all);
        add_together(all);
        add_tensor_cores(all);
        add_async_copies(all);
        return all;
    }();
    auto binder = all.find(i.opcode);
    if (binder == all.end()) throw Unsupported{"not implemented"};
    for (auto m = i.modifiers.rbegin(); m != i.modifiers.rend() && i.type == NONE; ++m)
        i.type = type_of(*m);
    if (!i.operands.empty()) {
        const Operand &first = i.operands[0];
        i.data = first.kind == Operand::Vector ? first.parts : std::vector<Operand>{first};
    }
    i.space = space_of(i);
    binder->second(i);
}

Type nth_type(const Instruction &i, int n) {
    for (auto &m : i.modifiers) {
        Type t = type_of(m);
        if (t != NONE && n-- == 0) return t;
    }
    return NONE;
}

// Which of the names is a modifier: the first's number, or -1.
int variant_of(const Instruction &i, std::initializer_list<const char *> names) {
    int n = 0;
    for (auto name : names) {
        if (i.has(name)) return n;
        n++;
    }
    return -1;
}

static u32 lane(u32 thread) { return thread % 32; }

SpecialValue special_register(const std::string &name) {
    using B = const Block &;
    static const std::map<std::string, SpecialValue> all = {
        {"%tid.x", [](B b, u32 t) { return t % b.threads.x; }},
        {"%tid.y", [](B b, u32 t) { return t / b.threads.x % b.threads.y; }},
        {"%tid.z", [](B b, u32 t) { return t / b.threads.x / b.threads.y; }},
        {"%ntid.x", [](B b, u32) { return b.threads.x; }},
        {"%ntid.y", [](B b, u32) { return b.threads.y; }},
        {"%ntid.z", [](B b, u32) { return b.threads.z; }},
        {"%ctaid.x", [](B b, u32) { return b.at.x; }},
        {"%ctaid.y", [](B b, u32) { return b.at.y; }},
        {"%ctaid.z", [](B b, u32) { return b.at.z; }},
        {"%nctaid.x", [](B b, u32) { return b.grid.x; }},
        {"%nctaid.y", [](B b, u32) { return b.grid.y; }},
        {"%nctaid.z", [](B b, u32) { return b.grid.z; }},
        {"%laneid", [](B, u32 t) { return lane(t); }},
        {"%warpid", [](B, u32 t) { return t / 32; }},
        {"%nwarpid", [](B b, u32) { return (u32)b.warps.size(); }},
        {"%lanemask_eq", [](B, u32 t) { return 1u << lane(t); }},
        {"%lanemask_lt", [](B, u32 t) { return (1u << lane(t)) - 1; }},
        {"%lanemask_le", [](B, u32 t) { return (u32)((2ull << lane(t)) - 1); }},
        {"%lanemask_gt", [](B, u32 t) { return ~(u32)((2ull << lane(t)) - 1); }},
        {"%lanemask_ge", [](B, u32 t) { return ~((1u << lane(t)) - 1); }},
        {"%dynamic_smem_size", [](B b, u32) { return (u32)b.dynamic_shared; }},
        {"%total_smem_size",
         [](B b, u32) { return (u32)(b.kernel->shared_bytes + b.dynamic_shared); }},
        // A cluster is one block.
        {"%cluster_ctarank", [](B, u32) { return 0u; }},
        {"%cluster_ctaid.x", [](B, u32) { return 0u; }},
        {"%cluster_ctaid.y", [](B, u32) { return 0u; }},
        {"%cluster_ctaid.z", [](B, u32) { return 0u; }},
        {"%cluster_nctaid.x", [](B, u32) { return 1u; }},
        {"%cluster_nctaid.y", [](B, u32) { return 1u; }},
        {"%cluster_nctaid.z", [](B, u32) { return 1u; }},
        {"%cluster_nctarank", [](B, u32) { return 1u; }},
        {"%clusterid.x", [](B b, u32) { return b.at.x; }},
        {"%clusterid.y", [](B b, u32) { return b.at.y; }},
        {"%clusterid.z", [](B b, u32) { return b.at.z; }},
        {"%nclusterid.x", [](B b, u32) { return b.grid.x; }},
        {"%smid", [](B, u32) { return 0u; }},
        {"%clock", [](B, u32) { return 0u; }},
    };
    auto found = all.find(name);
    return found == all.end() ? nullptr : found->second;
}

} // namespace ptx
