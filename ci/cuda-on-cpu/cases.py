"""Runs of zeropp on CUDA on the CPU, against the CPU backend's: `cases.py ZEROPP ORDERS [gate]`.

ORDERS: in how many orders of the streams a step is tried, all layouts together. With `gate` some of
the cases are left out. The environment is that of ci/cuda-on-cpu/run, which builds what this needs.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

MODEL = """--model llama --layers 2 --hidden 64 --heads 4 --kv-heads 2 --intermediate 128 --seq 32
    --micro-batch-size 2 --micro-batches 2 --lr 1e-2 --warmup 0""".split()
# CubeCL's fp32 products are TF32 from compute capability 8.0 on; as 7.5 they are fp32's.
WITHOUT_TF32, CUBECL = "75", {"ZEROPP_CUBLASLT_LIB": "none"}
# What the first step says: CubeCL's words are counted, and may change.
COMPILED = "first step: [1-9][0-9]* kernels compiled"
# As GPUs and CPUs sum in other orders; after three steps.
FP32, BF16 = 2e-4, 2e-3

# Name, GPUs, tolerance, and what a run adds to MODEL.
CASES = [
    ("fp32, one rank", 1, FP32, ""),
    ("bf16, one rank", 1, BF16, "--precision bf16"),
    ("fp32, dropout, one rank", 1, FP32, "--dropout 0.2"),
    ("threads, P 2 on one GPU", 1, FP32, "--pp 2"),
    ("threads, P 2 on two", 2, FP32, "--pp 2"),
    ("threads, P 2 × D 2 on four, bf16", 4, BF16,
     "--pp 2 --zero3 2 --precision bf16"),
    ("threads, tied weights on two", 2, FP32, "--pp 2 --tied"),
    ("threads, tied weights on two, bf16", 2, BF16, "--pp 2 --tied --precision bf16"),
    ("threads, all recomputed, on two", 2, FP32, "--pp 2 --recompute full"),
    ("threads, Muon, D 2 on two", 2, FP32, "--zero3 2 --optimizer muon"),
    ("threads, D 2 × K 2, ZeRO-1 on four", 4, FP32, "--zero3 2 --dp 2 --zero1"),
    ("threads, validation and a text on two", 2, FP32,
     "--pp 2 --split 90,10 --eval-every 2 --eval-steps 1 --sample-every 3 --prompt the"),
    ("threads, a split head on two", 2, FP32,
     "--pp 2 --vocab 300 --schedule zeropp:head-split=1,2"),
    ("threads, a split head on two, bf16", 2, BF16,
     "--pp 2 --vocab 300 --schedule zeropp:head-split=1,2 --precision bf16"),
    ("nccl, a split head on two", 2, FP32,
     "--engine nccl --pp 2 --vocab 300 --schedule zeropp:head-split=2,1"),
    ("nccl, a split tied head, P 2 × D 2 on four", 4, FP32,
     "--engine nccl --pp 2 --zero3 2 --tied --vocab 300 --schedule zeropp:head-split=1,2"),
    ("nccl, P 2 × D 2 on four", 4, FP32, "--engine nccl --pp 2 --zero3 2"),
    ("nccl, tied weights, K 2, ZeRO-1 on four", 4, FP32,
     "--engine nccl --pp 2 --dp 2 --tied --zero1"),
    ("nccl, validation and a text, bf16, on two", 2, BF16,
     "--engine nccl --pp 2 --precision bf16 --split 90,10 --eval-every 2 --eval-steps 1"
     " --sample-every 3 --prompt the"),
    ("nccl, tied weights, K 2, ZeRO-1 on four, bf16", 4, BF16,
     "--engine nccl --pp 2 --dp 2 --tied --zero1 --precision bf16"),
    ("nccl, updates that are taken back, P 2 × D 2 on four", 4, FP32,
     "--engine nccl --pp 2 --zero3 2 --optimizer-sync late --clip 0.5"),
    ("nccl, P 2 × D 2 on four, bf16", 4, BF16,
     "--engine nccl --pp 2 --zero3 2 --precision bf16"),
]
# On four GPUs whose streams are late by chance; of the last one activations and states leave.
LATE = ("--engine nccl --pp 2 --zero3 2 --precision bf16", "--zero3 2 --dp 2 --zero1",
        "--engine nccl --pp 2 --zero3 2 --layers 6 --virtual 3 --micro-batches 2 --unit 2"
        " --recompute none:out=host --optimizer adamw:out=host")
STEPS = 10  # of such a run
failures = []


class Failed(Exception):
    pass


def settings_of(flags):
    """Values by name, None where there is none; the later ones where two contradict."""
    settings = {}
    for flag in map(str, flags):
        if flag.startswith("--"):
            name = flag[2:]
            settings[name] = None
        else:
            settings[name] = flag
    return settings


def exchanging(zeropp, settings):
    """The command that runs with these and exchanges its program at every chance."""
    def as_toml(text):
        return "true" if text is None else (
            text if re.fullmatch("[-0-9.e]+", text) else json.dumps(text))
    program = pathlib.Path(zeropp).parent / "examples/final_state"
    return [program, "exchanged", *(f"{key} = {as_toml(v)}" for key, v in settings.items())]


def run(zeropp, arguments, folder, around=(), meanwhile=lambda: None, says="", exchanges=False,
        **environment):
    """The steps of a run: losses and norms. `around` goes before its command; `meanwhile` is
    called once it has been started; its output has to have what it `says`, a pattern."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    steps = [] if "--steps" in arguments else ["--steps", "3"]
    settings = settings_of([*MODEL, *steps, *arguments, "--metrics", metrics])
    flags = [word for key, v in settings.items() for word in (f"--{key}", v) if word is not None]
    command = exchanging(zeropp, settings) if exchanges else [*around, zeropp, "run", *flags]
    # A group of their own: over NCCL a run has a process for every rank.
    child = subprocess.Popen(command, env={**os.environ, **environment}, text=True,
                             start_new_session=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
    try:
        meanwhile()
        said, _ = child.communicate(timeout=600)
    except (Failed, subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGKILL)
        raise
    if child.returncode or "[cuda-on-cpu] error" in said:
        raise Failed(f"exit code {child.returncode}\n{said[-3000:]}")
    if not re.search(says, said):
        raise Failed(f"nothing says {says!r}\n{said[-3000:]}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(step["loss"], step["grad_norm"]) for step in lines if "loss" in step]


def on_cuda(zeropp, arguments, folder, gpus, **more):
    if not more.get("exchanges"):
        more.setdefault("says", COMPILED)
    return run(zeropp, ["--device", "cuda", *arguments], folder, CUDA_ON_CPU_ABORT="1",
               CUDA_ON_CPU_DEVICES=str(gpus), **more)


def on_cpu(zeropp, arguments, folder):
    words = [a for a in arguments if a not in ("--engine", "nccl")]
    words = [re.sub(":head-split=.*", ":head-split=off", word) for word in words]
    return run(zeropp, words, folder)


def near(got, wanted, tolerance):
    """Losses within the tolerance; norms, which rounding moves more, within ten times it."""
    if len(got) != len(wanted):
        raise Failed(f"{len(got)} steps instead of {len(wanted)}")
    for n, (g, w) in enumerate(zip(got, wanted)):
        finite = None not in (*g, *w)
        apart = [abs(x - y) / y for x, y in zip(g, w)] if finite else []
        if not (finite and apart[0] <= tolerance and apart[1] <= 10 * tolerance):
            raise Failed(f"step {n + 1}: loss and norm {g} instead of {w}")


def tried(name, work, zeropp, *arguments):
    """Does this in a folder of its own, and says how it went."""
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            work(zeropp, pathlib.Path(folder), *arguments)
        verdict = "ok"
    except Exception as error:  # Also what was not foreseen fails this case, and no other.
        failures.append(name)
        verdict = f"FAILED: {type(error).__name__}: {error}"
    print(f"{name}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)


def as_on_the_cpu(zeropp, folder, gpus, tolerance, words, environment=None):
    words = words.split()
    near(on_cuda(zeropp, words, folder, gpus, **(environment or {})),
         on_cpu(zeropp, words, folder), tolerance)


def resumed(zeropp, folder, gpus, words):
    """A run that goes on from its second step has the losses of when it did not stop."""
    saved = folder / f"saved on {gpus}"
    layout = [*words.split(), "--save", saved, "--save-every", "2"]
    whole = on_cuda(zeropp, layout, folder, gpus)
    rest = on_cuda(zeropp, [*layout, "--resume", "2"], folder, gpus)
    near(rest, whole[2:], 1e-6)
    return saved


def evaluated(zeropp, folder):
    """What a run saved has the CPU's loss on a text."""
    saved = resumed(zeropp, folder, 2, "--pp 2")
    text = folder / "text"
    text.write_bytes(pathlib.Path(__file__).read_bytes()[:1500])

    def loss(*device):
        command = [zeropp, "eval", saved, "--data", text, "--seq", "32", "--json", *device]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={
            **os.environ, "CUDA_ON_CPU_ABORT": "1", "CUDA_ON_CPU_DEVICES": "2"})
        if done.returncode:
            raise Failed(done.stderr[-3000:])
        return json.loads(done.stdout)["loss"]
    near([(loss("--device", "cuda", "--pp", "2"), 1)], [(loss(), 1)], FP32)


def exchanged(zeropp, folder, gpus, words):
    """Orders and blocks that are exchanged change no digit."""
    def with_exchanges(how, says):
        flags = [*words.split(), "--layers", "4", "--micro-batches", "4", "--steps", "8",
                 "--schedule", f"gpipe:reschedule={how}"]
        return on_cuda(zeropp, flags, folder, gpus, exchanges=True, says=says)
    wanted = with_exchanges("off", "^")
    for how, says in (("auto", "[1-9] tries"), ("recut", "[1-9] of other blocks")):
        got = with_exchanges(how, says)
        if got != wanted:
            raise Failed(f"{how}: {got} instead of {wanted}")


def kill_a_rank(metrics, mark):
    """Kills a process that computes for a rank other than 0, after the second step."""
    late = time.monotonic() + 300
    while not metrics.exists() or metrics.read_text().count('"loss"') < 2:
        if time.monotonic() > late:
            raise Failed("no second step within 300 s")
        time.sleep(0.05)
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes()
            if mark.encode() in variables and b"ZEROPP_PART=" in variables:
                return os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue  # It has ended, or is another user's.
    raise Failed("no process of a rank other than 0")


def recovered(zeropp, folder):
    """A run over NCCL that loses a process is started again, and each step is there once, with the
    losses of a run that loses none."""
    layout = ["--engine", "nccl", "--pp", "2", "--zero3", "2", "--steps", "5"]
    wanted = on_cuda(zeropp, layout, folder, 4)
    mark = f"CUDA_ON_CPU_KILLED={folder}"
    got = on_cuda(zeropp, [*layout, "--save", folder / "ckpt", "--save-every", "1", "--resume"],
                  folder, 4, around=[zeropp, "supervise", "--"],
                  meanwhile=lambda: kill_a_rank(folder / "metrics.jsonl", mark),
                  says="it is started again from", CUDA_ON_CPU_KILLED=str(folder))
    near(got, wanted, 1e-6)


def logged(zeropp, arguments, folder, gpus):
    """The words of each line of the driver's log of a run, without the time."""
    log = folder / "log"
    on_cuda(zeropp, arguments, folder, gpus, CUDA_ON_CPU_LOG=str(log))
    return [line.split()[1:] for line in log.read_text().splitlines()]


def uploads_are_tokens(zeropp, folder):
    """A step more uploads the ids and the targets of its micro-batches more, for each of the rank's
    two stages, and nothing else."""
    def uploads(steps):
        lines = logged(zeropp, ["--steps", str(steps)], folder, 1)
        return collections.Counter(int(line[3]) for line in lines if line[0] == "up")
    got = uploads(4) - uploads(3)
    stages, micro_batches, tokens = 2, 2, 2 * 32
    if got != {4 * tokens: 2 * stages * micro_batches}:
        raise Failed(f"uploads of a step, by bytes: {dict(got)}")


HELD = "--layers 8 --micro-batches 8 --unit 8"


def on_the_host(zeropp, folder, gpus, words, states=None):
    """Activations, or what an optimizer keeps, that go to pinned memory of the host and come back
    change no digit, and ranks hold less."""
    words = [*HELD.split(), *words.split()]
    recompute = words.pop() if words[-1] in ("selective", "full") else "none"
    flag = ["--optimizer", states] if states else ["--recompute", recompute]
    kind = "optimizer" if states else "activation"
    outside = "host_state" if states else "host_activation"

    def held(out):
        steps = on_cuda(zeropp, [*words, flag[0], f"{flag[1]}{out}"], folder, gpus)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return steps, [line for line in lines if "loss" in line][-1]["peak_bytes"]
    (wanted, kept), (got, out) = held(""), held(":out=host")
    if got != wanted:
        raise Failed(f"{got} instead of {wanted}")
    if not (0 < out[outside] and out[kind] < 0.75 * kept[kind]):
        raise Failed(f"peaks: {out} instead of {kept}")


def orders(zeropp, folder, count, words):
    """Streams that are late by chance change no digit: no wait is missing. Every step of a run is
    done in another order, and every run begins in another one."""
    def steps_of_a_run(steps, **environment):
        layout = [*words.split(), "--steps", str(steps), "--decay", "constant"]
        return on_cuda(zeropp, layout, folder, 4, **environment)
    wanted = steps_of_a_run(min(STEPS, count))
    for begun in range(0, count, STEPS):
        steps, seed = min(STEPS, count - begun), str(random.randrange(1, 1 << 31))
        try:
            got = steps_of_a_run(steps, CUDA_ON_CPU_DELAY_US="3000", CUDA_ON_CPU_SEED=seed)
            near(got, wanted[:steps], 0)
        except Failed as error:
            raise Failed(f"CUDA_ON_CPU_SEED={seed}: {error}") from error


def main():
    zeropp, count = sys.argv[1], -(-int(sys.argv[2]) // len(LATE))
    # As a run waits now and then, two at a time take four fifths of the time on two cores.
    with concurrent.futures.ThreadPoolExecutor(2) as two_at_a_time:
        def case(name, work, *arguments, in_gate=True):
            if in_gate or sys.argv[3:] != ["gate"]:
                two_at_a_time.submit(tried, name, work, zeropp, *arguments)

        # The longest first.
        for words in reversed(LATE):
            case(f"{count} orders of the streams, {words}", orders, count, words)
        for gpus, words in (
                (1, "--virtual 4"), (2, "--pp 2 --virtual 4"),
                (2, "--pp 2 --virtual 4 --precision bf16 selective"),
                (2, "--pp 2 --virtual 4 full"),
                (4, "--engine nccl --pp 2 --zero3 2 --virtual 4")):
            case(f"activations on the host, {words} on {gpus}", on_the_host, gpus, words,
                 in_gate="bf16" in words)
        for gpus, words, states in (
                (1, "--virtual 8", "adamw"),
                (2, "--pp 2 --virtual 4 --precision bf16", "adamw8bit"),
                (2, "--pp 2 --virtual 1", "adamw"), (2, "--dp 2 --zero1 --virtual 4", "adamw")):
            case(f"{states}'s state on the host, {words} on {gpus}", on_the_host, gpus, words,
                 states, in_gate="bf16" in words)
        case("nccl, a run that loses a process", recovered)
        for gpus, words in ((2, "--pp 2"), (2, "--engine nccl --pp 2"),
                            (4, "--engine nccl --pp 2 --zero3 2")):
            case(f"exchanged orders and blocks, {words} on {gpus}", exchanged, gpus, words,
                 in_gate=False)
        case("threads, a run that is resumed, and evaluated", evaluated)
        case("nccl, a run that is resumed, bf16", resumed, 4,
             "--engine nccl --pp 2 --zero3 2 --precision bf16")
        case("uploads of a step are its tokens", uploads_are_tokens)
        for name, gpus, tolerance, words in CASES:
            case(name, as_on_the_cpu, gpus, tolerance, words)
        case("CubeCL's products, fp32", as_on_the_cpu, 1, FP32, "",
             {"CUDA_ON_CPU_CAPABILITY": WITHOUT_TF32, **CUBECL}, in_gate=False)
        case("CubeCL's products, bf16", as_on_the_cpu, 1, BF16, "--precision bf16", CUBECL,
             in_gate=False)
        # In bf16 there are so many candidates that trying all of them takes more than ten minutes.
        tuner = str(random.randrange(1, 1 << 31))
        case(f"CubeCL's products, fp32, as a tuner of seed {tuner} chooses them", as_on_the_cpu, 1,
             FP32, "", {"CUDA_ON_CPU_CAPABILITY": WITHOUT_TF32, "CUDA_ON_CPU_TUNER": tuner,
                        **CUBECL}, in_gate=False)
    sys.exit(f"FAILED: {', '.join(failures)}" if failures else 0)


main()
