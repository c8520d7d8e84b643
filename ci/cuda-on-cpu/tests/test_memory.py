"""Memory: what is new is NaN, what is not the program's is an error."""

import ctypes
import unittest

from emulator import (ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, CudaError,
                      Device, call)

# Reads 4 bytes at an address and writes them to another.
READ = """
.visible .entry k(.param .u64 from, .param .u64 to) {
    .reg .b64 %a, %b; .reg .b32 %x;
    ld.param.u64 %a, [from]; ld.param.u64 %b, [to];
    ld.global.u32 %x, [%a];
    st.global.u32 [%b], %x;
    ret;
}
"""

# Each thread keeps numbers of its own in local memory, reached by a generic address, and adds what
# a table of the module has.
LOCAL = """
.global .align 4 .s32 table[4] = {10, -20, 30, 40};
.visible .entry k(.param .u64 to) {
    .local .align 8 .b8 own[16];
    .reg .b64 %to, %l, %g, %o, %t; .reg .b32 %i, %x, %y;
    ld.param.u64 %to, [to];
    mov.u64 %l, own; cvta.local.u64 %g, %l;
    mov.u32 %i, %tid.x; and.b32 %x, %i, 3; mul.wide.u32 %o, %x, 4;
    add.s64 %g, %g, %o; add.s64 %l, %l, %o;
    st.u32 [%g], %i;
    mov.u64 %t, table; add.s64 %t, %t, %o; ld.global.s32 %y, [%t];
    ld.local.u32 %x, [%l]; add.s32 %x, %x, %y;
    mul.wide.u32 %o, %i, 4; add.s64 %to, %to, %o;
    st.global.u32 [%to], %x;
    ret;
}
"""

# A tile of a matrix of bf16, with the bytes of shared memory swizzled, once the barrier has counted
# its bytes.
TILE = """
.extern .shared .align 1024 .b8 tile[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 to) {
    .shared .align 8 .b8 bar[8];
    .reg .pred %p; .reg .b32 %t, %b, %s, %i, %o, %w; .reg .b64 %m, %to, %g; .reg .b16 %h;
    mov.b64 %m, map; cvta.param.u64 %m, %m; ld.param.u64 %to, [to];
    mov.u32 %b, bar; mov.u32 %s, tile; mov.u32 %t, %tid.x;
    setp.ne.u32 %p, %t, 0;
    @%p bra READY;
    mbarrier.init.shared::cta.b64 [%b], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], 4096;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%s], [%m, {64, 32}], [%b];
READY:
    bar.sync 0;
WAIT:
    TEST
    mov.u32 %i, %t;
NEXT: // element i: row i / 64, column i % 64
    shl.b32 %o, %i, 1; shr.u32 %w, %o, 7; and.b32 %w, %w, 7; shl.b32 %w, %w, 4;
    xor.b32 %o, %o, %w; add.u32 %o, %o, %s;
    ld.shared.u16 %h, [%o];
    mul.wide.u32 %g, %i, 2; add.s64 %g, %g, %to;
    st.global.u16 [%g], %h;
    add.u32 %i, %i, 64;
    setp.lt.u32 %p, %i, 2048;
    @%p bra NEXT;
    ret;
}
"""
TEST = "mbarrier.try_wait.parity.shared::cta.b64 %p, [%b], 0; @!%p bra WAIT;"


class Memory(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = Device()

    def test_new_memory_is_nan(self):
        d = self.device
        self.assertTrue(all(x != x for x in d.down(d.room(64), "f", 16)))

    def test_memory_is_freed_once(self):
        at = self.device.room(4)
        call("cuMemFree_v2", at)
        with self.assertRaises(CudaError) as error:
            call("cuMemFree_v2", at)
        self.assertEqual(error.exception.code, INVALID_VALUE)

    def test_copies_stay_within_their_memory(self):
        at = self.device.room(8)
        with self.assertRaises(CudaError) as error:
            self.device.down(at, "I", 3)
        self.assertEqual(error.exception.code, ILLEGAL_ADDRESS)

    def test_a_stream_wants_its_own_device(self):
        first, second = Device(0), Device(1)
        with self.assertRaises(CudaError) as error:
            first.up(("I", [1]), stream=first.stream)
        self.assertEqual(error.exception.code, INVALID_HANDLE)
        with self.assertRaises(CudaError) as error:
            second.launch(first.kernel(READ), [second.room(4)] * 2, stream=first.stream)
        self.assertEqual(error.exception.code, INVALID_HANDLE)
        call("cuCtxSetCurrent", None)
        with self.assertRaises(CudaError) as error:
            second.room(4)
        self.assertEqual(error.exception.code, INVALID_CONTEXT)
        self.device.use()

    def test_what_is_not_known_fails_only_where_it_is_executed(self):
        text = READ.replace("ret;", "ret; tcgen05.alloc [%a], 32;")
        d = self.device
        a, b = d.up(("I", [77])), d.room(4)
        d.launch(d.kernel(text), [a, b], block=1)
        self.assertEqual(d.down(b, "I", 1), [77])

    def test_threads_have_memory_of_their_own(self):
        d = self.device
        to = d.room(4 * 64)
        d.launch(d.kernel(LOCAL), [to], block=64)
        table = [10, -20, 30, 40]
        self.assertEqual(d.down(to, "i", 64), [i + table[i % 4] for i in range(64)])

    def tile(self, test):
        d = self.device
        matrix = [r * 192 + c for r in range(128) for c in range(192)]
        at, to = d.up(("H", matrix)), d.room(4096)
        room = (ctypes.c_uint64 * 24)()
        start = (ctypes.addressof(room) + 63) // 64 * 64
        tensor_map = (ctypes.c_uint64 * 16).from_buffer(room, start - ctypes.addressof(room))
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        call("cuTensorMapEncodeTiled", tensor_map, 9, 2, at, (u64 * 2)(192, 128), (u64 * 1)(384),
             (u32 * 2)(64, 32), (u32 * 2)(1, 1), 0, 3, 0, 0)
        d.launch(d.kernel(TILE.replace("TEST", test)), [tensor_map, to], block=64, shared=4096)
        wanted = [(32 + i // 64) * 192 + 64 + i % 64 for i in range(2048)]
        return d.down(to, "H", 2048), wanted

    def test_a_tile_comes_by_tma(self):
        got, wanted = self.tile(TEST)
        self.assertEqual(got, wanted)

    def test_a_tile_that_is_not_waited_for_is_found(self):
        got, _ = self.tile("")
        self.assertEqual(got, [0xFFFF] * 2048)


if __name__ == "__main__":
    unittest.main()
