"""A kernel that does what it may not loses its device. Each does so in a process of its own; no
test here may use the device in the process that starts them."""

import ctypes
import unittest

from emulator import ILLEGAL_ADDRESS, LAUNCH_FAILED, CudaError, Device, call, failing

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

SHARED = """
.visible .entry k(.param .u32 at) {
    .shared .align 4 .b8 room[64];
    .reg .b32 %a, %x;
    ld.param.u32 %a, [at]; mov.u32 %x, room; add.u32 %a, %a, %x;
    st.shared.u32 [%a], %x;
    ret;
}
"""

RECURSIVE = """
.func f() { call f; ret; }
.visible .entry k() { call f; ret; }
"""


class Faults(unittest.TestCase):
    def read(self, distance, free=False, device=0):
        def work():
            other = Device(device)
            at = other.up(("I", [1, 2, 3, 4]))
            other.wait()
            if free:
                call("cuMemFree_v2", at)
            d = Device()
            to = d.room(4)
            d.launch(d.kernel(READ), [ctypes.c_uint64(at.value + distance), to])
            d.wait()
        return work

    def test_a_kernel_reads_what_is_its_own(self):
        failing(self, 0, self.read(12))

    def test_a_kernel_may_not_leave_its_memory(self):
        for distance in (16, -4, 1 << 20):
            failing(self, ILLEGAL_ADDRESS, self.read(distance))

    def test_a_kernel_may_not_read_what_was_freed(self):
        failing(self, ILLEGAL_ADDRESS, self.read(0, free=True))

    def test_a_kernel_may_not_read_another_devices_memory(self):
        failing(self, ILLEGAL_ADDRESS, self.read(0, device=1))

    def test_an_address_is_aligned(self):
        failing(self, ILLEGAL_ADDRESS, self.read(2))

    def test_shared_memory_has_an_end(self):
        def work(at):
            d = Device()
            d.launch(d.kernel(SHARED), [ctypes.c_uint32(at)], block=1, shared=16)
            d.wait()
        failing(self, 0, lambda: work(60))
        failing(self, ILLEGAL_ADDRESS, lambda: work(64))
        failing(self, ILLEGAL_ADDRESS, lambda: work(-4 & 0xFFFFFFFF))

    def test_after_a_kernels_error_nothing_works(self):
        def work():
            d = Device()
            try:
                self.read(64)()
            except CudaError:
                pass
            d.up(("I", [1]))
        failing(self, ILLEGAL_ADDRESS, work)

    def test_what_is_not_known_is_refused_when_it_is_executed(self):
        def work():
            d = Device()
            text = READ.replace("ret;", "tcgen05.alloc [%a], 32; ret;")
            d.launch(d.kernel(text), [d.up(("I", [77])), d.room(4)], 1)
            d.wait()
        failing(self, LAUNCH_FAILED, work)

    def test_recursion_is_refused_when_it_is_executed(self):
        def work():
            d = Device()
            d.launch(d.kernel(RECURSIVE), [])
            d.wait()
        failing(self, LAUNCH_FAILED, work)


if __name__ == "__main__":
    unittest.main()
