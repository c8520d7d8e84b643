"""Shows two runs side by side, by their metrics: python3 compare.py DENSE.jsonl EXPERTS.jsonl"""

import json
import sys


def lines(path: str) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [line for line in map(json.loads, file) if "step" in line]


dense, experts = map(lines, sys.argv[1:])
print("| tokens | dense, s | experts, s | dense | experts | fullest expert | idle |")
print("|---|---|---|---|---|---|---|")
seconds, tokens = [0.0, 0.0], 0
for one, other in zip(dense, experts):
    seconds = [seconds[0] + one["step_s"], seconds[1] + other["step_s"]]
    tokens += one["tokens"]
    if one.get("eval") and other.get("eval"):
        load = other["experts"]
        print(f"| {tokens:,} | {seconds[0]:.1f} | {seconds[1]:.1f} | {one['eval']['loss']:.4f} "
              f"| {other['eval']['loss']:.4f} | {load['fullest']:.2f} | {load['idle']} |")
