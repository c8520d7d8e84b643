#!/usr/bin/env python3
"""How far plans are from real runs, on this machine.

bench/plan_against_runs.py [--jobs N] [--ranks 2,3,4] [--seed S] [--rounds R] [--steps T] [ZEROPP]
draws random small jobs on the threads engine and prints, for each, predicted over measured: the
time of a step, and the most memory that a rank holds at once. In each round each job's machine is
measured, with its model and its number of ranks, it is planned, and it runs, one right after the
other, as a machine that others use is another one a minute later; what is printed is the median
over the rounds, and their range. Ranks beyond the cores share them: while one waits, others are
faster than was measured, which no plan knows. Their rows are marked.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile

# Hidden size, heads, tokens of a sample: a block of each takes 1 to 20 ms.
SIZES = [(128, 4, 64), (192, 6, 64), (256, 4, 128)]
SCHEDULES = ["zeropp", "1f1b", "interleaved", "zb-h1", "bf-pp"]


def draw(rng, ranks):
    """A job: its model, its mesh and what the plan keeps to."""
    n = rng.choice(ranks)
    pp = rng.choice([p for p in range(1, n + 1) if n % p == 0])
    zero3 = rng.choice([d for d in range(1, n // pp + 1) if n // pp % d == 0])
    schedule = rng.choice(SCHEDULES) if pp > 1 else "zeropp"
    virtual = 1 if schedule in ("1f1b", "zb-h1") else rng.choice([1, 2])
    if schedule in ("interleaved", "bf-pp"):
        virtual = 2
    hidden, heads, seq = rng.choice(SIZES)
    sizes = ["--hidden", hidden, "--heads", heads, "--seq", seq, "--vocab", 512]
    model = [*sizes, "--layers", pp * virtual * rng.choice([1, 2])]
    dp = n // pp // zero3
    micro_batches = rng.choice([2, 3, 4]) * pp
    fixed = ["--pp", pp, "--zero3", zero3, "--dp", dp, "--virtual", virtual]
    fixed += ["--schedule", schedule, "--micro-batch-size", 1]
    fixed += ["--recompute", rng.choice(["none", "none", "full"])]
    batch = micro_batches * zero3 * dp
    strings = lambda words: [str(word) for word in words]
    return {"ranks": n, "sizes": strings(sizes), "model": strings(model), "batch": str(batch),
            "fixed": strings(fixed)}


def output(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)}\n{done.stderr}")
    return done.stdout


def steps_of(path, skipped=2):
    with open(path) as lines:
        steps = [json.loads(line) for line in lines if line.strip()]
    return [step for step in steps if "step_s" in step][skipped:]


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    args.add_argument("--jobs", type=int, default=20)
    args.add_argument("--ranks", default="2,3,4")
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--steps", type=int, default=12)
    args.add_argument("zeropp", nargs="?", default="target/release/zeropp")
    args = args.parse_args()
    rng = random.Random(args.seed)
    ranks = [int(n) for n in args.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [draw(rng, ranks) for _ in range(args.jobs)]
        for _ in range(args.rounds):
            for job in jobs:
                job.setdefault("rounds", []).append(once(args.zeropp, folder, args.steps, job))
    tell(jobs, os.cpu_count() or 1)


def once(zeropp, folder, steps, job):
    """A job measured for, planned and run."""
    machine, metrics = (os.path.join(folder, name) for name in ("machine.toml", "run.jsonl"))
    output([zeropp, "measure", "--zero3", str(job["ranks"]), *job["sizes"], "-o", machine])
    plan = json.loads(output([
        zeropp, "plan", "--cpu", "--machine", machine, "--gpus", str(job["ranks"]),
        "--global-batch", job["batch"], *job["model"], *job["fixed"], "--json"]))
    first = plan["layouts"][0]
    command = [zeropp, *shlex.split(first["command"])[1:]]
    output([*command, "--steps", str(steps), "--quiet", "--metrics", metrics])
    ran = steps_of(metrics)
    os.remove(metrics)
    return {
        "command": first["command"].removeprefix("zeropp run "),
        "predicted": first["step_s"],
        "measured": statistics.median(step["step_s"] for step in ran),
        "memory": first["worst_bytes"] / max(step["at_once_bytes"] for step in ran),
    }


def tell(jobs, cores):
    print(f"{'predicted':>10} {'measured':>9} {'ratio':>6} {'of rounds':>10} {'memory':>7}  job")
    ratios, alone = [], []
    for job in jobs:
        rounds = job["rounds"]
        middle = lambda key: statistics.median(r[key] for r in rounds)
        each = [r["predicted"] / r["measured"] for r in rounds]
        ratio = statistics.median(each)
        ratios.append(ratio)
        shared = "" if job["ranks"] <= cores else " (shared cores)"
        if not shared:
            alone.append(ratio)
        told, took = 1e3 * middle("predicted"), 1e3 * middle("measured")
        print(f"{told:7.1f} ms {took:6.1f} ms {ratio:6.2f} "
              f"{min(each):5.2f}-{max(each):.2f} {middle('memory'):7.3f}  "
              f"{rounds[0]['command']}{shared}")
    for words, all_of in [("all jobs", ratios), (f"at most {cores} ranks", alone)]:
        if all_of:
            off = [abs(ratio - 1) for ratio in all_of]
            print(f"{words}: {len(off)}, off by {100 * statistics.median(off):.1f} % in the median "
                  f"and {100 * max(off):.1f} % at worst; ratio {statistics.median(all_of):.2f}")


if __name__ == "__main__":
    main()
