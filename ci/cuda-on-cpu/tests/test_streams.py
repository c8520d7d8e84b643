"""Streams run beside each other and are late by chance: a wait that is missing is found."""

import ctypes
import threading
import unittest

from emulator import POINTER, Device, call, cuda, event

# Writes a number to all places: 64 blocks of 32.
FILL = """
.visible .entry k(.param .u64 to, .param .u32 value) {
    .reg .b64 %a, %o; .reg .b32 %i, %n, %x;
    ld.param.u64 %a, [to]; ld.param.u32 %x, [value];
    mov.u32 %i, %ctaid.x; mov.u32 %n, %tid.x; mad.lo.u32 %i, %i, 32, %n;
    mul.wide.u32 %o, %i, 4; add.s64 %a, %a, %o;
    st.global.u32 [%a], %x;
    ret;
}
"""
N = 64 * 32
ORDERS = 50
CUDA_ERROR, IN_PROGRESS = 1, 7  # of NCCL


class Streams(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = Device()
        cls.other, cls.third = cls.device.new_stream(), cls.device.new_stream()
        cls.fill = cls.device.kernel(FILL)

    def write(self, at, value, stream):
        self.device.launch(self.fill, [at, ctypes.c_uint32(value)], grid=64, stream=stream)

    def handed_over(self, waits):
        """One stream writes and another reads; whether it read what was written."""
        d = self.device
        at = d.room(4 * N)
        self.write(at, 5, d.stream)
        if waits:
            done = event()
            call("cuEventRecord", done, d.stream)
            call("cuStreamWaitEvent", self.other, done, 0)
        got = d.down(at, "I", N, stream=self.other)
        d.wait()
        call("cuMemFree_v2", at)
        return got == [5] * N

    def test_an_event_orders_two_streams(self):
        self.assertTrue(all(self.handed_over(True) for _ in range(ORDERS)))

    def test_a_missing_wait_is_found(self):
        self.assertFalse(all(self.handed_over(False) for _ in range(ORDERS)))

    def test_streams_may_go_while_another_thread_waits_for_the_device(self):
        d, is_over = self.device, threading.Event()

        def come_and_go():
            d.use()
            while not is_over.is_set():
                call("cuStreamDestroy_v2", d.new_stream())

        others = [threading.Thread(target=come_and_go, daemon=True) for _ in range(2)]
        waiter = threading.Thread(
            target=lambda: (d.use(), [call("cuCtxSynchronize") for _ in range(500)]), daemon=True
        )
        for thread in [*others, waiter]:
            thread.start()
        waiter.join(timeout=60)
        is_over.set()
        self.assertFalse(waiter.is_alive(), "it still waits for a stream that is gone")

    def test_memory_that_is_used_again_too_early_is_found(self):
        """As a pool does that gives a tensor's room away while another stream still reads it."""
        d, wrong = self.device, 0
        at, copy = d.room(4 * N), d.room(4 * N)
        for _ in range(ORDERS):
            self.write(at, 1, d.stream)
            d.wait()
            call("cuMemcpyDtoDAsync_v2", copy, at, ctypes.c_size_t(4 * N), self.other)
            self.write(at, 2, d.stream)
            d.wait(self.other)
            d.wait()
            wrong += d.down(copy, "I", N) != [1] * N
        self.assertGreater(wrong, 0)

    def out_and_back(self, *waits):
        """A stream writes, others copy out to pinned memory and back into room that the first has
        used, which then reads; whether that is what was written. Of four waits these are there."""
        d = self.device
        at, room, host, size = d.room(4 * N), d.room(4 * N), POINTER(), ctypes.c_size_t(4 * N)
        call("cuMemHostAlloc", ctypes.byref(host), size, 1)

        def follows(waiting, other, name):
            if name in waits:
                done = event()
                call("cuEventRecord", done, other)
                call("cuStreamWaitEvent", waiting, done, 0)
        self.write(at, 5, d.stream)
        follows(self.other, d.stream, "written")
        call("cuMemcpyDtoHAsync_v2", host, at, size, self.other)
        follows(d.stream, self.other, "out")
        self.write(at, 6, d.stream)
        self.write(room, 7, d.stream)
        follows(self.third, d.stream, "used")
        call("cuMemcpyHtoDAsync_v2", room, host, size, self.third)
        follows(d.stream, self.third, "back")
        got = d.down(room, "I", N)
        [d.wait(stream) for stream in (self.other, self.third)]
        # What came too early has gone by now.
        got = [got, d.down(room, "I", N)]
        [call("cuMemFree_v2", memory) for memory in (at, room)]
        call("cuMemFreeHost", host)
        return got == [[5] * N] * 2

    def test_copies_out_and_back_want_four_waits(self):
        waits = ["written", "out", "used", "back"]
        self.assertTrue(all(self.out_and_back(*waits) for _ in range(ORDERS)))
        for wait in waits:
            rest = [other for other in waits if other != wait]
            self.assertFalse(all(self.out_and_back(*rest) for _ in range(ORDERS)), wait)

    def test_an_event_counts_as_done_only_when_it_is(self):
        d = self.device
        done = event()
        at = d.room(4 * N)
        for _ in range(20):
            self.write(at, 3, d.stream)
        call("cuEventRecord", done, d.stream)
        call("cuEventSynchronize", done)
        self.assertEqual(cuda.cuEventQuery(done), 0)
        self.assertEqual(d.down(at, "I", N, stream=self.other), [3] * N)


class Config(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                ("blocking", ctypes.c_int)]


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Nccl(unittest.TestCase):
    """Two ranks, each with a device of its own, on the same streams."""

    def on_ranks(self, work):
        name = Id()
        cuda.ncclGetUniqueId(ctypes.byref(name))
        results = [None, None]

        def rank(number):
            device, comm = Device(number), POINTER()
            config = Config(20, 0xCAFEBEEF, 21403, 0)
            cuda.ncclCommInitRankConfig(ctypes.byref(comm), 2, name, number,
                                        ctypes.byref(config))
            state = lambda: settled(comm)
            state()
            results[number] = work(number, device, comm, state)
            cuda.ncclCommAbort(comm)
        threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
        [t.start() for t in threads]
        [t.join(60) for t in threads]
        return results

    def test_a_sum_of_two_devices(self):
        def work(number, device, comm, state):
            x = device.up(("f", [number + 1.0] * 100))
            total = device.room(400)
            cuda.ncclAllReduce(x, total, ctypes.c_size_t(100), 7, 0, comm, device.stream)
            state()
            return device.down(total, "f", 100)
        self.assertEqual(self.on_ranks(work), [[3.0] * 100] * 2)

    def message(self, wrong_device):
        rooms = {}

        def work(number, device, comm, state):
            x = device.up(("f", [7.0] * 100))
            device.wait()
            rooms[number] = x
            while len(rooms) < 2:
                pass
            x = rooms[1 - number] if wrong_device and number == 0 else x
            one = ctypes.c_size_t(400)
            if number == 0:
                cuda.ncclSend(x, one, 1, 1, comm, device.stream)
            else:
                cuda.ncclRecv(x, one, 1, 0, comm, device.stream)
            state()
            if number == 0:
                device.wait()
            return state()
        return self.on_ranks(work)[0]

    def test_a_message_comes_from_its_own_device(self):
        self.assertEqual(self.message(False), 0)
        self.assertEqual(self.message(True), CUDA_ERROR)


def settled(comm):
    state = ctypes.c_int(IN_PROGRESS)
    while state.value == IN_PROGRESS:
        cuda.ncclCommGetAsyncError(comm, ctypes.byref(state))
    return state.value


if __name__ == "__main__":
    unittest.main()
