"""Loads an exported folder in transformers: token ids, loss and text, beside zeropp's.

    python3 check.py FOLDER TEXT TOKENS.bin PROMPT LOSS

TOKENS.bin is TEXT as zeropp tokenize wrote it, in ids of 16 bits; LOSS is what zeropp eval measured
on all its samples of 128 tokens. Ends with an error if the ids differ, or if the losses
differ by more than 1e-4. Needs torch and transformers.
"""

import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQ, WRITTEN, TOLERANCE = 128, 40, 1e-4

folder, text, tokens = map(pathlib.Path, sys.argv[1:4])
prompt, measured = sys.argv[4], float(sys.argv[5])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)

# The file ends with the token that ends a document.
ids = torch.frombuffer(bytearray(tokens.read_bytes()), dtype=torch.uint16).long()
theirs = tokenizer(text.read_text(encoding="utf-8"), verbose=False).input_ids
if ids.tolist()[:-1] != theirs:
    sys.exit(f"{tokens}: these are not the ids that transformers gives {text}")
print(f"token ids: all {len(theirs)} of {text} are the same")

# Each sample needs one token more, its last target; what is left over at the end is not used.
samples = (len(ids) - 1) // SEQ
inputs = ids[: samples * SEQ].view(samples, SEQ)
targets = ids[1 : samples * SEQ + 1].view(samples, SEQ)
with torch.no_grad():
    losses = [
        torch.nn.functional.cross_entropy(model(input_ids=x[None]).logits[0], y, reduction="sum")
        for x, y in zip(inputs, targets)
    ]
    start = tokenizer(prompt, return_tensors="pt")
    written = model.generate(**start, max_new_tokens=WRITTEN, do_sample=False)
loss = sum(each.item() for each in losses) / (samples * SEQ)
print(f"loss of {samples * SEQ} tokens: {loss:.6f} by transformers, {measured} by zeropp")
print(tokenizer.decode(written[0], skip_special_tokens=True))
if abs(loss - measured) > TOLERANCE:
    sys.exit(f"the losses differ by more than {TOLERANCE}")
