#!/usr/bin/env python3
"""How far plans are from real runs, on this machine.

bench/plan_against_runs.py [--jobs N] [--ranks 2,3,4] [--seed S] [--rounds R] [--steps T]
                           [--show] [--emulate] [ZEROPP]
draws random small jobs on the threads engine and prints, for each, predicted over measured: the
time of a step, the most memory that a rank holds at once, the kind of memory that is furthest off
(of those of 1 MiB or more), and what `--dry-run` says that the process needs over what it has
resident (of jobs whose models take 64 MiB or more). In each round each job's machine is measured,
with its model and its number of ranks, it is planned, and it runs, one right after the other, as a
machine that others use is another one a minute later; what is printed is the median over the
rounds, and their range.
Ranks beyond the cores share them: while one waits, others are faster than was measured, which no
plan knows. Their rows are marked. --show prints `zeropp plan --against` of each job's last run.

--emulate runs the same meshes and schedules with given times in place of a model, so that ranks
that share cores do not matter: the runtime's own step beside the simulator's.
"""

import argparse
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

# Hidden size, heads, tokens of a sample: a block of each takes 1 to 20 ms.
SIZES = [(128, 4, 64), (192, 6, 64), (256, 4, 128)]
SCHEDULES = ["zeropp", "1f1b", "interleaved", "zb-h1", "bf-pp"]
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# What metrics call a kind where they do not have its name.
KEYS = {"gathered weights": "gathered", "checkpoint": "save"}
# Kinds and jobs that are smaller tell nothing.
KIND_MIN, RESIDENT_MIN = 1 << 20, 64 << 20
TINY = ["--hidden", "16", "--heads", "1", "--seq", "16", "--vocab", "512"]


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
    args.add_argument("--show", action="store_true")
    args.add_argument("--emulate", action="store_true")
    args.add_argument("zeropp", nargs="?", default="target/release/zeropp")
    args = args.parse_args()
    rng = random.Random(args.seed)
    ranks = [int(n) for n in args.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [draw(rng, ranks) for _ in range(args.jobs)]
        if args.emulate:
            return emulations(args.zeropp, folder, args.steps, rng, jobs)
        for number in range(args.rounds):
            for job in jobs:
                ran = once(args.zeropp, folder, args.steps, job)
                job.setdefault("rounds", []).append(ran)
                # Rounds take many minutes: what was found is there if they are cut short.
                found = {k: v for k, v in ran.items() if k != "command"}
                print(f"round {number + 1}: {found}  {ran['command']}", file=sys.stderr, flush=True)
    if args.show:
        print("\n\n".join(job["told"] for job in jobs), end="\n\n")
    tell(jobs, os.cpu_count() or 1)


def once(zeropp, folder, steps, job):
    """A job measured for, planned and run."""
    machine, metrics = (os.path.join(folder, name) for name in ("machine.toml", "run.jsonl"))
    output([zeropp, "measure", "--zero3", str(job["ranks"]), *job["sizes"], "-o", machine])
    ask = [zeropp, "plan", "--cpu", "--machine", machine, "--gpus", str(job["ranks"]),
           "--global-batch", job["batch"], *job["model"], *job["fixed"]]
    plan = json.loads(output([*ask, "--json"]))
    first = plan["layouts"][0]
    command = [zeropp, *shlex.split(first["command"])[1:]]
    taken = resident([*command, "--steps", str(steps), "--quiet", "--metrics", metrics])
    ran = steps_of(metrics)
    job["told"] = output([*ask, "--against", metrics])
    os.remove(metrics)
    needed, kinds = dry_run(command)
    of_model = needed - dry_run(tiny(command))[0]
    measured = {kind: max(step["peak_bytes"][kind] for step in ran) for kind in kinds}
    off = {k: kinds[k] / measured[k] for k in kinds if measured[k] >= KIND_MIN}
    return {
        "command": first["command"].removeprefix("zeropp run "),
        "predicted": first["step_s"],
        "measured": statistics.median(step["step_s"] for step in ran),
        "memory": first["worst_bytes"] / max(step["at_once_bytes"] for step in ran),
        "kind": max(off.items(), key=lambda pair: abs(pair[1] - 1), default=("none", 1.0)),
        "resident": needed / taken if of_model >= RESIDENT_MIN else None,
    }


def resident(command):
    """Runs a command; the largest resident memory of its process, in bytes."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{shlex.join(command)}\n{said.decode()}")
    return used.ru_maxrss * 1024


def dry_run(command):
    """What a run predicts: bytes of all ranks, and the most of each kind on any rank."""
    text = output([*command, "--dry-run"])
    number, unit = re.search(r"^memory +([\d.]+) (\w+) for", text, re.M).groups()
    kinds = {}
    for line in text.split("Predicted peak memory of one rank")[-1].splitlines():
        name = re.match(r"[a-z ]*[a-z]", line)
        amounts = re.findall(r"([\d.]+) (B|KiB|MiB|GiB)\b", line)
        if name and amounts and name[0] not in ("sum", "most at once", "in an evaluation"):
            key = KEYS.get(name[0], name[0].replace(" ", "_"))
            kinds[key] = max(float(n) * UNITS[u] for n, u in amounts)
    return float(number) * UNITS[unit], kinds


def tiny(command):
    """The same command with hardly any model."""
    sized = TINY[::2]
    pairs = zip(command, [None, *command])
    return [w for w, before in pairs if w not in sized and before not in sized] + TINY


def emulations(zeropp, folder, steps, rng, jobs):
    """Jobs with given times: the runtime's step beside the simulator's."""
    costs, off = os.path.join(folder, "costs.toml"), []
    for job in jobs:
        fixed = dict(zip(job["fixed"][::2], job["fixed"][1::2]))
        stages = int(fixed["--pp"]) * int(fixed["--virtual"])
        times = lambda low, high: [round(rng.uniform(low, high)) for _ in range(stages)]
        with open(costs, "w", encoding="utf-8") as file:
            for key, low, high in [("t_f", 4e3, 9e3), ("t_b", 4e3, 9e3), ("t_w", 3e3, 8e3),
                                   ("t_gather", 200, 2e3), ("t_reduce", 200, 2e3)]:
                file.write(f"{key} = {times(low, high)}\n")
            file.write(f"t_comm = {rng.randrange(0, 500)}\n")
        fixed.pop("--recompute")
        ranks = int(fixed["--zero3"]) * int(fixed["--dp"])
        flags = [word for pair in fixed.items() for word in pair]
        flags += ["--layers", str(stages), "--micro-batches", str(int(job["batch"]) // ranks)]
        text = output([zeropp, "run", "--emulate", costs, "--steps", str(steps), *flags])
        found = re.search(r"measured \(median\), .* simulated: ([+-][\d.]+) %", text)
        off.append(abs(float(found[1])))
        print(f"{found[1]:>7} %  {shlex.join(flags)}", flush=True)
    print(f"{len(off)} emulations: off by {statistics.median(off):.2f} % in the median and "
          f"{max(off):.2f} % at worst")


def tell(jobs, cores):
    print(f"{'predicted':>10} {'measured':>9} {'ratio':>6} {'of rounds':>10} {'memory':>7} "
          f"{'a kind':>7} {'resident':>8}  job")
    ratios, alone, kinds, residents = [], [], [], []
    for job in jobs:
        rounds = job["rounds"]
        middle = lambda key: statistics.median(r[key] for r in rounds)
        each = [r["predicted"] / r["measured"] for r in rounds]
        ratio = statistics.median(each)
        ratios.append(ratio)
        shared = "" if job["ranks"] <= cores else " (shared cores)"
        if not shared:
            alone.append(ratio)
        name, kind = max((r["kind"] for r in rounds), key=lambda pair: abs(pair[1] - 1))
        kinds.append((kind, name))
        whole = [r["resident"] for r in rounds if r["resident"] is not None]
        residents += [statistics.median(whole)] if whole else []
        held = f"{residents[-1]:.3f}" if whole else "-"
        told, took = 1e3 * middle("predicted"), 1e3 * middle("measured")
        print(f"{told:7.1f} ms {took:6.1f} ms {ratio:6.2f} "
              f"{min(each):5.2f}-{max(each):.2f} {middle('memory'):7.3f} {kind:>7.3f} {held:>8}  "
              f"{rounds[0]['command']}{shared}")
    kind, name = max(kinds, key=lambda pair: abs(pair[0] - 1))
    print(f"memory: the kind that is furthest off is {name} at {kind:.3f} of what was measured")
    for words, all_of in [("all jobs", ratios), (f"at most {cores} ranks", alone),
                          ("resident", residents)]:
        if all_of:
            off = [abs(ratio - 1) for ratio in all_of]
            print(f"{words}: {len(off)}, off by {100 * statistics.median(off):.1f} % in the median "
                  f"and {100 * max(off):.1f} % at worst; ratio {statistics.median(all_of):.2f}")


if __name__ == "__main__":
    main()
