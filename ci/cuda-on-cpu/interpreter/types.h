// The types of PTX, and numbers as bits.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

enum Type : u8 {
    NONE, PRED, B8, U8, S8, B16, U16, S16, F16, BF16, B32, U32, S32, F32, F16X2, BF16X2,
    B64, U64, S64, F64, B128, TF32,
};

// NONE where `name` (without its dot) is no type.
Type type_of(const std::string &name);

inline int size_of(Type t) {
    switch (t) {
    case B8: case U8: case S8: return 1;
    case B16: case U16: case S16: case F16: case BF16: return 2;
    case B64: case U64: case S64: case F64: return 8;
    case B128: return 16;
    default: return 4;
    }
}
inline u32 bits_of(Type t) { return 8 * size_of(t); }
inline bool is_signed(Type t) { return t == S8 || t == S16 || t == S32 || t == S64; }
inline bool is_float(Type t) {
    return t == F16 || t == BF16 || t == F32 || t == F64 || t == TF32;
}
inline bool is_pair(Type t) { return t == F16X2 || t == BF16X2; }
inline bool is_half(Type t) { return t == F16 || t == BF16 || is_pair(t); }
inline bool is_bf16(Type t) { return t == BF16 || t == BF16X2; }

template <class To, class From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float to_float(u32 bits) { return bits_as<float>(bits); }
inline u32 float_bits(float x) { return bits_as<u32>(x); }
inline double to_double(u64 bits) { return bits_as<double>(bits); }
inline u64 double_bits(double x) { return bits_as<u64>(x); }

inline float from_bf16(u16 bits) { return to_float((u32)bits << 16); }
inline u16 to_bf16_towards_zero(float x) { return float_bits(x) >> 16; }
inline u16 to_bf16(float x) { // to the nearest, ties to even
    u32 bits = float_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff; // NVIDIA's NaN
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float from_f16(u16 bits) { return (float)bits_as<_Float16>(bits); }
inline u16 to_f16(float x) { return bits_as<u16>((_Float16)x); }
// A tensor core sees the upper 19 bits of what is given as TF32.
inline float as_tf32(u32 bits) { return to_float(bits & 0xffffe000); }

inline float from_half(u16 bits, bool bf16) { return bf16 ? from_bf16(bits) : from_f16(bits); }
inline u16 to_half(float x, bool bf16) { return bf16 ? to_bf16(x) : to_f16(x); }

// The lower bits of `v` that type `t` has, the others 0.
inline u64 zero_extended(u64 v, Type t) {
    return size_of(t) >= 8 ? v : v & ((1ull << bits_of(t)) - 1);
}
inline s64 sign_extended(u64 v, Type t) {
    switch (size_of(t)) {
    case 1: return (s8)v;
    case 2: return (s16)v;
    case 4: return (s32)v;
    default: return (s64)v;
    }
}

} // namespace ptx
