// Operands, instructions and calls.
#include <algorithm>

#include "parser.h"

namespace ptx {

// 32 lanes of a register lie side by side, so that loops over them become vector instructions.
Operand Parser::new_register(int bytes) {
    Operand o;
    o.kind = Operand::Register;
    o.width = bytes;
    u32 size = bytes * 32;
    kernel->register_bytes = (kernel->register_bytes + size - 1) / size * size;
    o.offset = kernel->register_bytes;
    kernel->register_bytes += size;
    return o;
}

Operand Parser::constant(u64 value) {
    Operand o;
    o.kind = Operand::Constant;
    o.width = 8;
    o.value = (s64)value;
    auto found = constants.find(value);
    if (found == constants.end()) {
        int offset = kernel->pool.size();
        kernel->pool.resize(offset + 512);
        for (int lane = 0; lane < 32; lane++)
            memcpy(&kernel->pool[offset + 8 * lane], &value, 8);
        for (int lane = 0; lane < 64; lane++)
            memcpy(&kernel->pool[offset + 256 + 4 * lane], &value, 4);
        found = constants.emplace(value, offset).first;
    }
    o.offset = found->second;
    return o;
}

const Operand *Parser::find_register(const std::string &name) const {
    for (int s = scope; s >= 0; s = scopes[s].parent) {
        auto found = scopes[s].registers.find(name);
        if (found != scopes[s].registers.end()) return &found->second;
    }
    return nullptr;
}

const Symbol *Parser::find_symbol(const std::string &name) const {
    for (int s = scope; s >= 0; s = scopes[s].parent) {
        auto found = scopes[s].symbols.find(name);
        if (found != scopes[s].symbols.end()) return &found->second;
    }
    auto common = shared.find(name);
    if (common != shared.end()) return &common->second;
    auto global = module.globals.find(name);
    return global == module.globals.end() ? nullptr : &global->second;
}

Operand Parser::special(const std::string &name) {
    if (name == "%clock64" || name == "%globaltimer") return constant(0);
    auto found = specials.find(name);
    if (found != specials.end()) return found->second;
    SpecialValue value = special_register(name);
    if (!value) throw Unsupported{"register " + name};
    Operand o = new_register(4);
    kernel->specials.push_back({o.offset, value});
    return specials[name] = o;
}

// A register, a number or a name.
Operand Parser::value() {
    bool inverted = scan.accept('!'), negative = scan.accept('-');
    if (scan.next_is_float()) return constant(scan.float_as_bits());
    if (isdigit((u8)*scan.at)) {
        u64 v = scan.number();
        return constant(negative ? -v : v);
    }
    std::string name = scan.word();
    Operand o;
    if (name == "_") {
        o.kind = Operand::Sink;
        return o;
    }
    if (const Operand *r = find_register(name)) {
        o = *r;
        o.inverted = inverted;
        return o;
    }
    if (name[0] == '%') return special(name);
    if (name == "WARP_SZ") return constant(32);
    if (const Symbol *s = find_symbol(name)) {
        o = constant(s->at);
        o.space = s->space;
        o.parameter = s->parameter;
        o.name = name;
        return o;
    }
    o.kind = Operand::Name;
    o.name = name;
    return o;
}

// [%rd1+8], [variable], [map, {x, y}], [map, {x, y}, barrier]
Operand Parser::memory_operand() {
    Operand o, base = value();
    o.kind = Operand::Memory;
    if (base.kind == Operand::Constant) {
        o.value = base.value;
        o.space = base.space;
        o.parameter = base.parameter;
        base = Operand();
    }
    o.parts.push_back(base);
    while (scan.next_is('+') || scan.next_is('-')) {
        bool negative = *scan.at++ == '-';
        if (scan.accept('-')) negative = !negative;
        s64 by = scan.number();
        o.value += negative ? -by : by;
    }
    while (scan.accept(',')) o.parts.push_back(operand());
    if (!scan.accept(']')) throw Unsupported{"address"};
    return o;
}

Operand Parser::operand() {
    Operand o;
    if (scan.accept('{')) {
        o.kind = Operand::Vector;
        while (!scan.accept('}')) {
            if (!*scan.at) throw Unsupported{"vector"};
            o.parts.push_back(value());
            scan.accept(',');
        }
        return o;
    }
    if (scan.accept('[')) return memory_operand();
    o = value();
    if (scan.accept('|')) { // %p|%q: two results
        Operand pair;
        pair.kind = Operand::Vector;
        pair.parts = {o, value()};
        return pair;
    }
    return o;
}

void Parser::instruction() {
    Instruction i;
    const char *end = strchr(scan.at, ';');
    i.text = std::string(scan.at, end ? end - scan.at : strlen(scan.at));
    for (char &c : i.text) if (isspace((u8)c)) c = ' ';
    try {
        read_instruction(i);
    } catch (Unsupported &u) {
        scan.at = end ? end + 1 : scan.at + strlen(scan.at);
        i.text += " (" + u.what + ")";
        kernel->unsupported.push_back(i.text);
        i.control = Control::Plain;
        i.execute = [](Warp &, const Instruction &i, u32) { throw Unsupported{i.text}; };
        kernel->code.push_back(i);
    }
}

void Parser::read_instruction(Instruction &i) {
    if (scan.accept('@')) {
        i.predicate_inverted = scan.accept('!');
        std::string name = scan.identifier();
        const Operand *r = find_register(name);
        if (!r) throw Unsupported{"predicate " + name};
        i.predicate = r->offset;
    }
    std::string word = scan.word();
    for (size_t start = 0; start <= word.size();) {
        size_t dot = std::min(word.find('.', start), word.size());
        std::string part = word.substr(start, dot - start);
        if (!start) i.opcode = part; else i.modifiers.push_back(part);
        start = dot + 1;
    }
    if (i.opcode == "call") return call(i);
    while (!scan.accept(';')) {
        if (!*scan.at) throw Unsupported{"end"};
        i.operands.push_back(operand());
        if (!scan.accept(',') && !scan.next_is(';')) throw Unsupported{"syntax"};
    }
    if (i.opcode == "ret" && !return_label.empty()) {
        return emit_branch(return_label, i.predicate, i.predicate_inverted);
    }
    if (i.opcode == "bra")
        jumps.push_back({(int)kernel->code.size(), i.operands.at(0).name, scope});
    bind(i);
    kernel->code.push_back(i);
}

void Parser::emit_branch(const std::string &label, int predicate, bool inverted) {
    Instruction i;
    i.text = "bra " + label;
    i.opcode = "bra";
    i.predicate = predicate;
    i.predicate_inverted = inverted;
    jumps.push_back({(int)kernel->code.size(), label, scope});
    bind(i);
    kernel->code.push_back(i);
}

void Parser::move(const Operand &to, const Operand &from) {
    Instruction i;
    i.text = i.opcode = "mov";
    i.modifiers = {to.width == 8 ? "b64" : "b32"};
    i.operands = {to, from};
    bind(i);
    kernel->code.push_back(i);
}

// call.uni (result, ...), function, (argument, ...);  of which only the function must be there.
void Parser::call(Instruction &i) {
    std::vector<Operand> results = call_list();
    if (!results.empty()) scan.accept(',');
    std::string function = scan.identifier();
    std::vector<Operand> arguments;
    if (scan.accept(',')) arguments = call_list();
    if (!scan.accept(';')) throw Unsupported{"a call by address"};
    if (!functions.count(function)) throw Unsupported{"no body of " + function};
    for (auto &active : calls) if (active == function) throw Unsupported{"recursion"};
    if (i.predicate < 0) return put_in(function, results, arguments);
    std::string around = "$around" + std::to_string(kernel->code.size());
    emit_branch(around, i.predicate, !i.predicate_inverted);
    put_in(function, results, arguments);
    scopes[scope].labels[around] = kernel->code.size();
}

std::vector<Operand> Parser::call_list() {
    std::vector<Operand> all;
    if (!scan.accept('(')) return all;
    while (!scan.accept(')')) {
        all.push_back(value());
        if (!scan.accept(',') && !scan.next_is(')')) throw Unsupported{"call"};
    }
    return all;
}

void Parser::put_in(const std::string &function, const std::vector<Operand> &results,
                    const std::vector<Operand> &arguments) {
    const char *back = scan.at;
    int caller = scope;
    std::string outer_return = return_label;
    scopes.push_back(Scope{{}, {}, {}, -1});
    scope = scopes.size() - 1;
    int own = scope;
    calls.push_back(function);
    scan.at = functions[function];
    // Also when something in it turns out not to be supported.
    struct Leave {
        Parser &p; const char *back; int caller; std::string outer;
        ~Leave() {
            p.scope = caller;
            p.return_label = outer;
            p.calls.pop_back();
            p.scan.at = back;
        }
    } leave{*this, back, caller, outer_return};
    std::vector<std::pair<Operand, Operand>> after; // results in registers
    auto bind_all = [&](const std::vector<Operand> &actual, bool result) {
        std::vector<Declared> formal = parameters();
        if (formal.size() != actual.size()) throw Unsupported{"arguments of " + function};
        for (size_t n = 0; n < formal.size(); n++) {
            const Declared &f = formal[n];
            const Operand &a = actual[n];
            if (!f.in_register) { // the caller's memory under another name
                u64 size = f.count * size_of(f.type);
                if (a.space != Space::Local) throw Unsupported{"argument " + f.name};
                scopes[own].symbols[f.name] = Symbol{Space::Local, (u64)a.value, size, true};
                continue;
            }
            Operand r = new_register(std::max(4, size_of(f.type)));
            scopes[own].registers[f.name] = r;
            if (result) after.push_back({a, r}); else move(r, a);
        }
    };
    bind_all(results, true);
    scan.identifier();
    bind_all(arguments, false);
    scan.past('{');
    return_label = "$return" + std::to_string(scopes.size());
    std::string own_return = return_label;
    body();
    scopes[own].labels[own_return] = kernel->code.size();
    for (auto &[to, from] : after) move(to, from);
}

} // namespace ptx
