"""Loads an exported folder in transformers: its loss of a text beside zeropp's.

    python3 check.py FOLDER TEXT LOSS

The model's tokens are bytes; LOSS is what zeropp eval measured on all of it, in samples of 64
tokens. Ends with an error if the losses differ by more than 1e-4. Needs torch and transformers.
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
total = 0.0
with torch.no_grad():
    # Whole samples, and what is left over at the end.
    tokens = len(ids) - 1
    whole = tokens // SEQ * SEQ
    parts = list(zip(ids[:whole].view(-1, SEQ).split(BATCH), ids[1:whole + 1].split(BATCH * SEQ)))
    if whole < tokens:
        parts.append((ids[whole:tokens].view(1, -1), ids[whole + 1:]))
    for inputs, targets in parts:
        logits = model(input_ids=inputs).logits.flatten(0, 1)
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
loss = total / tokens
print(f"loss of {tokens} tokens: {loss:.6f} by transformers, {measured} by zeropp")
if abs(loss - measured) > TOLERANCE:
    sys.exit(f"the losses differ by more than {TOLERANCE}")
