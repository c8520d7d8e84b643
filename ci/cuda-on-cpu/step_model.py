"""A step's time by a model that rests on counts: `step_model.py [--check] ZEROPP [MODEL …]`.

zeropp trains at real shapes on the emulator, which executes some blocks of each launch
(CUDA_ON_CPU_BLOCKS) and says what all of them read, write and multiply. A run of one layer is taken
from a run of two, and one of one micro-batch from one of two: what is left is a layer's F, B and W.
A step is one unit, so that gathers, and sums over units, are not a micro-batch's.
Times are these counts at the rates below, launch by launch; communication that is not hidden is
what `zeropp plan` simulates for blocks that take this long. The environment is that of
ci/cuda-on-cpu/run. With --check the launches of a layer and its products are held against LIMITS,
for the models there; nothing is executed then."""

import collections
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Settings of a run; its layers, micro-batches of a step, tokens of one; FLOP of a token by PaLM's
# formula, as torchtitan counts (6 a parameter of products, and 12 · layers · width of heads ·
# tokens of a sample); bytes a second of the card's memory by its data sheet.
Model = collections.namedtuple("Model", "settings layers micro_batches tokens flop memory")
H100, H200 = 3.35e12, 4.8e12
GPT2_FLOP = 6 * 123_532_032 + 12 * 12 * 768 * 1024
MODELS = {
    "llama3-8b": Model("--model llama3-8b --seq 4096 --micro-batch-size 1", 32, 8, 4096,
                       6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 4096 * 4096, H100),
    "gpt2-124m": Model("--model gpt2 --seq 1024 --micro-batch-size 8", 12, 4, 8192, GPT2_FLOP,
                       H100),
    "qwen3-0.6b": Model("--model qwen3-0.6b --seq 4096 --micro-batch-size 1", 28, 8, 4096,
                        6 * 595_984_384 + 12 * 28 * 2048 * 4096, H100),
    # As it was measured (docs/benchmarks/2026-11-26-h200.md).
    "gpt2-on-h200": Model("--model gpt2 --seq 1024 --micro-batch-size 16", 12, 2, 16384, GPT2_FLOP,
                          H200),
}
# Launches of a layer and micro-batch, FLOP and bytes of its products, as counted; other models were
# not.
LIMITS = {"llama3-8b": (42, 5.37e12, 4.7e9), "gpt2-124m": (36, 3.48e11, 6.9e8),
          "qwen3-0.6b": (47, 3.87e11, 7.6e8)}
# Ids where launches are only counted, so that few weights are drawn.
FEW_IDS = 512

# The goal's rate of large products; of kernels of ours on tensor cores what attention reached on an
# H200; the rest is assumed.
PEAK = 989e12
PRODUCTS = 650e12     # FLOP of cuBLASLt in a second
KERNELS = 230e12      # FLOP of other kernels' tensor cores
MEMORY = 0.78         # of the data sheet's bytes
CACHES = 5.0e12       # bytes that blocks ask for
INSTRUCTIONS = 0.5e12 # of warps, of 0.93e12
PROCESSORS = 132
WARPS = 16            # of a multiprocessor, below which its memory is not kept busy
GAP = 1e-6            # seconds between two launches
HOST = 5e-6           # seconds of the host for a launch: a step takes no less than all of them

Cost = collections.namedtuple("Cost", "launches moved flop seconds")
# Kernels by what their names begin with; the others are norms, sums, activation functions,
# residuals and turns.
KINDS = {"products": "product", "attention": "attention"}
# What a plan's step has beside communication that is not hidden.
COMPUTES = ("compute", "optimizer")


