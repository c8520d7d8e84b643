"""NCCL between processes, each with a device of its own. The process that starts them uses none."""

import ctypes
import os
import struct
import unittest

from emulator import POINTER, Device, cuda
from test_streams import Config, Id, settled

RANKS, LEN = 3, 50


def rank(number, name):
    """Sums over all ranks, and what the rank before has sent."""
    device, comm = Device(number % 2), POINTER()
    config = Config(20, 0xCAFEBEEF, 21403, 0)
    cuda.ncclCommInitRankConfig(ctypes.byref(comm), RANKS, name, number, ctypes.byref(config))
    settled(comm)
    x = device.up(("f", [float(number + 1)] * LEN))
    total, message = device.room(4 * LEN), device.room(4 * LEN)
    cuda.ncclAllReduce(x, total, ctypes.c_size_t(LEN), 7, 0, comm, device.stream)
    settled(comm)
    # The stand-in keeps no order between the streams of a communicator.
    device.wait()
    other = device.new_stream()
    size, after, before = ctypes.c_size_t(4 * LEN), (number + 1) % RANKS, (number - 1) % RANKS
    cuda.ncclSend(x, size, 1, after, comm, device.stream)
    settled(comm)
    cuda.ncclRecv(message, size, 1, before, comm, other)
    settled(comm)
    return device.down(total, "f", LEN) + device.down(message, "f", LEN, stream=other)


class Processes(unittest.TestCase):
    def test_ranks_of_several_processes(self):
        name = Id()
        cuda.ncclGetUniqueId(ctypes.byref(name))
        pipes = []
        for number in range(RANKS):
            read, write = os.pipe()
            if os.fork() == 0:
                try:
                    os.write(write, struct.pack(f"{2 * LEN}f", *rank(number, name)))
                finally:
                    os._exit(0)
            os.close(write)
            pipes.append(read)
        for number, read in enumerate(pipes):
            got = os.read(read, 8 * LEN)
            wanted = [6.0] * LEN + [float((number - 1) % RANKS + 1)] * LEN
            self.assertEqual(got, struct.pack(f"{2 * LEN}f", *wanted), f"rank {number}")
        for _ in pipes:
            os.wait()


if __name__ == "__main__":
    unittest.main()
