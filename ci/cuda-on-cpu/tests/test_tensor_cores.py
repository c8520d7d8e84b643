"""Products of matrices by a warp, against sums in Python."""

import random
import struct
import unittest

from emulator import Device, bf16, bits, from_bf16, single

# c[16][8] = a[16][64] · b[8][64]ᵀ of bf16: to shared memory by cp.async, from there by ldmatrix.
MMA = """
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc) {
    .shared .align 16 .b8 sa[2048]; .shared .align 16 .b8 sb[1024];
    .reg .pred %p; .reg .b64 %a, %b, %c, %from; .reg .b32 %l, %i, %to, %k, %x, %y, %fa<4>, %fb<2>;
    .reg .f32 %d<4>;
    ld.param.u64 %a, [pa]; ld.param.u64 %b, [pb]; ld.param.u64 %c, [pc];
    mov.u32 %l, %tid.x;
    mov.u32 %i, %l;
NEXT:
    mul.wide.u32 %from, %i, 16; mul.lo.u32 %to, %i, 16;
    add.s64 %from, %a, %from; mov.u32 %x, sa; add.u32 %to, %to, %x;
    cp.async.cg.shared.global [%to], [%from], 16;
    setp.ge.u32 %p, %i, 64;
    @%p bra SKIP;
    mul.wide.u32 %from, %i, 16; mul.lo.u32 %to, %i, 16;
    add.s64 %from, %b, %from; mov.u32 %x, sb; add.u32 %to, %to, %x;
    cp.async.ca.shared.global [%to], [%from], 16;
SKIP:
    add.u32 %i, %i, 32;
    setp.lt.u32 %p, %i, 128;
    @%p bra NEXT;
    cp.async.commit_group;
    WAIT
    bar.sync 0;
    mov.f32 %d0, 0f00000000; mov.f32 %d1, %d0; mov.f32 %d2, %d0; mov.f32 %d3, %d0;
    mov.u32 %k, 0;
STEP:
    // a: lanes 0 to 15 give the rows of the left half, the others of the right one.
    and.b32 %x, %l, 15; mul.lo.u32 %x, %x, 128; shr.u32 %y, %l, 4; mad.lo.u32 %x, %y, 16, %x;
    mov.u32 %y, sa; add.u32 %x, %x, %y; mad.lo.u32 %x, %k, 32, %x;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%fa0, %fa1, %fa2, %fa3}, [%x];
    and.b32 %x, %l, 7; mul.lo.u32 %x, %x, 128; shr.u32 %y, %l, 3; and.b32 %y, %y, 1;
    mad.lo.u32 %x, %y, 16, %x; mov.u32 %y, sb; add.u32 %x, %x, %y; mad.lo.u32 %x, %k, 32, %x;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%fb0, %fb1}, [%x];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%d0, %d1, %d2, %d3},
        {%fa0, %fa1, %fa2, %fa3}, {%fb0, %fb1}, {%d0, %d1, %d2, %d3};
    add.u32 %k, %k, 1;
    setp.lt.u32 %p, %k, 4;
    @%p bra STEP;
    shr.u32 %x, %l, 2; mul.wide.u32 %from, %x, 32; add.s64 %c, %c, %from;
    and.b32 %x, %l, 3; mul.wide.u32 %from, %x, 8; add.s64 %c, %c, %from;
    st.global.v2.f32 [%c], {%d0, %d1};
    st.global.v2.f32 [%c+256], {%d2, %d3};
    ret;
}
"""

WMMA = """
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc) {
    .reg .b64 %a, %b, %c; .reg .b32 %fa<FACTORS>, %fb<FACTORS>; .reg .f32 %d<8>, %z; .reg .b32 %s;
    ld.param.u64 %a, [pa]; ld.param.u64 %b, [pb]; ld.param.u64 %c, [pc];
    mov.f32 %z, 0f3F000000; mov.u32 %s, KK;
    wmma.load.a.sync.aligned.row.SHAPE.global.TYPE {AREGS}, [%a], %s;
    wmma.load.b.sync.aligned.col.SHAPE.global.TYPE {BREGS}, [%b], %s;
    wmma.mma.sync.aligned.row.col.SHAPE.f32.TYPE.TYPE.f32
        {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, {AREGS}, {BREGS},
        {%z, %z, %z, %z, %z, %z, %z, %z};
    mov.u32 %s, NN;
    wmma.store.d.sync.aligned.row.SHAPE.global.f32 [%c],
        {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, %s;
    ret;
}
"""