def execute(zeropp, model, layers, micro_batches, sample):
    """The log of a run's last step: a list of (name of the kernel, its words as numbers)."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        few = [] if sample else ["--vocab", str(FEW_IDS)]
        command = [zeropp, "run", "--device", "cuda", "--precision", "bf16", "--steps", "3",
                   *MODELS[model].settings.split(), "--layers", str(layers),
                   "--micro-batches", str(micro_batches), "--unit", str(micro_batches),
                   *few]
        environment = {**os.environ, "CUDA_ON_CPU_BLOCKS" if sample else "CUDA_ON_CPU_COUNT":
                       str(sample or 1), "CUDA_ON_CPU_LOG": str(log), "CUDA_ON_CPU_DEVICES": "1",
                       "CUDA_ON_CPU_CAPABILITY": "90", "CUDA_ON_CPU_MEMORY": str(80 << 30)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = [line.split()[1:] for line in log.read_text().splitlines()]
    return last_step(lines)


def last_step(lines):
    """A stream tells what its launches did in the order in which they were asked for."""
    did = collections.defaultdict(list)
    for words in lines:
        if words[0] == "did":
            did[words[2]].append(words)
    numbers = {stream: iter(all_of_it) for stream, all_of_it in did.items()}
    ran = {words[3] for all_of_it in did.values() for words in all_of_it}
    events = []
    for words in lines:
        if words[0] == "product":
            events.append(("product", dict(zip(words[3::2], map(int, words[4::2])))))
        elif words[0] == "launch":
            # Those with which the tuner measures a device are not executed.
            facts = next(numbers[words[2]]) if words[3] in ran else []
            if facts and facts[3] != words[3]:
                raise SystemExit(f"{words[3]} was launched, {facts[3]} has run")
            facts = dict(zip(facts[4::2], map(int, facts[5::2])))
            events.append((words[3], facts))
    # A step ends with the updates.
    updates = [i for i, (name, _) in enumerate(events) if name.startswith("adamw")]
    last = max(i for i, (name, _) in enumerate(events) if name == "product")
    return events[max(i for i in updates if i < last) + 1:updates[-1] + 1]


def cost(name, facts, memory):
    """What a launch costs on a card with this memory."""
    if name == "product":
        m, n, k, batch = (facts[key] for key in ("m", "n", "k", "batch"))
        flop = 2 * m * n * k * batch
        moved = batch * (facts["in"] * (m + n) * k + facts["out"] * m * n * (1 + facts["add"]))
        seconds = max(flop / PRODUCTS, moved / (MEMORY * memory))
    elif facts:
        flop, moved = facts["flop"], facts["read"] + facts["written"]
        busy = min(1, facts["warps"] / (PROCESSORS * WARPS))
        spread = min(1, facts["warps"] / (PROCESSORS * 4))
        seconds = max(flop / KERNELS / spread, moved / (MEMORY * memory) / busy,
                      facts["asked"] / CACHES / busy, facts["instructions"] / INSTRUCTIONS / spread)
    else: # only counted
        flop = moved = seconds = 0
    return Cost(1, moved, flop, seconds + GAP)


def totals(events, memory):
    """Costs by kernel."""
    costs = collections.defaultdict(lambda: Cost(0, 0, 0, 0))
    for name, facts in events:
        costs[name] = plus(costs[name], cost(name, facts, memory))
    return costs


def plus(a, b, times=1):
    return Cost(*(x + times * y for x, y in zip(a, b)))


def minus(a, b):
    zero = Cost(0, 0, 0, 0)
    return {key: plus(a.get(key, zero), b.get(key, zero), -1) for key in {*a, *b}}


def whole(costs, names=None):
    """The sum of all, or of kernels whose names begin so."""
    total = Cost(0, 0, 0, 0)
    for name, one in costs.items():
        if names is None or name.startswith(names):
            total = plus(total, one)
    return total


def show(title, costs):
    print(f"\n{title}")
    print(f"{'launches':>8} {'MB':>9} {'GFLOP':>9} {'µs':>9}")
    rows = sorted(costs.items(), key=lambda row: -row[1].seconds)
    rows = [row for row in rows if any(abs(x) > 1e-9 for x in row[1])]
    for name, one in [*rows, ("all", whole(costs))]:
        print(f"{one.launches:8.0f} {one.moved / 1e6:9.1f} {one.flop / 1e9:9.1f} "
              f"{one.seconds * 1e6:9.1f} {name}")


def parts(zeropp, model, sample):
    """A layer's micro-batch, its end of a step, and the same beside the layers."""
    def run_of(size):
        return totals(execute(zeropp, model, *size, sample), MODELS[model].memory)

    sizes = ((1, 1), (1, 2), (2, 1), (2, 2))
    with concurrent.futures.ThreadPoolExecutor(2) as two_at_a_time:
        run = dict(zip(sizes, two_at_a_time.map(run_of, sizes)))
    of_two = minus(run[2, 2], run[1, 2])
    of_one = minus(run[2, 1], run[1, 1])
    layer = minus(of_two, of_one)
    layer_end = minus(of_one, layer)
    beside = minus(minus(run[1, 2], run[1, 1]), layer)
    rest = minus(minus(minus(run[1, 1], layer), layer_end), beside)
    return layer, layer_end, beside, rest


