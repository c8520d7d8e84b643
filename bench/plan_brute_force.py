#!/usr/bin/env python3
"""The first layout of a plan among real runs of all layouts, on this machine.

bench/plan_brute_force.py [--jobs N] [--ranks 2,2,3,4] [--seed S] [--rounds R] [--steps T]
                          [--within W] [--show] [--try N] [ZEROPP]
draws random small jobs on the threads engine, one for each number of ranks in turn. For each it
measures the machine, plans, and runs every layout there is: all P x D x K, micro-batch sizes, V,
kinds that plans know and, where a kind has units, U. What else a layout has (recomputation,
ZeRO-1, prefetch) is what a plan that keeps to it chooses. A round runs each layout once, in another
order each time, and the plan's first some times in between; a layout's time is the median of a
run's steps over what the plan's first takes in the same round. After the first round those that
took more than W times the plan's first are left out; --show tells them all. Layouts whose ranks do
the same, whatever their kinds are called, run once. With --try the plan's first is that of
`zeropp plan --try N`, which has run its N best for a while.

What is printed for each job is the place of the plan's first among all of them by the medians of
the rounds, and its place beyond noise: behind those whose slowest round was faster than the fastest
of the first's own runs in all rounds. The others are ties. Ranks beyond the cores share them, which
no plan knows; their rows are marked.
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

from plan_against_runs import SIZES, output, steps_of

# Those of zeropp_schedule::schedules::KINDS that are planned; a plan says which have a shape.
KINDS = ["zeropp", "1f1b", "interleaved", "bf-pp", "interleaved-zb", "zb-h1", "zb-v", "v-half",
         "v-min"]
# Runs of the plan's first in a round, first and last among them.
OWN_RUNS = 5


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def draw(rng, ranks):
    """A job: its model, and its batch, which all meshes of so many ranks can share."""
    hidden, heads, seq = rng.choice(SIZES)
    sizes = ["--hidden", hidden, "--heads", heads, "--seq", seq, "--vocab", 512]
    sizes = [str(word) for word in sizes]
    layers = rng.choice([n for n in (3, 4, 5, 6) if n >= ranks])
    batch = ranks * rng.choice([2, 3, 4])
    return {"ranks": ranks, "sizes": sizes, "layers": layers, "batch": batch}


def shapes(job):
    """The flags of all layouts that differ in a mesh, a micro-batch's size, V, the kind or U."""
    n, batch = job["ranks"], job["batch"]
    for pp in divisors(n):
        for zero3 in divisors(n // pp):
            dp = n // pp // zero3
            for size in divisors(batch // (zero3 * dp)):
                for virtual in range(1, job["layers"] // pp + 1):
                    for kind in KINDS:
                        flags = {"pp": pp, "zero3": zero3, "dp": dp, "micro-batch-size": size,
                                 "virtual": virtual, "schedule": kind}
                        most = batch // (zero3 * dp * size) if kind == "zeropp" else 1
                        for unit in range(1, most + 1):
                            yield {**flags, "unit": unit} if kind == "zeropp" else flags


def layouts(zeropp, machine, job, tries):
    """The plan's first layout, and every layout there is, without those that run the same."""
    model = [*job["sizes"], "--layers", str(job["layers"])]
    ask = [zeropp, "plan", "--cpu", "--machine", machine, "--gpus", str(job["ranks"]),
           "--global-batch", str(job["batch"]), *model, "--json"]
    tried = ["--try", str(tries)] if tries else []
    first = json.loads(output([*ask, *tried]))["layouts"][0]
    all_of, programs = {first["command"]: first}, {first["program"]}
    for shape in shapes(job):
        fixed = [word for key, value in shape.items() for word in (f"--{key}", str(value))]
        asked = subprocess.run([*ask, *fixed], capture_output=True, text=True)
        if asked.returncode == 0:
            layout = json.loads(asked.stdout)["layouts"][0]
            if layout["program"] not in programs:
                programs.add(layout["program"])
                all_of[layout["command"]] = layout
    return first["command"], all_of


def step(zeropp, folder, steps, command):
    """Seconds of a step: the median of a run."""
    metrics = os.path.join(folder, "run.jsonl")
    words = [zeropp, *shlex.split(command)[1:], "--steps", str(steps), "--quiet"]
    output([*words, "--metrics", metrics])
    ran = steps_of(metrics)
    os.remove(metrics)
    return statistics.median(step["step_s"] for step in ran)


def once(rng, first, kept, run):
    """A round: each of the layouts in `kept` once, over what the first takes in it."""
    order = [command for command in kept if command != first]
    rng.shuffle(order)
    # The first between the others, evenly.
    each = max(1, -(-len(order) // (OWN_RUNS - 1)))
    own, took = [run(first)], {}
    for begin in range(0, len(order), each):
        took.update({command: run(command) for command in order[begin:begin + each]})
        own.append(run(first))
    middle = statistics.median(own)
    return middle, [t / middle for t in own], {command: t / middle for command, t in took.items()}


def place(first, rounds):
    """The first's place by medians; those before it beyond noise; its own range; the ratios."""
    own = [ratio for _, ratios, _ in rounds for ratio in ratios]
    every = {}
    for _, _, took in rounds:
        for command, ratio in took.items():
            every.setdefault(command, []).append(ratio)
    before = [c for c, ratios in every.items() if statistics.median(ratios) < 1]
    clearly = [c for c in before if len(every[c]) == len(rounds) and max(every[c]) < min(own)]
    best = min((statistics.median(ratios) for ratios in every.values()), default=1.0)
    return {"place": len(before) + 1, "clearly": clearly, "own": own, "best": min(1.0, best),
            "every": {first: [1.0], **every}}


def ran(zeropp, folder, rng, args, job):
    """A job measured for, planned, and run in all layouts: where the plan's first is."""
    machine = os.path.join(folder, "machine.toml")
    output([zeropp, "measure", "--zero3", str(job["ranks"]), *job["sizes"], "-o", machine])
    first, all_of = layouts(zeropp, machine, job, args.tries)
    run = lambda command: step(zeropp, folder, args.steps, command)
    kept, rounds = list(all_of), []
    for number in range(args.rounds):
        rounds.append(once(rng, first, kept, run))
        middle, own, took = rounds[-1]
        print(f"round {number + 1} of {len(kept)} layouts: the first {1e3 * middle:.1f} ms, "
              f"{min(own):.2f} to {max(own):.2f} of that; the others from "
              f"{min(took.values(), default=1):.2f}", file=sys.stderr, flush=True)
        if number == 0:
            kept = [first, *(command for command, ratio in took.items() if ratio <= args.within)]
    found = place(first, rounds)
    return {**found, "first": first, "all": all_of, "kept": len(kept),
            "measured": statistics.median(middle for middle, _, _ in rounds)}


def tell(args, number, job, found):
    cores = os.cpu_count() or 1
    shared = "" if job["ranks"] <= cores else " (shared cores)"
    clearly = len(found["clearly"])
    own = f"{min(found['own']):.3f} to {max(found['own']):.3f}"
    print(f"job {number}: {job['ranks']} ranks, {job['layers']} layers, batch {job['batch']}, "
          f"{' '.join(job['sizes'])}{shared}\n"
          f"  {len(found['all'])} layouts, {found['kept']} of them in all {args.rounds} rounds; "
          f"the plan's first is {found['place']}. by medians, {clearly + 1}. beyond noise\n"
          f"  it took {1e3 * found['measured']:.1f} ms, told as "
          f"{1e3 * found['all'][found['first']]['step_s']:.1f}; its own runs {own} of a round's "
          f"median; the best {found['best']:.3f}\n"
          f"  {found['first'].removeprefix('zeropp run ')}", flush=True)
    by_median = sorted(found["every"].items(), key=lambda pair: statistics.median(pair[1]))
    for command, ratios in by_median if args.show else by_median[:3]:
        told = found["all"][command]["step_s"] / found["all"][found["first"]]["step_s"]
        mark = "clearly faster" if command in found["clearly"] else ""
        mark = "the plan's first" if command == found["first"] else mark
        flags = command.split("--pp", 1)[1]
        print(f"    {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), told "
              f"{told:.3f}: --pp{flags}  {mark}".rstrip(), flush=True)


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    args.add_argument("--jobs", type=int, default=5)
    args.add_argument("--ranks", default="2,2,2,3,4")
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--steps", type=int, default=8)
    args.add_argument("--within", type=float, default=1.25)
    args.add_argument("--show", action="store_true")
    args.add_argument("--try", type=int, default=0, dest="tries")
    args.add_argument("zeropp", nargs="?", default="target/release/zeropp")
    args = args.parse_args()
    if args.steps < 3:
        sys.exit(f"steps = {args.steps}: the first two of a run do not count; use 3 or more")
    if args.within < 1:
        sys.exit(f"within = {args.within}: what is faster than the first stays; use 1 or more")
    rng = random.Random(args.seed)
    ranks = [int(n) for n in args.ranks.split(",")]
    jobs = [draw(rng, ranks[number % len(ranks)]) for number in range(args.jobs)]
    by_median = beyond_noise = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(jobs, 1):
            found = ran(args.zeropp, folder, rng, args, job)
            tell(args, number, job, found)
            by_median += found["place"] <= 3
            beyond_noise += len(found["clearly"]) <= 2
    print(f"the plan's first is among the three best in {by_median} of {len(jobs)} jobs by "
          f"medians, and in {beyond_noise} where ties within noise are its own")


if __name__ == "__main__":
    main()
