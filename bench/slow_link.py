#!/usr/bin/env python3
"""Runs over a link between two nodes that takes its time, on one machine and without tc's netem.

Each node is a network namespace with a TUN device; this program carries packets from one device to
the other, one process a direction: a packet leaves when those before it have left at the link's
rate, and arrives the delay later, by the monotonic clock. Packets that would wait longer than the
queue allows are dropped, as a switch does.

    bench/slow_link.py
        compares `--optimizer-sync barrier` and `late`, by turns
    bench/slow_link.py --delay-ms 10 --hold
        only keeps the link up until Ctrl-C; commands run on its nodes by
        `NODES_NAME=zpd tests/netns/nodes run 0 COMMAND…`

The table it prints is Markdown: medians over all steps but the first five of all rounds, and the
median of the rounds' ratios with the lowest and the highest. It fails if a bit of a loss or a norm
differs between runs of a kind. Flags of `zeropp run` after `--` take the place of the job here.

Needs root, iproute2, /dev/net/tun, Open MPI, and `cargo build --release -p zeropp-cli --features
mpi` (or --program). Where other programs run, too, start it with `nice -n -15`.
"""

import argparse
import collections
import ctypes
import errno
import fcntl
import json
import multiprocessing
import os
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODES = ROOT / "tests/netns/nodes"
NET = "10.78.0"
JOB = (
    "--layers 8 --hidden 192 --heads 4 --seq 64 --micro-batches 6 --steps 30 --timeout-s 60"
).split()
# The first steps find out how the machine is, and TCP how the link is.
SETTLING = 5
QUEUE_S = 0.2
MPIRUN = (
    "mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1"
    " --mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_if_include {net}.0/24"
    " --mca btl_tcp_if_include {net}.0/24 --mca btl tcp,vader,self --mca pml ob1 --map-by slot"
).format(net=NET).split()
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000


def in_namespace(name, act):
    """What `act` returns in a network namespace; this thread comes back afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(fd):
        if libc.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")

    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        enter(there)
        return act()
    finally:
        enter(home)
        os.close(there)
        os.close(home)


def tun():
    """A TUN device `wire` in the namespace of the caller."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
    return fd


