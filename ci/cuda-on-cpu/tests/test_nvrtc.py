"""What NVRTC makes of kernels in CUDA C++, where CUDA_PATH has it."""

import ctypes
import math
import os
import random
import unittest

from emulator import Device, bf16, from_bf16

CUDA = os.environ.get("CUDA_PATH", "")
NVRTC = os.path.join(CUDA, "lib", "libnvrtc.so.13")

SOFTMAX = """
extern "C" __global__ void k(const float* x, float* y, int n, const __grid_constant__ int4 info) {
    extern __shared__ __align__(16) unsigned char room[];
    float* sums = (float*)room;
    int t = threadIdx.x;
    float v = 0;
    for (int i = t; i < n; i += blockDim.x) v += __expf(x[blockIdx.x * n + i]) * info.x;
    sums[t] = v;
    __syncthreads();
    for (int h = blockDim.x / 2; h > 0; h /= 2) {
        if (t < h) sums[t] += sums[t + h];
        __syncthreads();
    }
    for (int i = t; i < n; i += blockDim.x) {
        float z = x[blockIdx.x * n + i];
        y[blockIdx.x * n + i] = expf(z) / sums[0] + sinf(z) + powf(fabsf(z), 1.5f) + tanhf(z)
            + erff(z) + sqrtf(fabsf(z)) + logf(1 + z * z);
    }
}
"""

WMMA = """
#include <cuda_bf16.h>
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void k(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}
"""

CALLS = """
struct Pair { float a, b; int c[3]; };
__device__ int table[4] = {1, -2, 3, 4};
__device__ __noinline__ Pair made(float x) { return Pair{x, 2 * x, {1, 2, 3}}; }
__device__ __noinline__ float used(float x, Pair p, int* n) {
    *n += 1;
    return x < 0 ? p.a * x : p.b * x + p.c[1] * table[*n & 3];
}
__device__ __noinline__ int factorial(int n) {
    int r = 1;
    for (int i = 2; i <= n; i++) r *= i;
    return r;
}
extern "C" __global__ void k(const float* x, float* y, int n) {
    int i = threadIdx.x, m = i;
    if (i >= n) return;
    Pair p = made(x[i]);
    float r = i % 3 ? used(x[i], p, &m) : 0;
    y[i] = r + factorial(i % 5) + m;
}
"""


def compiled(source):
    nvrtc, program, size = ctypes.CDLL(NVRTC), ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None)
    options = ["--gpu-architecture=sm_90a", f"--include-path={CUDA}/include",
               f"--include-path={CUDA}/include/cccl"]
    array = (ctypes.c_char_p * 3)(*[o.encode() for o in options])
    if nvrtc.nvrtcCompileProgram(program, 3, array):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.value.decode())
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, text)
    return text.value.decode()


@unittest.skipUnless(os.path.exists(NVRTC), "CUDA_PATH has no NVRTC")
class Compiled(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = Device()
        cls.random = random.Random(5)

    def near(self, got, wanted):
        for n, (g, w) in enumerate(zip(got, wanted)):
            self.assertTrue(math.isclose(g, w, rel_tol=2e-5, abs_tol=1e-5), f"{n}: {g}, not {w}")

    def test_functions_and_a_sum_in_shared_memory(self):
        d, n = self.device, 300
        rows = [[self.random.gauss(0, 1) for _ in range(n)] for _ in range(2)]
        x, y = d.up(("f", [v for row in rows for v in row])), d.room(8 * n)
        info = (ctypes.c_int * 4)(2, 0, 0, 0)
        kernel = d.kernel(compiled(SOFTMAX))
        d.launch(kernel, [x, y, ctypes.c_int(n), info], block=128, grid=2, shared=512)
        wanted = [math.exp(z) / (2 * sum(map(math.exp, row))) + math.sin(z) + abs(z) ** 1.5
                  + math.tanh(z) + math.erf(z) + math.sqrt(abs(z)) + math.log(1 + z * z)
                  for row in rows for z in row]
        self.near(d.down(y, "f", 2 * n), wanted)

    def test_wmma(self):
        d = self.device
        a = [[bf16(self.random.gauss(0, 1)) for _ in range(16)] for _ in range(16)]
        b = [[bf16(self.random.gauss(0, 1)) for _ in range(16)] for _ in range(16)]
        up = lambda rows: d.up(("H", [v for row in rows for v in row]))
        c = d.room(1024)
        d.launch(d.kernel(compiled(WMMA)), [up(a), up(b), c])
        wanted = [sum(from_bf16(x) * from_bf16(y) for x, y in zip(r, s)) for r in a for s in b]
        self.near(d.down(c, "f", 256), wanted)

    def test_calls_of_functions(self):
        d, n, table = self.device, 30, [1, -2, 3, 4]
        given = [(i - 12) * 0.5 for i in range(n)]
        x, y = d.up(("f", given)), d.room(4 * n)
        d.launch(d.kernel(compiled(CALLS)), [x, y, ctypes.c_int(n)])
        wanted = []
        for i, v in enumerate(given):
            m, r = i, 0
            if i % 3:
                m += 1
                r = v * v if v < 0 else 2 * v * v + 2 * table[m & 3]
            wanted.append(r + math.factorial(i % 5) + m)
        self.near(d.down(y, "f", n), wanted)


if __name__ == "__main__":
    unittest.main()
