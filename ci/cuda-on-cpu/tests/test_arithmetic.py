"""Every arithmetic instruction on edge values against Python's numbers."""

import math
import struct
import unittest

from emulator import Device, bf16, bits, from_bf16, single

# By type: the letter of `struct`, the register, and values to try.
WHOLE = [0, 1, 2, 3, 5, 7, 31, 32, 100, 255, 256, 32767, 32768, 65535]
TYPES = {
    "s32": ("i", "b32", [*WHOLE, -1, -2, -7, -100, -32769, 2**31 - 1, -(2**31)]),
    "u32": ("I", "b32", [*WHOLE, 2**31, 2**32 - 1, 2**32 - 7]),
    "b32": ("I", "b32", [*WHOLE, 2**31, 2**32 - 1, 0x12345678]),
    "s64": ("q", "b64", [*WHOLE, -1, -7, 2**40 + 5, -(2**40), 2**63 - 1, -(2**63)]),
    "u64": ("Q", "b64", [*WHOLE, 2**40 + 5, 2**63, 2**64 - 1]),
    "b64": ("Q", "b64", [*WHOLE, 2**40 + 5, 2**63, 2**64 - 1]),
    "f32": ("f", "f32", [0.0, -0.0, 1.0, -1.5, 0.1, 3.25, 1e-20, 1e20, -7.0, 2.5, 0.5, 1e10,
                         float("inf"), float("-inf"), float("nan")]),
    "f64": ("d", "f64", [0.0, -0.0, 1.0, -1.5, 0.1, 3.25, 1e-200, 1e200, -7.0, float("inf")]),
}
BITS = {"i": 32, "I": 32, "q": 64, "Q": 64}


def wrap(x, letter):
    n = BITS[letter]
    x &= (1 << n) - 1
    return x - (1 << n) if letter in "iq" and x >> (n - 1) else x


