// What memory a launch touches, by what a sample of its blocks did.
#pragma once
#include <cstdint>
#include <vector>

#include "../interpreter/program.h"
#include "driver.h"

namespace driver {

// Memory moves sectors of 32 bytes. A sector counts once for a block, however often its threads
// come back to it: the block's caches have it. Blocks that share what they read, as a table or the
// keys of a head, are seen to do so by the parameter that it belongs to: all of them together move
// no more than lies between the first and the last byte that they touched there.
class Traffic {
public:
    Traffic(const ptx::Kernel &, const unsigned char *params);
    void add(Address, uint64_t bytes, bool write);
    void end_block();

    struct Bytes {
        double read, written; // between the memory and the caches that all blocks share
        double asked;         // by blocks
    };
    // Of all blocks, where each of those that ran stands for so many.
    Bytes bytes(double each) const;

private:
    struct Part { uint64_t sectors = 0, first = ~0ull, last = 0; };
    std::vector<Address> starts;         // of what parameters point to, in order
    std::vector<uint64_t> touched[2];    // by the block that runs: sectors read, written
    std::vector<Part> parts[2];          // by parameter
};

} // namespace driver