def is_within_limits(zeropp, name):
    """Whether a layer and micro-batch are. Two operations are fused or not as threads meet: where
    there is one too many, they are counted again, three times at most."""
    for _ in range(3):
        layer = parts(zeropp, name, 0)[0]
        counts = whole(layer).launches, whole(layer).flop, whole(layer).moved
        within = all(count <= most for count, most in zip(counts, LIMITS[name]))
        print(f"{name}: launches of a layer and micro-batch, FLOP and bytes of its products:",
              *(f"{count:.4g} (at most {most:.4g})" for count, most in zip(counts, LIMITS[name])))
        if within:
            break
    return within


def not_hidden(zeropp, model, seconds):
    """Seconds of a step's communication that no computing hides, if its computing takes `seconds`,
    with ZeRO-3 over the eight GPUs of a node."""
    machines = pathlib.Path(__file__).parents[2] / "zeropp-plan/machines"
    text = (machines / ("h200.toml" if model.memory == H200 else "h100.toml")).read_text()
    text = re.sub("t_layer = [0-9.]+", "t_layer = 0", text)
    share, samples = 0.5, int(re.search("micro-batch-size ([0-9]+)", model.settings)[1])
    with tempfile.TemporaryDirectory() as folder:
        machine = pathlib.Path(folder) / "machine.toml"
        for _ in range(6):
            machine.write_text(re.sub("flops_share = [0-9.]+", f"flops_share = {share:.6f}", text))
            done = subprocess.run(
                [zeropp, "plan", *model.settings.split(), "--machine", machine, "--gpus", "8",
                 "--pp", "1", "--zero3", "8", "--recompute", "none", "--json", "--global-batch",
                 str(8 * model.micro_batches * samples)], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            terms = json.loads(done.stdout)["layouts"][0]["terms"]
            share = min(share * terms["compute"] / seconds, 1)
    if abs(terms["compute"] / seconds - 1) > 0.01:
        print(f"the plan computes for {terms['compute']:.3f} s instead of {seconds:.3f}")
    return sum(terms.values()) - sum(terms[name] for name in COMPUTES)


def row(zeropp, name, model, found):
    """A line of docs/gpu.md's table."""
    layer, layer_end, beside, rest = found
    step = whole(rest)
    step = plus(step, whole(beside), model.micro_batches)
    step = plus(step, whole(layer_end), model.layers)
    step = plus(step, whole(layer), model.layers * model.micro_batches)
    seconds = max(step.seconds, step.launches * HOST)
    waits = not_hidden(zeropp, model, seconds)
    one = whole(layer)
    kinds = [whole(layer, names).seconds for names in KINDS.values()]
    kinds.append(one.seconds - sum(kinds))

    def mfu(step):
        return f"{100 * model.micro_batches * model.tokens / step * model.flop / PEAK:.1f}%"
    print("|", name, "|", f"{one.launches:.0f}, {one.moved / 1e9:.1f}, {one.flop / 1e12:.2f}", "|",
          "+".join(f"{s * 1e3:.2f}" for s in kinds), "|",
          f"{seconds * 1e3:,.0f}, {mfu(seconds)}", "|",
          f"{(seconds + waits) * 1e3:,.0f}, {mfu(seconds + waits)} |")


def main():
    check = "--check" in sys.argv
    zeropp, *names = [word for word in sys.argv[1:] if word != "--check"]
    rows, good = [], True
    for name in names or (LIMITS if check else MODELS):
        if check:
            good &= is_within_limits(zeropp, name)
            continue
        found = parts(zeropp, name, 16)
        titles = ["a layer and micro-batch", "a layer's end of a step",
                  "beside the layers, a micro-batch", "beside them, the end of a step"]
        for title, costs in zip(titles, found):
            show(f"{name}: {title}", costs)
        rows.append((name, MODELS[name], found))
    if rows:
        print(f"\n| | launches, GB, TFLOP of a layer | {'+'.join(KINDS)}+rest, ms",
              "| step, ms, MFU | with communication |\n" + 5 * "|---" + "|")
    for one in rows:
        row(zeropp, *one)
    sys.exit(not good)


if __name__ == "__main__":
    main()
