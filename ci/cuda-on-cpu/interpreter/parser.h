// From text to a Module. Device functions are put in where they are called: each call has registers
// of its own, so lanes may diverge within it like anywhere else. Recursion is not supported.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "program.h"
#include "scanner.h"

namespace ptx {

class Parser {
 public:
    Parser(const char *text, Module &module) : module(module) { scan.at = text; }
    void run();

 private:
    // Names of a pair of braces, or of a function's call. A function does not see its caller's.
    struct Scope {
        std::map<std::string, Operand> registers;
        std::map<std::string, Symbol> symbols;
        std::map<std::string, int> labels;
        int parent;
    };
    struct Jump { int instruction; std::string label; int scope; };
    struct Declared {
        Type type = B8;
        u64 align = 1, count = 1;
        std::string name;
        bool in_register = false;
    };

    Module &module;
    Scanner scan;
    Kernel *kernel = nullptr;
    std::vector<Scope> scopes;
    int scope = 0;
    std::vector<Jump> jumps;
    std::map<u64, int> constants;        // offsets in the pool
    std::map<std::string, Operand> specials;
    std::map<std::string, const char *> functions; // text after `.func`
    std::vector<std::string> calls;      // functions that are being put in
    std::string return_label;            // where `ret` goes to; empty in the kernel itself
    std::map<std::string, Symbol> shared; // variables of the module
    u64 module_shared = 0;

    // parser.cpp
    void find_function();
    void read_kernel();
    void body();
    void directive();
    Declared declaration();
    std::vector<Declared> parameters();
    void declare_registers();
    void declare(Space);
    void declare_global();
    void initial_values(u8 *at, const u8 *end, Type);
    void resolve_jumps();
    Symbol place(Space, const Declared &, u64 &top);

    // operands.cpp
    Operand new_register(int bytes);
    Operand constant(u64 value);
    const Operand *find_register(const std::string &name) const;
    const Symbol *find_symbol(const std::string &name) const;
    Operand special(const std::string &name);
    Operand value();
    Operand operand();
    Operand memory_operand();
    void instruction();
    void read_instruction(Instruction &);
    void call(Instruction &);
    std::vector<Operand> call_list();
    void put_in(const std::string &function, const std::vector<Operand> &results,
                const std::vector<Operand> &arguments);
    void move(const Operand &to, const Operand &from);
    void emit_branch(const std::string &label, int predicate, bool inverted);
};

// Finds what executes the instruction. Throws Unsupported.
void bind(Instruction &);

// The value of %tid.x and such; nullptr where there is no such register.
SpecialValue special_register(const std::string &name);

} // namespace ptx