# c[16][8] = a[16][4] · b[4][8], rounded to TF32: what each lane holds is as the manual has it.
TF32 = """
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc) {
    .reg .b64 %a, %b, %c, %o; .reg .b32 %l, %g, %q, %x, %fa<2>, %fb; .reg .f32 %d<4>, %z;
    ld.param.u64 %a, [pa]; ld.param.u64 %b, [pb]; ld.param.u64 %c, [pc];
    mov.u32 %l, %laneid; shr.u32 %g, %l, 2; and.b32 %q, %l, 3; mov.f32 %z, 0f00000000;
    mad.lo.u32 %x, %g, 4, %q; mul.wide.u32 %o, %x, 4; add.s64 %a, %a, %o;
    ld.global.b32 %fa0, [%a]; ld.global.b32 %fa1, [%a+128];
    mad.lo.u32 %x, %q, 8, %g; mul.wide.u32 %o, %x, 4; add.s64 %b, %b, %o;
    ld.global.b32 %fb, [%b];
    mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%d0, %d1, %d2, %d3}, {%fa0, %fa1}, {%fb},
        {%z, %z, %z, %z};
    shl.b32 %q, %q, 1; mad.lo.u32 %x, %g, 8, %q; mul.wide.u32 %o, %x, 4; add.s64 %c, %c, %o;
    st.global.v2.f32 [%c], {%d0, %d1};
    st.global.v2.f32 [%c+256], {%d2, %d3};
    ret;
}
"""


def product(a, b):
    """Of rows of a with rows of b."""
    return [[sum(x * y for x, y in zip(r, c)) for c in b] for r in a]


def tf32(x):
    return struct.unpack("f", struct.pack("I", bits(x) & 0xFFFFE000))[0]


class TensorCores(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = Device()
        cls.random = random.Random(3)

    def matrix(self, rows, columns):
        return [[self.random.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]

    def near(self, got, wanted, tolerance=1e-5):
        flat = [x for row in wanted for x in row]
        self.assertEqual(len(got), len(flat))
        for n, (g, w) in enumerate(zip(got, flat)):
            self.assertTrue(abs(g - w) <= tolerance * (1 + abs(w)), f"{n}: {g} instead of {w}")

    def halves(self, matrix):
        stored = [bf16(x) for row in matrix for x in row]
        rounded = [[from_bf16(bf16(x)) for x in row] for row in matrix]
        return self.device.up(("H", stored)), rounded

    def mma(self, wait):
        d = self.device
        (a, wa), (b, wb) = self.halves(self.matrix(16, 64)), self.halves(self.matrix(8, 64))
        c = d.room(16 * 8 * 4)
        d.launch(d.kernel(MMA.replace("WAIT", wait)), [a, b, c])
        return d.down(c, "f", 128), product(wa, wb)

    def test_mma_of_bf16_through_shared_memory(self):
        for wait in ("cp.async.wait_group 0;", "cp.async.wait_all;"):
            self.near(*self.mma(wait))

    def test_a_copy_that_is_not_waited_for_is_found(self):
        got, _ = self.mma("cp.async.wait_group 1;")
        self.assertTrue(all(x != x for x in got), "what was not copied yet is NaN")

    def test_wmma_of_three_shapes(self):
        for shape, m, n in [("m16n16k16", 16, 16), ("m32n8k16", 32, 8), ("m8n32k16", 8, 32)]:
            with self.subTest(shape):
                d = self.device
                # Registers of a fragment: the manual's numbers.
                na, nb = {16: (4, 4), 32: (8, 2), 8: (2, 8)}[m]
                regs = lambda r, k: ", ".join(f"%{r}{i}" for i in range(k))
                text = WMMA.replace("FACTORS", "8").replace("SHAPE", shape)
                text = text.replace("TYPE", "bf16").replace("KK", "16").replace("NN", str(n))
                text = text.replace("AREGS", regs("fa", na)).replace("BREGS", regs("fb", nb))
                (a, wa), (b, wb) = self.halves(self.matrix(m, 16)), self.halves(self.matrix(n, 16))
                c = d.room(m * n * 4)
                d.launch(d.kernel(text), [a, b, c])
                wanted = [[x + 0.5 for x in row] for row in product(wa, wb)]
                self.near(d.down(c, "f", m * n), wanted)

    def test_tf32_sees_the_upper_bits_only(self):
        d = self.device
        a, b = self.matrix(16, 4), self.matrix(8, 4)
        up = lambda rows: d.up(("f", [x for row in rows for x in row]))
        c = d.room(16 * 8 * 4)
        d.launch(d.kernel(TF32), [up(a), up(list(zip(*b))), c])
        got = d.down(c, "f", 128)
        cut = lambda rows: [[tf32(single(x)) for x in row] for row in rows]
        self.near(got, product(cut(a), cut(b)), 1e-6)
        exact = [x for row in product(a, b) for x in row]
        self.assertTrue(max(abs(g - e) for g, e in zip(got, exact)) > 1e-5)


if __name__ == "__main__":
    unittest.main()
