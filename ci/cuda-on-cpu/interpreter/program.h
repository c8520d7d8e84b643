// A module of PTX after parsing: kernels of instructions whose operands are bound to registers.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "types.h"

namespace ptx {

// The program does what this interpreter cannot. Thrown when the instruction is executed, so that
// a module whose other kernels are in use still loads.
struct Unsupported { std::string what; };
// The program does what no device would let it do: an access outside of memory, a deadlock.
struct Fault { std::string what; };

enum class Space : u8 { None, Param, Shared, Local, Global, Generic };

struct Operand {
    enum Kind : u8 { None, Register, Constant, Vector, Memory, Sink, Name };
    Kind kind = None;
    u8 width = 4;          // bytes that a lane has of a register: 4 or 8
    bool inverted = false; // !%p
    s32 offset = 0;        // of lane 0: in the register file, or in the pool of constants
    s64 value = 0;         // of a constant; of memory: the displacement
    Space space = Space::None; // of the variable that was named, where one was
    bool parameter = false;    // that variable is a parameter
    std::string name;
    std::vector<Operand> parts; // of a vector; of memory: the base, then coordinates or a barrier
};

struct Warp;
struct Block;
struct Instruction;
using Execute = void (*)(Warp &, const Instruction &, u32 lanes);

// How an instruction changes which lanes run: not at all, or as its name says. Together: the lanes
// that take part come first, then it is executed once for all of them.
enum class Control : u8 { Plain, Branch, Exit, Barrier, Together };

struct Instruction {
    std::string text, opcode;
    std::vector<std::string> modifiers; // .rn, .f32 and so on, without the dots
    std::vector<Operand> operands;
    int predicate = -1; // its offset in the register file
    bool predicate_inverted = false;
    int target = -1; // of a branch

    // What binding finds in the above, once, so that execution need not look.
    Execute execute = nullptr;
    Control control = Control::Plain;
    Type type = NONE, other = NONE;
    Space space = Space::None;
    int variant = 0, count = 0;
    bool flag = false;
    int mask_operand = -1; // lanes that take part; -1: all that are alive
    u32 warp_flop = 0;     // of tensor cores, for the warp
    std::vector<Operand> data; // operand 0's parts, or what a store writes

    bool has(const char *modifier) const {
        for (auto &m : modifiers) if (m == modifier) return true;
        return false;
    }
};

struct Symbol {
    Space space;
    u64 at, size; // an offset within its space; of a global variable: its address
    bool parameter = false;
};

using SpecialValue = u32 (*)(const Block &, u32 thread);

struct Kernel {
    std::string name;
    std::vector<Instruction> code;
    u32 register_bytes = 0;
    std::vector<u8> pool; // of each constant: u64[32], then u32[64]
    u64 param_bytes = 0, shared_bytes = 0, local_bytes = 0;
    std::vector<std::pair<u64, u64>> params;             // offset and size of each
    std::vector<std::pair<int, SpecialValue>> specials;  // register, and what it holds
    std::vector<std::string> unsupported;                // instructions that cannot be executed
    std::atomic<u64> launches{0}, instructions{0}, nanoseconds{0};
};

struct Module {
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
    std::map<std::string, Symbol> globals;
    std::vector<std::unique_ptr<u8[]>> memory; // of the globals
};

// Where dynamic shared memory starts; static variables come before. The most that these may have.
constexpr u64 DYNAMIC_SHARED = 49152;

std::unique_ptr<Module> parse(const char *text);

struct Size { u32 x, y, z; u64 all() const { return (u64)x * y * z; } };

// Runs `blocks` of a grid's blocks at most, the first, the last and others evenly between them, and
// is told what each has done: instructions of its warps, and FLOP of tensor cores.
struct Sample {
    u64 blocks;
    std::function<void(u64 instructions, u64 flop)> ended;
};

// Runs all blocks of the grid, or a sample of them. Throws Unsupported or Fault. `seed` other than
// 0: the blocks, and the warps of a block, take turns in an order of that seed.
void launch(Kernel &, const Module &, Size grid, Size block, u32 dynamic_shared,
            const u8 *params, u32 seed, const Sample *sample = nullptr);

// Called before each access to memory that is not the block's own; throws Fault where it may not.
extern void (*check_global)(u64 address, u64 bytes, bool write);

} // namespace ptx
