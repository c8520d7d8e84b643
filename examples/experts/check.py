"""Loads an exported folder in transformers: its loss of a text beside zeropp's.

    python3 check.py FOLDER TEXT LOSS

The model's tokens are bytes; LOSS is what zeropp eval measured on all samples of 64 tokens. Ends
with an error if the losses differ by more than 1e-4. Needs torch and transformers.
"""

import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

SEQ, BATCH, TOLERANCE = 64, 64, 1e-4

folder, text = map(pathlib.Path, sys.argv[1:3])
measured = float(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
samples = (len(ids) - 1) // SEQ
inputs = ids[: samples * SEQ].view(samples, SEQ)
targets = ids[1 : samples * SEQ + 1].view(samples, SEQ)
total = 0.0
with torch.no_grad():
    for first in range(0, samples, BATCH):
        logits = model(input_ids=inputs[first : first + BATCH]).logits
        wanted = targets[first : first + BATCH].flatten()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted,
                                                   reduction="sum").item()
loss = total / (samples * SEQ)
print(f"loss of {samples * SEQ} tokens: {loss:.6f} by transformers, {measured} by zeropp")
if abs(loss - measured) > TOLERANCE:
    sys.exit(f"the losses differ by more than {TOLERANCE}")
