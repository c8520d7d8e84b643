"""Products of cuBLASLt's stand-in: values, and what it refuses."""

import ctypes
import struct
import unittest

from emulator import POINTER, Device, cuda

F32, BF16, COMPUTE = 0, 14, 68
BAD_VALUE, UNSUPPORTED = 7, 15
I32, I64, U32, U64, SIZE = (ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64,
                            ctypes.c_size_t)


class Proposal(ctypes.Structure):
    _fields_ = [("algorithm", U64 * 8), ("workspace", SIZE), ("status", I32),
                ("waves", ctypes.c_float), ("reserved", I32 * 4)]


def make(name, *arguments):
    out = POINTER()
    assert cuda[name](ctypes.byref(out), *arguments) == 0
    return out


def put(name, of, attribute, value):
    code = cuda[name](of, attribute, ctypes.byref(value), SIZE(ctypes.sizeof(value)))
    assert code == 0, (name, attribute)


def matrix(kind, rows, columns, pitch, batch=1, stride=0):
    m = make("cublasLtMatrixLayoutCreate", kind, U64(rows), U64(columns), I64(pitch))
    if batch > 1:
        put("cublasLtMatrixLayoutSetAttribute", m, 5, I32(batch))
        put("cublasLtMatrixLayoutSetAttribute", m, 6, I64(stride))
    return m


def product(turn_a=0, turn_b=0):
    p = make("cublasLtMatmulDescCreate", COMPUTE, F32)
    for attribute, turn in ((3, turn_a), (4, turn_b)):
        put("cublasLtMatmulDescSetAttribute", p, attribute, I32(turn))
    return p


