"""zeropp's attention beside PyTorch's scaled_dot_product_attention, on one core.

    bench/outside/attention.py PROGRAM [ROUNDS]

PROGRAM is that of `cargo bench --bench attention --no-run`. Both go from the fused projection
[1, tokens, 3·heads·64] to the output, causal, and back to the projection's gradient. In each round
both take their turns at each size; what counts is processor time, and the least of it.
"""
import os
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

SIZES = [(128, 16), (256, 12), (1024, 16), (4096, 4), (8192, 2)]
DIMENSION, REPEATS = 64, 5


def torch_times(precision, tokens, heads):
    """The least milliseconds of a forward and of a backward."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    width = heads * DIMENSION
    qkv = torch.randn(1, tokens, 3 * width).to(dtype).requires_grad_()
    dy = torch.randn(1, tokens, width).to(dtype)
    best = [float("inf")] * 2
    for _ in range(REPEATS):
        start = time.thread_time()
        parts = qkv.split(width, dim=2)
        q, k, v = (t.view(1, tokens, heads, DIMENSION).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(1, tokens, width)
        middle = time.thread_time()
        torch.autograd.grad(y, qkv, dy)
        times = [middle - start, time.thread_time() - middle]
        best = [min(a, b * 1e3) for a, b in zip(best, times)]
    return best


def zeropp_times(program, precision, tokens, heads):
    """The same."""
    words = [precision, tokens, heads, DIMENSION, REPEATS]
    command = [program, *map(str, words)]
    kept = {**os.environ, "MIMALLOC_PURGE_DELAY": "-1"}  # Pages, as zeropp's command has it.
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=kept).stdout
    return [float(word) for word in out.split()]


def main():
    program, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    # One thread: with two the backward's would not be this thread's time. PyTorch runs a backward
    # on the CPU in the thread that asks for it.
    torch.set_num_threads(1)
    best = {}
    for _ in range(rounds):
        for precision in ["fp32", "bf16"]:
            for tokens, heads in SIZES:
                for name, times in [
                    ("zeropp", zeropp_times(program, precision, tokens, heads)),
                    ("PyTorch", torch_times(precision, tokens, heads)),
                ]:
                    key = (precision, tokens, heads, name)
                    known = best.get(key, [float("inf")] * 2)
                    best[key] = [min(a, b) for a, b in zip(known, times)]
    print("| | tokens × heads | zeropp F, B ms | PyTorch F, B ms | F | B | both |")
    print("|---|---|---|---|---|---|---|")
    for precision in ["fp32", "bf16"]:
        for tokens, heads in SIZES:
            own = best[precision, tokens, heads, "zeropp"]
            other = best[precision, tokens, heads, "PyTorch"]
            ratios = [other[0] / own[0], other[1] / own[1], sum(other) / sum(own)]
            shown = " | ".join(f"{x:.2f}" for x in ratios)
            times = " | ".join(f"{f:.2f}, {b:.2f}" for f, b in (own, other))
            print(f"| {precision} | {tokens} × {heads} | {times} | {shown} |")


if __name__ == "__main__":
    main()
