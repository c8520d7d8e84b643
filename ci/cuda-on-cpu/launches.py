"""Kernels that a layer launches, counted at real shapes: `launches.py ZEROPP [MODEL …]`.

Nothing is executed (CUDA_ON_CPU_COUNT). A run of one layer is taken from a run of two, and one of
one micro-batch from one of two: what is left is a layer's F, B and W of a micro-batch, and its
share of a step's end (reduction, norm, optimizer). The environment is that of ci/cuda-on-cpu/run.
Names of kernels come with how often, and with the most units that a launch had."""

import collections
import os
import pathlib
import subprocess
import sys
import tempfile

SHAPES = {
    "llama3-8b": """--model llama --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336
        --seq 4096 --micro-batch-size 1 --precision bf16""",
    "gpt2-124m": """--model gpt --hidden 768 --heads 12 --seq 1024
        --micro-batch-size 8 --precision bf16""",
    "qwen3-0.6b": """--model llama --hidden 1024 --heads 16 --kv-heads 8 --head-dim 128
        --qk-norm --intermediate 3072 --seq 4096 --micro-batch-size 1 --tied
        --precision bf16""",
}


def launches(zeropp, model, layers, micro_batches):
    """The launches of a run's last step by kernel, and the units of the largest of each."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        command = [zeropp, "run", "--device", "cuda", *SHAPES[model].split(), "--steps", "3",
                   "--layers", str(layers), "--micro-batches", str(micro_batches)]
        environment = {**os.environ, "CUDA_ON_CPU_COUNT": "1", "CUDA_ON_CPU_LOG": str(log),
                       "CUDA_ON_CPU_DEVICES": "1", "CUDA_ON_CPU_CAPABILITY": "90",
                       "CUDA_ON_CPU_MEMORY": str(80 << 30)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = [line.split()[1:] for line in log.read_text().splitlines()]
    # In a step the host reads the sums for the norm, and then the loss.
    reads = [i for i, words in enumerate(lines) if words[0] == "down"]
    counts, units = collections.Counter(), collections.Counter()
    for words in lines[reads[-3]:reads[-1]]:
        if words[0] == "launch":
            grid, block = (words.index(name) + 1 for name in ("grid", "block"))
            size = 1
            for factor in words[grid:grid + 3] + words[block:block + 3]:
                size *= int(factor)
            counts[words[3]] += 1
            units[words[3]] = max(units[words[3]], size)
    return counts, units


def minus(a, b):
    """What `a` has more than `b`, kernels that it has fewer of too."""
    return collections.Counter({name: a[name] - b[name] for name in a | b if a[name] != b[name]})


def show(title, counts, units):
    print(f"{title}: {sum(counts.values())}")
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {count:4} {name} {units[name] or ''}")


def main():
    zeropp, *models = sys.argv[1:]
    for model in models or SHAPES:
        runs = {(l, m): launches(zeropp, model, l, m) for l in (1, 2) for m in (1, 2)}
        units = runs[2, 2][1]
        layer = {m: minus(runs[2, m][0], runs[1, m][0]) for m in (1, 2)}
        of_micro_batch = minus(layer[2], layer[1])
        show(f"{model}, a layer and micro-batch", of_micro_batch, units)
        show(f"{model}, a layer's end of a step", minus(layer[1], of_micro_batch), units)
        one = minus(runs[1, 2][0], runs[1, 1][0])
        show(f"{model}, beside the layers, a micro-batch", minus(one, of_micro_batch), units)


if __name__ == "__main__":
    main()
