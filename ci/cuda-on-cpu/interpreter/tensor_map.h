// A tensor map, as the driver makes it and a kernel's bulk copies read it. The 128 bytes that CUDA
// gives it are too few for all of this: they hold the mark and the address of one of these.
#pragma once
#include "types.h"

namespace ptx {

constexpr u64 TENSOR_MAP_MARK = 0x70616d726f736e74;

struct TensorMap {
    u64 base;
    u32 rank, element_bytes;
    u64 extent[5], stride[5]; // stride in bytes
    u32 box[5];
    u32 swizzle; // 0: none; 1, 2, 3: of 32, 64, 128 bytes
};

} // namespace ptx
