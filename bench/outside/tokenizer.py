"""Holds zeropp-tokens against Hugging Face's tokenizers in Python: ids, and the time for a text.

    cargo build --release -p zeropp-tokens --examples
    python bench/outside/tokenizer.py target/release/examples tokenizer.json [TEXT]

Needs the Python package tokenizers. TEXT is a .jsonl with a field `text`; without it only ids are
compared, of 10,000 random strings of Unicode with a fresh seed, which is printed. Times are taken
in turns, five rounds, with as many threads each as there are cores.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS = 5
THREADS = os.cpu_count()
# Read when the first batch is encoded.
os.environ["RAYON_NUM_THREADS"] = str(THREADS)

from tokenizers import Tokenizer

examples, path, *texts = sys.argv[1:]
tokenizer = Tokenizer.from_file(path)
seed = random.randrange(2**32)
draw = random.Random(seed)
RANGES = [
    (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0x00, 0x1F), (0xA0, 0x24F), (0x300, 0x36F),
    (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF), (0x1100, 0x11FF), (0x2000, 0x206F),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0x1F300, 0x1FAFF),
    (0x10000, 0x10FFFF),
]


def random_text():
    out = []
    for _ in range(draw.randrange(80)):
        low, high = draw.choice(RANGES)
        out.append(chr(draw.randint(low, high)) if draw.random() < 0.8 else " ")
    return "".join(out)


strings = [random_text() for _ in range(10_000)]
lines = "\n".join(json.dumps(s) for s in strings) + "\n"
ours = subprocess.run([f"{examples}/ids", path], input=lines, capture_output=True, text=True)
assert ours.returncode == 0, ours.stderr
ours = [json.loads(line) for line in ours.stdout.splitlines()]
theirs = [e.ids for e in tokenizer.encode_batch(strings, add_special_tokens=False)]
differ = [i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
assert len(ours) == len(theirs) and not differ, (seed, strings[differ[0]])
print(f"{len(strings)} strings, {sum(map(len, ours))} ids: equal (seed {seed})")


def by_python(text):
    """Ids of a text's documents, and the seconds that they take."""
    start = time.perf_counter()
    with open(text, encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    count = 0
    for first in range(0, len(documents), 1000):
        batch = tokenizer.encode_batch_fast(documents[first : first + 1000])
        count += sum(len(e.ids) for e in batch)
    return count, time.perf_counter() - start


def by_zeropp(text):
    """The same, with ends of documents and with what is written to disk."""
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{examples}/tokenize", path, f"{folder}/out", str(THREADS), text]
        ours = subprocess.run(command, capture_output=True, text=True, check=True)
    tokens, seconds = ours.stdout.split()
    return int(tokens), float(seconds)


for text in texts:
    ratios = []
    for round in range(1, ROUNDS + 1):
        (count, python), (tokens, seconds) = by_python(text), by_zeropp(text)
        ratios.append(python / seconds)
        print(f"round {round}: {count} ids in {python:.1f} s by Python, {tokens} with ends of "
              f"documents in {seconds:.1f} s by zeropp-tokens, on disk: {ratios[-1]:.2f} x")
    print(f"{text}: median {statistics.median(ratios):.2f} x, {THREADS} threads each")
