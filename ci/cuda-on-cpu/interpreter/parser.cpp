// Modules, kernels and declarations.
#include "parser.h"

#include <algorithm>
#include <set>

namespace ptx {

Type type_of(const std::string &name) {
    static const std::map<std::string, Type> types = {
        {"pred", PRED}, {"b8", B8}, {"u8", U8}, {"s8", S8}, {"b16", B16}, {"u16", U16},
        {"s16", S16}, {"f16", F16}, {"bf16", BF16}, {"b32", B32}, {"u32", U32}, {"s32", S32},
        {"f32", F32}, {"f16x2", F16X2}, {"bf16x2", BF16X2}, {"b64", B64}, {"u64", U64},
        {"s64", S64}, {"f64", F64}, {"b128", B128}, {"tf32", TF32},
    };
    auto found = types.find(name);
    return found == types.end() ? NONE : found->second;
}

static u64 aligned(u64 n, u64 to) { return (n + to - 1) / to * to; }

std::unique_ptr<Module> parse(const char *text) {
    auto module = std::make_unique<Module>();
    Parser(text, *module).run();
    return module;
}

// Twice over the text: a function may be called before its body comes.
void Parser::run() {
    static const std::set<std::string> prefixes = {".visible", ".extern", ".weak", ".common"};
    const char *start = scan.at;
    while (scan.skip(), *scan.at) {
        if (*scan.at == '.' && scan.word() == ".func") find_function();
        else if (*scan.at) scan.at++;
    }
    scan.at = start;
    while (scan.skip(), *scan.at) {
        if (*scan.at != '.') { scan.at++; continue; }
        std::string word = scan.word();
        if (prefixes.count(word)) continue;
        if (word == ".global" || word == ".const") {
            declare_global();
        } else if (word == ".shared") {
            Declared d = declaration();
            shared[d.name] = place(Space::Shared, d, module_shared);
        } else if (word == ".entry") {
            read_kernel();
        } else if (word == ".func" || word == ".section") {
            while (*scan.at && *scan.at != '{' && *scan.at != ';') scan.at++;
            if (*scan.at == ';') continue;
            int depth = 0;
            do {
                depth += *scan.at == '{' ? 1 : *scan.at == '}' ? -1 : 0;
                scan.at++;
            } while (*scan.at && depth);
        } else {
            scan.rest_of_line();
        }
    }
}

// After `.func`: remembers where the function is, if this is more than its announcement.
void Parser::find_function() {
    const char *start = scan.at;
    if (scan.accept('(')) scan.past(')');
    std::string name = scan.identifier();
    while (*scan.at && *scan.at != '{' && *scan.at != ';') scan.at++;
    if (*scan.at == '{') functions[name] = start;
}

void Parser::read_kernel() {
    auto own = std::make_unique<Kernel>();
    kernel = own.get();
    kernel->shared_bytes = module_shared;
    scopes = {Scope{{}, {}, {}, -1}};
    scope = 0;
    jumps.clear();
    constants.clear();
    specials.clear();
    kernel->name = scan.identifier();
    for (auto &p : parameters()) {
        Symbol s = place(Space::Param, p, kernel->param_bytes);
        s.parameter = true;
        scopes[0].symbols[p.name] = s;
        kernel->params.push_back({s.at, s.size});
    }
    // .maxntid 256, 1, 1 and others like it limit what a launch may ask for, and say no more.
    while (*scan.at && *scan.at != '{' && *scan.at != ';') scan.at++;
    if (!scan.accept('{')) return;
    body();
    resolve_jumps();
    Instruction end;
    end.text = end.opcode = "exit";
    bind(end);
    kernel->code.push_back(end);
    if (kernel->shared_bytes > DYNAMIC_SHARED)
        throw Unsupported{kernel->name + ": more static shared memory than a device has"};
    module.kernels[kernel->name] = std::move(own);
}

void Parser::resolve_jumps() {
    for (auto &jump : jumps) {
        int target = -1;
        for (int s = jump.scope; s >= 0 && target < 0; s = scopes[s].parent) {
            auto label = scopes[s].labels.find(jump.label);
            if (label != scopes[s].labels.end()) target = label->second;
        }
        if (target < 0) throw Unsupported{kernel->name + ": no label " + jump.label};
        kernel->code[jump.instruction].target = target;
    }
}

// After the opening brace, to the closing one.
void Parser::body() {
    for (int depth = 1; depth;) {
        scan.skip();
        if (!*scan.at) throw Unsupported{kernel->name + ": its end is missing"};
        if (scan.accept('{')) {
            depth++;
            scopes.push_back(Scope{{}, {}, {}, scope});
            scope = scopes.size() - 1;
        } else if (scan.accept('}')) {
            if (--depth) scope = scopes[scope].parent;
        } else if (scan.accept(';')) {
        } else if (*scan.at == '.') {
            directive();
        } else {
            const char *start = scan.at;
            std::string name = scan.identifier();
            if (scan.accept(':')) {
                scopes[scope].labels[name] = kernel->code.size();
            } else {
                scan.at = start;
                instruction();
            }
        }
    }
}

void Parser::directive() {
    std::string word = scan.word();
    if (word == ".reg") declare_registers();
    else if (word == ".shared") declare(Space::Shared);
    else if (word == ".local" || word == ".param") declare(Space::Local);
    else if (word == ".loc" || word == ".file") scan.rest_of_line();
    else scan.past(';'); // .pragma, .callprototype, .branchtargets
}

// `.align 8 .b8 name[20]`, after the space or `.param`.
Parser::Declared Parser::declaration() {
    static const std::set<std::string> spaces = {".global", ".shared", ".const", ".local"};
    Declared d;
    while (scan.next_is('.')) {
        std::string word = scan.word();
        if (word == ".align") d.align = scan.number();
        else if (word == ".reg") d.in_register = true;
        else if (type_of(word.substr(1)) != NONE) d.type = type_of(word.substr(1));
        else if (word != ".param" && word != ".ptr" && !spaces.count(word))
            throw Unsupported{"declaration with " + word};
    }
    d.name = scan.identifier();
    while (scan.accept('[')) {
        d.count *= scan.next_is(']') ? 0 : scan.number(); // [] is dynamic shared memory
        scan.accept(']');
    }
    return d;
}

// `(.param .u64 a, .param .align 4 .b8 b[20])`, or nothing.
std::vector<Parser::Declared> Parser::parameters() {
    std::vector<Declared> all;
    if (!scan.accept('(')) return all;
    while (!scan.accept(')')) {
        // The alignment of what a pointer points to says nothing of the pointer.
        const char *pointer = strstr(scan.at, ".ptr");
        Declared d = declaration();
        if (pointer && pointer < scan.at) d.align = 1;
        all.push_back(d);
        scan.accept(',');
    }
    return all;
}

Symbol Parser::place(Space space, const Declared &d, u64 &top) {
    u64 size = d.count * size_of(d.type);
    if (space == Space::Shared && !size) return Symbol{space, DYNAMIC_SHARED, 0};
    top = aligned(top, std::max<u64>(d.align, size_of(d.type)));
    Symbol s{space, top, size};
    top += size;
    return s;
}

void Parser::declare(Space space) {
    const char *start = scan.at - strlen(".param");
    bool parameter = space == Space::Local && !strncmp(start, ".param", 6);
    Declared d = declaration();
    u64 &top = space == Space::Shared ? kernel->shared_bytes : kernel->local_bytes;
    Symbol s = place(space, d, top);
    s.parameter = parameter;
    scopes[scope].symbols[d.name] = s;
    scan.accept(';');
}

// `.reg .f32 %f<9>;` or `.reg .b32 a, b;`
void Parser::declare_registers() {
    int bytes = size_of(type_of(scan.word().substr(1)));
    bytes = bytes < 4 ? 4 : bytes;
    do {
        std::string name = scan.identifier();
        if (scan.accept('<')) {
            u64 count = scan.number();
            scan.accept('>');
            for (u64 i = 0; i < count; i++)
                scopes[scope].registers[name + std::to_string(i)] = new_register(bytes);
        } else {
            scopes[scope].registers[name] = new_register(bytes);
        }
    } while (scan.accept(','));
    scan.accept(';');
}

void Parser::declare_global() {
    Declared d = declaration();
    u64 size = d.count * size_of(d.type);
    auto memory = std::make_unique<u8[]>(size + 256);
    u8 *at = (u8 *)aligned((u64)memory.get(), 128);
    module.memory.push_back(std::move(memory));
    module.globals[d.name] = Symbol{Space::Global, (u64)at, size};
    if (scan.accept('=')) initial_values(at, at + size, d.type);
    scan.accept(';');
}

void Parser::initial_values(u8 *at, const u8 *end, Type type) {
    int size = size_of(type);
    auto put = [&] {
        bool negative = scan.accept('-');
        u64 v = scan.next_is_float() ? scan.float_as_bits() : scan.number();
        if (negative) v = -v;
        if (at + size <= end) memcpy(at, &v, size);
        at += size;
    };
    if (!scan.accept('{')) return put();
    while (!scan.accept('}')) {
        scan.skip();
        if (!isdigit((u8)*scan.at) && *scan.at != '-')
            throw Unsupported{"a variable that starts as an address"};
        put();
        scan.accept(',');
    }
}

} // namespace ptx