def toward_zero(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def shift_right(a, by, n):
    return a >> min(by, n - 1) if a < 0 else (a >> by if by < n else 0)


def smaller(a, b):
    if a != a or b != b:
        return b if a != a else a
    return math.copysign(0.0, -1) if a == b == 0 and "-" in f"{a}{b}" else min(a, b)


def reverse(a, n=32):
    return int(f"{a:0{n}b}"[::-1], 2)


def permute(a, b, pick):
    data = struct.pack("II", a, b)
    return int.from_bytes(bytes(data[pick >> 4 * n & 7] for n in range(4)), "little")


BINARY = [ # instruction, type, reference
    *[(f"{op}.{t}", t, f) for t in ("s32", "u32", "s64", "u64") for op, f in [
        ("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("mul.lo", lambda a, b: a * b),
        ("min", min), ("max", max),
        ("div", lambda a, b: toward_zero(a, b) if b else -1),
        ("rem", lambda a, b: a - toward_zero(a, b) * b if b else a)]],
    *[(f"mul.hi.{t}", t, lambda a, b, n=n: a * b >> n)
      for t, n in [("s32", 32), ("u32", 32), ("s64", 64), ("u64", 64)]],
    *[(f"{op}.{t}", t, f) for t in ("b32", "b64") for op, f in [
        ("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)]],
    *[(f"{op}.rn.{t}", t, f) for t in ("f32", "f64") for op, f in [
        ("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("mul", lambda a, b: a * b)]],
    ("min.f32", "f32", smaller), ("max.f32", "f32", lambda a, b: -smaller(-a, -b)),
    ("min.NaN.f32", "f32", lambda a, b: smaller(a, b) if a == a and b == b else math.nan),
    ("copysign.f32", "f32", lambda a, b: math.copysign(b, a)),
]
UNARY = [
    ("neg.s32", "s32", lambda a: -a), ("abs.s32", "s32", abs), ("not.b32", "b32", lambda a: ~a),
    ("neg.f32", "f32", lambda a: -a), ("abs.f32", "f32", abs),
    ("popc.b32", "b32", lambda a: bin(a).count("1")),
    ("clz.b32", "b32", lambda a: 32 - a.bit_length()), ("brev.b32", "b32", reverse),
    ("bfind.u32", "u32", lambda a: a.bit_length() - 1),
]
CONVERSIONS = [ # to, from, modifiers, reference
    ("s32", "f32", "rzi", lambda a: trim(a, -(2**31), 2**31 - 1)),
    ("u32", "f32", "rzi", lambda a: trim(a, 0, 2**32 - 1)),
    ("f32", "s32", "rn", float), ("f32", "u32", "rn", float), ("f32", "f64", "rn", lambda a: a),
    ("f64", "f32", "", lambda a: a), ("s64", "s32", "", lambda a: a),
    ("u64", "u32", "", lambda a: a), ("f32", "f32", "rmi", lambda a: on_finite(math.floor, a)),
    ("f32", "f32", "rpi", lambda a: on_finite(math.ceil, a)),
    ("f32", "f32", "rni", lambda a: on_finite(round, a)),
]
SHIFTS = [0, 1, 5, 31, 32, 33, 63, 64, 200]


def trim(a, low, high):
    return 0 if a != a else low if a <= low else high if a >= high else int(a)


def on_finite(f, a):
    return math.copysign(float(f(a)), a) if math.isfinite(a) else a


def program(body, count, read, written, registers):
    """A kernel whose thread i reads the i-th of `count` arrays into %a, %b, %c, and writes %d."""
    size = {"b32": 4, "f32": 4, "b64": 8, "f64": 8}
    lines = [f".visible .entry k({', '.join(f'.param .u64 p{n}' for n in range(count + 1))}) {{",
             ".reg .b64 %at; .reg .b64 %i; .reg .b32 %t; .reg .pred %p; .reg .pred %q;",
             f".reg .{written} %d; {registers}",
             "mov.u32 %t, %tid.x; cvt.u64.u32 %i, %t;"]
    for n in range(count):
        kind = read[n]
        lines.append(f".reg .{kind} %{'abc'[n]};")
        lines.append(f"ld.param.u64 %at, [p{n}]; mad.lo.u64 %at, %i, {size[kind]}, %at;")
        lines.append(f"ld.global.{kind} %{'abc'[n]}, [%at];")
    lines.append(body)
    lines.append(f"ld.param.u64 %at, [p{count}]; mad.lo.u64 %at, %i, {size[written]}, %at;")
    lines.append(f"st.global.{written} [%at], %d; ret; }}")
    return "\n".join(lines)


class Arithmetic(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = Device()

    def results(self, body, inputs, read, letter, written, registers=""):
        d, n = self.device, len(inputs[0][1])
        ptx = program(body, len(inputs), read, written, registers)
        at = [d.up(given) for given in inputs]
        to = d.room(n * struct.calcsize(letter))
        d.launch(d.kernel(ptx), [*at, to], block=n)
        return d.down(to, letter, n)

    def same(self, got, wanted, letter, what):
        for n, (g, w) in enumerate(zip(got, wanted)):
            if letter in BITS:
                w = wrap(w, letter)
            elif letter == "f":
                w = single(w)
            both_nan = g != g and w != w
            self.assertTrue(both_nan or struct.pack(letter, g) == struct.pack(letter, w),
                            f"{what}, {n}: {g} instead of {w}")

    def test_of_two_numbers(self):
        for instruction, t, f in BINARY:
            letter, register, values = TYPES[t]
            pairs = [(a, b) for a in values for b in values][:: max(1, len(values) ** 2 // 400)]
            with self.subTest(instruction):
                a, b = [list(x) for x in zip(*pairs)]
                got = self.results(f"{instruction} %d, %a, %b;", [(letter, a), (letter, b)],
                                   [register] * 2, letter, register)
                wanted = [f(x, y) for x, y in zip(*[single_of(letter, v) for v in (a, b)])]
                self.same(got, wanted, letter, instruction)

    def test_of_one_number(self):
        for instruction, t, f in UNARY:
            letter, register, values = TYPES[t]
            with self.subTest(instruction):
                got = self.results(f"{instruction} %d, %a;", [(letter, values)], [register],
                                   letter, register)
                wanted = [f(x) for x in single_of(letter, values)]
                self.same(got, wanted, letter, instruction)

    def test_conversions(self):
        for to, of, modifiers, f in CONVERSIONS:
            instruction = ".".join(x for x in ("cvt", modifiers, to, of) if x)
            (letter, register, values), (out, written, _) = TYPES[of], TYPES[to]
            with self.subTest(instruction):
                got = self.results(f"{instruction} %d, %a;", [(letter, values)], [register], out,
                                   written)
                wanted = [f(x) for x in single_of(letter, values)]
                self.same(got, wanted, out, instruction)

    def test_bf16_is_rounded_to_the_nearest_even(self):
        values = [1.0, 1.00390625, 1.01171875, -2.7, 3e38, 0.1, 1e-40, float("inf"), 65280.5]
        body = "cvt.rn.bf16.f32 %h, %a; cvt.u32.u16 %d, %h;"
        got = self.results(body, [("f", values)], ["f32"], "I", "b32", ".reg .b16 %h;")
        self.assertEqual(got, [bf16(x) for x in values])
        pair = "cvt.rn.bf16x2.f32 %d, %a, %b;"
        got = self.results(pair, [("f", values), ("f", values[::-1])], ["f32", "f32"], "I", "b32")
        self.assertEqual(got, [bf16(a) << 16 | bf16(b) for a, b in zip(values, values[::-1])])

    def test_pairs_of_bf16_are_added_and_fused(self):
        a, b = [1.5, -2.25, 100.0], [0.375, 8.0, -3.0]
        pairs = [bf16(x) << 16 | bf16(y) for x, y in zip(a, b)]
        got = self.results("fma.rn.bf16x2 %d, %a, %b, %a;", [("I", pairs), ("I", pairs[::-1])],
                           ["b32", "b32"], "I", "b32")
        halves = [(from_bf16(p >> 16), from_bf16(p & 0xFFFF)) for p in pairs]
        wanted = [bf16(x[0] * y[0] + x[0]) << 16 | bf16(x[1] * y[1] + x[1])
                  for x, y in zip(halves, halves[::-1])]
        self.assertEqual(got, wanted)

    def test_shifts_by_the_width_or_more(self):
        for t, n in [("s32", 32), ("u32", 32), ("s64", 64), ("u64", 64)]:
            letter, register, values = TYPES[t]
            pairs = [(a, s) for a in values for s in SHIFTS]
            a, by = [list(x) for x in zip(*pairs)]
            given = [(letter, a), ("I", by)]
            kinds = [register, "b32"]
            left = self.results(f"shl.b{n} %d, %a, %b;", given, kinds, letter, register)
            self.same(left, [x << s if s < n else 0 for x, s in pairs], letter, f"shl.{t}")
            right = self.results(f"shr.{t} %d, %a, %b;", given, kinds, letter, register)
            self.same(right, [shift_right(x, s, n) for x, s in pairs], letter, f"shr.{t}")

    def test_fields_bytes_and_tables(self):
        a, b, c = [0x12345678, 0xF0F0A5A5, 7], [0x9ABCDEF0, 1, 0xFFFFFFFF], [0x5140, 0x7632, 0]
        given, kinds = [("I", a), ("I", b), ("I", c)], ["b32"] * 3
        got = self.results("prmt.b32 %d, %a, %b, %c;", given, kinds, "I", "b32")
        self.assertEqual(got, [permute(*x) for x in zip(a, b, c)])
        got = self.results("lop3.b32 %d, %a, %b, %c, 0x96;", given, kinds, "I", "b32")
        self.assertEqual(got, [x ^ y ^ z for x, y, z in zip(a, b, c)])
        got = self.results("bfe.u32 %d, %a, 4, 9;", given[:1], kinds[:1], "I", "b32")
        self.assertEqual(got, [x >> 4 & 511 for x in a])
        got = self.results("bfe.s32 %d, %a, 4, 4;", given[:1], kinds[:1], "i", "b32")
        self.assertEqual(got, [(x >> 4 & 15) - (16 if x >> 7 & 1 else 0) for x in a])
        got = self.results("bfi.b32 %d, %a, %b, 8, 8;", given[:2], kinds[:2], "I", "b32")
        self.assertEqual(got, [y & ~0xFF00 | (x & 255) << 8 for x, y in zip(a, b)])
        got = self.results("shf.l.wrap.b32 %d, %a, %b, 12;", given[:2], kinds[:2], "I", "b32")
        self.assertEqual(got, [((y << 32 | x) << 12 >> 32) & 0xFFFFFFFF for x, y in zip(a, b)])

    def test_comparisons_with_nan(self):
        values = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf")]
        a, b = zip(*[(x, y) for x in values for y in values])
        tests = {"lt": lambda x, y: x < y, "ge": lambda x, y: x >= y, "eq": lambda x, y: x == y,
                 "ne": lambda x, y: x == x and y == y and x != y,
                 "neu": lambda x, y: x != y, "ltu": lambda x, y: not x >= y,
                 "num": lambda x, y: x == x and y == y, "nan": lambda x, y: x != x or y != y}
        for name, f in tests.items():
            with self.subTest(name):
                body = f"setp.{name}.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;"
                got = self.results(body, [("f", a), ("f", b)], ["f32", "f32"], "I", "b32")
                self.assertEqual(got, [int(f(x, y)) for x, y in zip(a, b)])

    def test_functions_are_near(self):
        tests = {"ex2.approx": (lambda x: 2**x, [-3.0, 0.0, 0.5, 10.25]),
                 "lg2.approx": (math.log2, [0.125, 1.0, 3.0, 1e10]),
                 "sin.approx": (math.sin, [-2.0, 0.0, 1.0]), "cos.approx": (math.cos, [0.0, 2.0]),
                 "sqrt.rn": (math.sqrt, [0.0, 2.0, 9.0]), "rcp.rn": (lambda x: 1 / x, [3.0, -8.0]),
                 "rsqrt.approx": (lambda x: 1 / math.sqrt(x), [4.0, 3.0]),
                 "tanh.approx": (math.tanh, [-1.0, 0.3, 20.0])}
        for name, (f, values) in tests.items():
            with self.subTest(name):
                got = self.results(f"{name}.f32 %d, %a;", [("f", values)], ["f32"], "f", "f32")
                for g, x in zip(got, values):
                    self.assertTrue(math.isclose(g, f(x), rel_tol=1e-6, abs_tol=1e-6), (g, x))

    def test_a_fused_product_is_rounded_once(self):
        a, b, c = [1 + 2**-12], [1 + 2**-12], [-1.0]
        got = self.results("fma.rn.f32 %d, %a, %b, %c;", [("f", a), ("f", b), ("f", c)],
                           ["f32"] * 3, "f", "f32")
        self.assertEqual(bits(got[0]), bits((1 + 2**-12) ** 2 - 1))


def single_of(letter, values):
    return [single(x) for x in values] if letter == "f" else values


if __name__ == "__main__":
    unittest.main()
