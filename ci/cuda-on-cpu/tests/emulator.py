"""Drives the emulator's libcuda from Python. CUDA_ON_CPU_LIBRARY names it; tests/run sets it."""

import ctypes
import os
import struct

os.environ.setdefault("CUDA_ON_CPU_DEVICES", "2")
os.environ.setdefault("CUDA_ON_CPU_DELAY_US", "1000")
os.environ.setdefault("CUDA_ON_CPU_SEED", "7")
os.environ["CUDA_ON_CPU_QUIET"] = "1"

POINTER = ctypes.c_void_p
ADDRESS = ctypes.c_uint64
ILLEGAL_ADDRESS, LAUNCH_FAILED, INVALID_HANDLE, INVALID_CONTEXT = 700, 719, 400, 201
INVALID_VALUE = 1

cuda = ctypes.CDLL(os.environ["CUDA_ON_CPU_LIBRARY"])


class CudaError(Exception):
    def __init__(self, call, code):
        super().__init__(f"{call}: error {code}")
        self.code = code


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise CudaError(name, code)


class Device:
    """A device with a stream. `use` makes it the current one."""

    def __init__(self, number=0):
        call("cuInit", 0)
        self.context = POINTER()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), number)
        self.use()
        self.stream = self.new_stream()

    def use(self):
        call("cuCtxSetCurrent", self.context)

    def new_stream(self):
        stream = POINTER()
        call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def kernel(self, ptx, name="k"):
        module, function = POINTER(), POINTER()
        call("cuModuleLoadData", ctypes.byref(module), whole(ptx).encode())
        call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def room(self, size):
        at = ADDRESS()
        call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return at

    def up(self, data, stream=None):
        """Copies bytes, or (format, numbers), into new memory."""
        data = data if isinstance(data, bytes) else pack(*data)
        at = self.room(max(len(data), 1))
        size = ctypes.c_size_t(len(data))
        call("cuMemcpyHtoDAsync_v2", at, data, size, stream or self.stream)
        return at

    def down(self, at, letter, count, stream=None):
        size = struct.calcsize(letter) * count
        data = ctypes.create_string_buffer(size)
        stream = stream or self.stream
        call("cuMemcpyDtoHAsync_v2", data, at, ctypes.c_size_t(size), stream)
        call("cuStreamSynchronize", stream)
        return list(struct.unpack(f"{count}{letter}", data.raw))

    def launch(self, function, arguments, block=32, grid=1, shared=0, stream=None):
        where = [ctypes.cast(ctypes.byref(a), POINTER) for a in arguments]
        array = (POINTER * max(len(where), 1))(*where)
        block = block if isinstance(block, tuple) else (block, 1, 1)
        grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
        stream = stream or self.stream
        call("cuLaunchKernel", function, *grid, *block, shared, stream, array, None)

    def wait(self, stream=None):
        call("cuStreamSynchronize", stream or self.stream)


def pack(letter, numbers):
    return struct.pack(f"{len(numbers)}{letter}", *numbers)


def bits(x):
    """The bits of a number as a float."""
    return struct.unpack("I", struct.pack("f", x))[0]


def single(x):
    """Rounded to fp32."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")


def bf16(x):
    """The bits of a number as a bf16, to the nearest, ties to even."""
    b = bits(x)
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16


def from_bf16(b):
    return struct.unpack("f", struct.pack("I", b << 16))[0]


def whole(ptx):
    """With a head, where it has none."""
    if ".version" in ptx:
        return ptx
    return ".version 8.7\n.target sm_90a\n.address_size 64\n" + ptx


def event():
    made = POINTER()
    call("cuEventCreate", ctypes.byref(made), 2)
    return made


def failing(test, code, work):
    """`work` runs in a process of its own, as the device is lost afterwards, and fails so."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        seen = 0
        try:
            work()
        except CudaError as error:
            seen = error.code
        os.write(write, struct.pack("i", seen))
        os._exit(0)
    os.close(write)
    seen = os.read(read, 4)
    os.close(read)
    os.waitpid(child, 0)
    test.assertEqual(seen, struct.pack("i", code))
