"""Divergence, loops, barriers and calls of functions."""

import ctypes
import unittest

from emulator import Device, single

# y[i] as Python's `loop` below: lanes leave the loop at different times, some by a break.
LOOPS = """
.visible .entry k(.param .u64 px, .param .u64 py, .param .u32 pn) {
    .reg .pred %p; .reg .b32 %i, %n, %v, %s, %odd; .reg .b64 %x, %y, %at;
    ld.param.u64 %x, [px]; ld.param.u64 %y, [py]; ld.param.u32 %n, [pn];
    mov.u32 %i, %ctaid.x; mov.u32 %v, %ntid.x; mov.u32 %s, %tid.x; mad.lo.s32 %i, %i, %v, %s;
    setp.ge.s32 %p, %i, %n;
    @%p bra END;
    mul.wide.s32 %at, %i, 4; add.s64 %x, %x, %at; add.s64 %y, %y, %at;
    ld.global.u32 %v, [%x];
    mov.u32 %s, 0;
LOOP:
    setp.le.s32 %p, %v, 0;
    @%p bra STORE;
    and.b32 %odd, %v, 1;
    setp.eq.s32 %p, %odd, 1;
    @!%p bra EVEN;
    add.s32 %s, %s, %v;
    bra.uni NEXT;
EVEN:
    sub.s32 %s, %s, 1;
NEXT:
    shr.s32 %v, %v, 1;
    setp.gt.s32 %p, %s, 1000;
    @!%p bra LOOP;
STORE:
    st.global.u32 [%y], %s;
END:
    ret;
}
"""

# The sum of a block's numbers by a tree in shared memory; one kernel without its last barriers.
TREE = """
.visible .entry k(.param .u64 px, .param .u64 py) {
    .shared .align 4 .b8 room[1024];
    .reg .pred %p; .reg .b32 %t, %h, %here, %there; .reg .f32 %a, %b; .reg .b64 %x, %y, %at;
    ld.param.u64 %x, [px]; ld.param.u64 %y, [py];
    mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 4; add.s64 %x, %x, %at;
    ld.global.f32 %a, [%x];
    mov.u32 %here, room; mad.lo.u32 %here, %t, 4, %here;
    st.shared.f32 [%here], %a;
    bar.sync 0;
    mov.u32 %h, 128;
STEP:
    setp.ge.u32 %p, %t, %h;
    @%p bra PASS;
    mad.lo.u32 %there, %h, 4, %here;
    ld.shared.f32 %a, [%here]; ld.shared.f32 %b, [%there];
    add.f32 %a, %a, %b;
    st.shared.f32 [%here], %a;
PASS:
    BARRIER
    shr.u32 %h, %h, 1;
    setp.ne.u32 %p, %h, 0;
    @%p bra STEP;
    setp.ne.u32 %p, %t, 0;
    @%p ret;
    ld.shared.f32 %a, [room];
    st.global.f32 [%y], %a;
    ret;
}
"""

CALLS = """
.func (.param .b32 r) scaled(.param .b32 x, .param .align 4 .b8 s[8]);
.visible .entry k(.param .u64 px, .param .u64 py) {
    .reg .pred %p; .reg .b32 %t; .reg .f32 %a, %b; .reg .b64 %x, %y, %at;
    ld.param.u64 %x, [px]; ld.param.u64 %y, [py];
    mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 4; add.s64 %x, %x, %at; add.s64 %y, %y, %at;
    ld.global.f32 %a, [%x];
    setp.lt.f32 %p, %a, 0f00000000;
    {
        .param .b32 x; .param .align 4 .b8 s[8]; .param .b32 r;
        st.param.f32 [x+0], %a;
        st.param.f32 [s+0], 0f40400000;
        st.param.f32 [s+4], 0f3F800000;
        call.uni (r), scaled, (x, s);
        ld.param.f32 %b, [r+0];
    }
    @%p call (%b), half, (%b);
    st.global.f32 [%y], %b;
    ret;
}
.func (.reg .f32 r) half(.reg .f32 x) {
    .reg .f32 %a;
    mul.f32 %a, x, 0f3F000000;
    mov.f32 x, 0f00000000;
    mov.f32 r, %a;
    ret;
}
.func (.param .b32 r) scaled(.param .b32 x, .param .align 4 .b8 s[8]) {
    .reg .pred %p; .reg .f32 %a, %b, %c;
    ld.param.f32 %a, [x]; ld.param.f32 %b, [s]; ld.param.f32 %c, [s+4];
    setp.gt.f32 %p, %a, 0f40A00000;
    @%p bra LARGE;
    fma.rn.f32 %a, %a, %b, %c;
    st.param.f32 [r], %a;
    ret;
LARGE:
    call (%a), half, (%a);
    st.param.f32 [r], %a;
    ret;
}
"""

def loop(v):
    s = 0
    while v > 0:
        s = s + v if v & 1 else s - 1
        v >>= 1
        if s > 1000:
            break
    return s


class Control(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = Device()

    def test_lanes_leave_a_loop_at_different_times(self):
        d, n = self.device, 300
        given = [i * 7919 % 5000 for i in range(n)]
        x, y = d.up(("i", given)), d.room(4 * n)
        d.launch(d.kernel(LOOPS), [x, y, ctypes.c_uint32(n)], block=128, grid=3)
        self.assertEqual(d.down(y, "i", n), [loop(v) for v in given])

    def tree(self, barrier):
        d = self.device
        x, y = d.up(("f", [float(i % 13) for i in range(256)])), d.room(4)
        d.launch(d.kernel(TREE.replace("BARRIER", barrier)), [x, y], block=256)
        return d.down(y, "f", 1)[0]

    def test_a_block_sums_in_shared_memory(self):
        wanted = float(sum(i % 13 for i in range(256)))
        self.assertEqual([self.tree("bar.sync 0;") for _ in range(10)], [wanted] * 10)

    def test_a_barrier_that_is_missing_is_found(self):
        wanted = float(sum(i % 13 for i in range(256)))
        self.assertTrue(any(self.tree("") != wanted for _ in range(50)))

    def test_functions_are_called_by_lanes_that_differ(self):
        d = self.device
        given = [(i - 16) * 0.75 for i in range(32)]
        x, y = d.up(("f", given)), d.room(4 * 32)
        d.launch(d.kernel(CALLS), [x, y])
        wanted = [(a * 0.5 if a > 5 else a * 3 + 1) * (0.5 if a < 0 else 1) for a in given]
        self.assertEqual(d.down(y, "f", 32), [single(w) for w in wanted])


if __name__ == "__main__":
    unittest.main()
