#!/usr/bin/env python3
"""What many ranks of one process cost beside their compute.

bench/ranks.py [ZEROPP] trains models so small that the ranks do little else. For each number of
ranks it prints, a step: wall-clock and CPU seconds; what the ranks spend on telling each other how
it went ("told": from the last end of an optimizer step to the first action of the next step) and on
the global norm ("norm": from the last begin of an optimizer step to the last end), both in ms; and
the resident memory a rank, less that of a run with one rank.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

STEPS = 8
# Ranks: the pipeline's and a ZeRO-3 group's. All stages together have 15k parameters in blocks.
MESHES = [(1, 1), (64, 1), (64, 8)]
MODEL = "--hidden 4 --heads 1 --seq 4 --virtual 1 --micro-batches 1 --unit 1".split()


def run(zeropp, folder, pp, zero3):
    trace, metrics = (os.path.join(folder, name) for name in ("trace.json", "metrics.jsonl"))
    command = [zeropp, "run", "--pp", str(pp), "--zero3", str(zero3), "--layers", "64", *MODEL]
    command += ["--steps", str(STEPS), "--trace", trace, "--metrics", metrics]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)} failed")
    with open(metrics) as lines:
        steps = [step for step in map(json.loads, lines) if "step_s" in step]
    wall = statistics.median([step["step_s"] for step in steps][1:])
    return wall, (used.ru_utime + used.ru_stime) / STEPS, used.ru_maxrss, *between_steps(trace)


def between_steps(trace):
    """Medians of `told` and `norm` over the steps, in ms."""
    with open(trace) as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    ranks = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        ranks.setdefault(event["pid"], []).append(event)
    firsts = [[] for _ in range(STEPS + 1)]
    begins, ends = [[] for _ in range(STEPS)], [[] for _ in range(STEPS)]
    for actions in ranks.values():
        step, is_first = 0, True
        for action in actions:
            if is_first:
                firsts[step].append(action["ts"])
            is_first = action["args"].get("kind") == "optimizer step"
            if is_first:
                begins[step].append(action["ts"])
                ends[step].append(action["ts"] + action["dur"])
                step += 1
    told = [min(firsts[step + 1]) - max(ends[step]) for step in range(STEPS - 1)]
    norm = [max(ends[step]) - max(begins[step]) for step in range(STEPS)]
    return statistics.median(told) / 1e3, statistics.median(norm) / 1e3


def main():
    zeropp = sys.argv[1] if len(sys.argv) > 1 else "target/release/zeropp"
    alone = None
    with tempfile.TemporaryDirectory() as folder:
        print("ranks   wall s    CPU s  told ms  norm ms  MiB a rank")
        for pp, zero3 in MESHES:
            wall, cpu, resident, told, norm = run(zeropp, folder, pp, zero3)
            alone = alone or resident
            each = (resident - alone) / 1024 / (pp * zero3)
            times = f"{wall:>9.3f}{cpu:>9.3f}{told:>9.1f}{norm:>9.1f}"
            print(f"{pp * zero3:>5}{times}{each:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