def carry(source, sink, delay_s, bytes_per_s):
    """Carries packets one way, for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getuid() == 0:
        # Its own delays would be the link's.
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    under_way = collections.deque()
    free_at = 0.0
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            os.write(sink, under_way.popleft()[1])
        rest = under_way[0][0] - now if under_way else None
        if not select.select([source], [], [], rest)[0]:
            continue
        now = time.monotonic()
        try:
            packet = os.read(source, 65536)
        except BlockingIOError:
            continue
        left_at = max(free_at, now) + len(packet) / bytes_per_s
        if left_at - now <= QUEUE_S:
            free_at = left_at
            under_way.append((left_at + delay_s, packet))


class Link:
    """Two nodes and what joins them."""

    def __init__(self, delay_ms, rate_mbit, mtu):
        subprocess.run([NODES, "down"], check=True)
        ends = []
        for i in (0, 1):
            name = f"{os.environ['NODES_NAME']}node{i}"
            subprocess.run(["ip", "netns", "add", name], check=True)
            ends.append(in_namespace(name, tun))
            # A connection that rested for a step does not begin slowly again.
            tune = "echo 0 >/proc/sys/net/ipv4/tcp_slow_start_after_idle"
            for command in (
                f"ip -n {name} address add {NET}.{i + 1}/24 dev wire",
                f"ip -n {name} link set wire mtu {mtu} txqueuelen 5000 up",
                f"ip -n {name} link set lo up",
            ):
                subprocess.run(command.split(), check=True)
            subprocess.run(["ip", "netns", "exec", name, "sh", "-c", tune], check=True)
        rate = rate_mbit * 1e6 / 8
        self.carriers = [
            multiprocessing.Process(
                target=carry, args=(*way, delay_ms / 1e3, rate), daemon=True)
            for way in (ends, ends[::-1])
        ]
        for carrier in self.carriers:
            carrier.start()
        for end in ends:
            os.close(end)

    def round_trip_ms(self):
        """There and back: until a port where nobody listens has refused."""

        def knock():
            at = time.monotonic()
            with socket.socket() as end:
                if end.connect_ex((f"{NET}.2", 9)) != errno.ECONNREFUSED:
                    sys.exit("the link does not carry packets")
            return 1e3 * (time.monotonic() - at)

        first = f"{os.environ['NODES_NAME']}node0"
        return statistics.median(in_namespace(first, knock) for _ in range(10))

    def down(self):
        subprocess.run([NODES, "down"], check=True)
        for carrier in self.carriers:
            carrier.terminate()
            carrier.join()


def train(where, program, pp, kind, sync, flags):
    """Runs once; returns seconds of each step and the bits of losses and norms."""
    metrics = where / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    hosts = f"{NET}.1:{pp // 2},{NET}.2:{pp // 2}"
    command = [NODES, "run", "0", *MPIRUN, "--mca", "plm_rsh_agent", where / "agent"]
    command += ["-H", hosts, "-np", str(pp), program, "run", "--engine", "mpi", "--pp", str(pp)]
    command += ["--schedule", kind, "--optimizer-sync", sync, "--metrics", metrics, *(flags or JOB)]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{kind}, {sync}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    rows = [row for row in map(json.loads, metrics.open()) if "step" in row]
    bits = [(row["loss"].hex(), row["grad_norm"].hex()) for row in rows]
    return [row["step_s"] for row in rows[SETTLING:]], bits


def compare(where, words):
    titles = ["one way, ms (measured, there and back)", "ranks", "kind", "barrier, ms a step"]
    titles += ["late, ms a step", "late / barrier (lowest to highest round)"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    for delay in map(float, words.delay_ms.split(",")):
        link = Link(delay, words.rate_mbit, words.mtu)
        try:
            there_and_back = link.round_trip_ms()
            for pp in map(int, words.pp.split(",")):
                for kind in words.kinds.split(","):
                    line = row(where, words, pp, kind)
                    print(f"| {delay:g} ({there_and_back:.1f}) | {pp} | {line}", flush=True)
        finally:
            link.down()


def row(where, words, pp, kind):
    times = {"barrier": [], "late": []}
    ratios, seen = [], None
    for turn in range(words.rounds):
        medians = {}
        # Each goes first in every other round.
        for sync in sorted(times, reverse=bool(turn % 2)):
            seconds, bits = train(where, words.program, pp, kind, sync, words.flags)
            if seen not in (None, bits):
                sys.exit(f"{kind}, {sync}: losses or norms differ from the runs before")
            seen = bits
            times[sync] += seconds
            medians[sync] = statistics.median(seconds)
        ratios.append(medians["late"] / medians["barrier"])
    barrier, late = (1e3 * statistics.median(times[sync]) for sync in ("barrier", "late"))
    return (f"{kind} | {barrier:.1f} | {late:.1f} |"
            f" {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--delay-ms", default="10,20,40", help="one way [%(default)s]")
    parser.add_argument("--rate-mbit", type=float, default=1000, help="each way [%(default)s]")
    parser.add_argument("--mtu", type=int, default=9000, help="[%(default)s]")
    parser.add_argument("--pp", default="2", help="half of the ranks on each node [%(default)s]")
    parser.add_argument("--kinds", default="zb-2p,zb-v,zeropp", help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/zeropp")
    parser.add_argument("--hold", action="store_true", help="only keep the link up")
    parser.add_argument("flags", nargs="*", help="flags of zeropp run, after --")
    words = parser.parse_args()
    os.environ.setdefault("NODES_NAME", "zpd")
    # So that the nodes go, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if words.hold:
        link = Link(float(words.delay_ms.split(",")[0]), words.rate_mbit, words.mtu)
        try:
            print(f"there and back: {link.round_trip_ms():.1f} ms; Ctrl-C ends it", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            link.down()
        return
    where = Path(tempfile.mkdtemp(prefix="zeropp-slow-link-"))
    try:
        agent = where / "agent"
        agent.write_text(f"#!/usr/bin/env bash\nexec '{NODES}' rsh \"$@\"\n")
        agent.chmod(0o755)
        compare(where, words)
    finally:
        shutil.rmtree(where)


main()
