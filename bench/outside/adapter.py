"""The loss that peft has with an adapter that zeropp wrote, on bytes of a text.

    python3 -m venv venv && venv/bin/pip install torch transformers peft
    zeropp export tuned --adapter -o adapter
    venv/bin/python bench/outside/adapter.py FOLDER adapter TEXT SEQ SAMPLES

FOLDER is the model that the run began with. `zeropp eval tuned --data TEXT --seq SEQ --json` has
the same loss on as many samples, which follow each other from the start of the text.
"""

import sys

import peft
import torch
import transformers

folder, adapter, text, seq, samples = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
base = transformers.AutoModelForCausalLM.from_pretrained(folder)
model = peft.PeftModel.from_pretrained(base, adapter).double().eval()
data = open(text, "rb").read()
total = 0.0
for i in range(samples):
    ids = torch.tensor([list(data[i * seq:(i + 1) * seq + 1])])
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits
    total += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item()
print(f"transformers {transformers.__version__}, peft {peft.__version__}: loss {total / samples}")