class Products(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = Device()
        cls.handle = make("cublasLtCreate")
        cls.room = cls.device.room(1 << 16)

    def propose(self, p, a, b, d, alignment=16):
        preference = make("cublasLtMatmulPreferenceCreate")
        put("cublasLtMatmulPreferenceSetAttribute", preference, 1, U64(1 << 16))
        for attribute in (5, 6, 7, 8):
            put("cublasLtMatmulPreferenceSetAttribute", preference, attribute, U32(alignment))
        all, count = (Proposal * 4)(), I32()
        code = cuda.cublasLtMatmulAlgoGetHeuristic(
            self.handle, p, a, b, d, d, preference, 4, all, ctypes.byref(count))
        usable = [x for x in all[:count.value] if x.status == 0]
        return code, usable

    def multiply(self, p, at_a, a, at_b, b, at_d, d, found, beta=0.0, room=None):
        room = found.workspace if room is None else room
        alpha, beta = ctypes.c_float(1), ctypes.c_float(beta)
        return cuda.cublasLtMatmul(
            self.handle, p, ctypes.byref(alpha), at_a, a, at_b, b, ctypes.byref(beta), at_d, d,
            at_d, d, ctypes.byref(found), self.room, SIZE(room), self.device.stream)

    def up(self, numbers):
        return self.device.up(struct.pack(f"{len(numbers)}f", *numbers))

    def test_values_of_turned_and_wide_factors_and_of_a_sum(self):
        # A: 2 × 3 with columns at a distance of 4; B: 3 × 2, stored turned.
        d = self.device
        a = self.up([1, 2, 9, 9, 3, 4, 9, 9, 5, 6, 9, 9])
        b = self.up([1, 2, 3, 4, 5, 6])
        out = self.up([10, 20, 30, 40])
        p, la, lb = product(turn_b=1), matrix(F32, 2, 3, 4), matrix(F32, 2, 3, 2)
        ld = matrix(F32, 2, 2, 2)
        code, found = self.propose(p, la, lb, ld)
        self.assertEqual(code, 0)
        self.assertEqual(self.multiply(p, a, la, b, lb, out, ld, found[0], beta=1.0), 0)
        # B = [[1, 2], [3, 4], [5, 6]].
        self.assertEqual(d.down(out, "f", 4), [10 + 35, 20 + 44, 30 + 44, 40 + 56])

    def test_a_bias_is_added_to_each_row(self):
        d = self.device
        a, b, bias = self.up([1, 2]), self.up([3, 4]), self.up([10, 20])
        out = self.up([0] * 4)
        p, la, lb, ld = product(), matrix(F32, 2, 1, 2), matrix(F32, 1, 2, 1), matrix(F32, 2, 2, 2)
        put("cublasLtMatmulDescSetAttribute", p, 7, U32(4))
        self.assertEqual(self.propose(p, la, lb, ld)[0], BAD_VALUE)
        put("cublasLtMatmulDescSetAttribute", p, 8, U64(256))
        code, [found] = self.propose(p, la, lb, ld)
        self.assertEqual(code, 0)
        put("cublasLtMatmulDescSetAttribute", p, 8, U64(bias.value))
        self.assertEqual(self.multiply(p, a, la, b, lb, out, ld, found), 0)
        self.assertEqual(d.down(out, "f", 4), [3 + 10, 6 + 20, 4 + 10, 8 + 20])

    def test_the_sums_of_a_s_rows_are_written_beside_a_sum(self):
        # A: 2 × 3, stored turned.
        d = self.device
        a, b, out = self.up([1, 2, 3, 4, 5, 6]), self.up([1, 1, 1]), self.up([10, 20])
        sums = self.up([7, 7])
        p, la, lb = product(turn_a=1), matrix(F32, 3, 2, 3), matrix(F32, 3, 1, 3)
        ld = matrix(F32, 2, 1, 2)
        put("cublasLtMatmulDescSetAttribute", p, 7, U32(256))
        self.assertEqual(self.propose(p, la, lb, ld)[0], BAD_VALUE)
        put("cublasLtMatmulDescSetAttribute", p, 8, U64(sums.value))
        code, [found] = self.propose(p, la, lb, ld)
        self.assertEqual(code, 0)
        self.assertEqual(self.multiply(p, a, la, b, lb, out, ld, found, beta=1.0), 0)
        self.assertEqual(d.down(out, "f", 2) + d.down(sums, "f", 2), [16, 35, 6, 15])

    def test_batches_go_on_at_their_strides(self):
        d = self.device
        a, b, out = self.up([1, 0, 2, 0, 3]), self.up([5, 6, 7]), self.up([0] * 5)
        layouts = [matrix(F32, 1, 1, 1, 3, stride) for stride in (2, 1, 2)]
        code, found = self.propose(product(), *layouts)
        self.assertEqual(code, 0)
        p = product()
        self.assertEqual(
            self.multiply(p, a, layouts[0], b, layouts[1], out, layouts[2], found[0]), 0)
        self.assertEqual(d.down(out, "f", 5), [5, 0, 12, 0, 21])

    def test_what_does_not_fit_together_is_refused(self):
        a, b, d = matrix(F32, 2, 3, 2), matrix(F32, 3, 2, 3), matrix(F32, 2, 2, 2)
        p = product()
        self.assertEqual(self.propose(p, a, a, d)[0], BAD_VALUE)
        self.assertEqual(self.propose(p, a, b, matrix(F32, 2, 2, 1))[0], BAD_VALUE)
        self.assertEqual(self.propose(p, a, b, matrix(F32, 2, 2, 2, 2, 4))[0], BAD_VALUE)
        self.assertEqual(self.propose(p, a, matrix(BF16, 3, 2, 3), d)[0], UNSUPPORTED)
        self.assertEqual(self.propose(p, a, b, d, alignment=24)[0], BAD_VALUE)
        wide = I64(1)
        code = cuda.cublasLtMatmulDescSetAttribute(p, 3, ctypes.byref(wide), SIZE(8))
        self.assertEqual(code, BAD_VALUE)

    def test_an_algorithm_is_for_what_it_was_proposed_for(self):
        a, b, d = matrix(F32, 2, 3, 2), matrix(F32, 3, 2, 3), matrix(F32, 2, 2, 2)
        p, at = product(), self.up([1] * 16)
        code, [found] = self.propose(p, a, b, d)
        self.assertEqual(code, 0)
        other = matrix(F32, 2, 2, 3)
        self.assertEqual(self.multiply(p, at, a, at, b, at, other, found), BAD_VALUE)
        self.assertEqual(self.multiply(p, at, a, at, b, at, d, found, room=16), BAD_VALUE)
        odd = type(at)(at.value + 4)
        self.assertEqual(self.multiply(p, odd, a, at, b, at, d, found), BAD_VALUE)
        # Memory that is not there.
        none = type(at)(at.value + (1 << 30))
        self.assertNotEqual(self.multiply(p, none, a, at, b, at, d, found), 0)


if __name__ == "__main__":
    unittest.main()
