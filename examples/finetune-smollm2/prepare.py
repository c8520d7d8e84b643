"""Makes ready what the run needs: a folder with model and tokenizer, and a text in two parts.

    python3 prepare.py MODEL.gguf TEXT FOLDER

A GGUF file holds its tokenizer in a form of its own; FOLDER/model gets it as tokenizer.json, beside
a link to the model. The last 10,000 characters of the text, or a tenth of a shorter one, go into
FOLDER/held-out.txt, the rest into FOLDER/train.txt. Needs transformers and gguf.
"""

import pathlib
import sys

from gguf import GGUFReader
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoTokenizer

gguf, text, folder = map(pathlib.Path, sys.argv[1:4])
model = folder / "model"
model.mkdir(parents=True)
(model / "model.gguf").symlink_to(gguf.resolve())

tokenizer = AutoTokenizer.from_pretrained(model, gguf_file="model.gguf")
kind = GGUFReader(gguf).fields["tokenizer.ggml.pre"].contents()
if kind != "smollm":
    sys.exit(f"{gguf}: tokenizer.ggml.pre is {kind}, not smollm: it is no model of SmolLM's family")
# transformers does not read this field: SmolLM's tokenizer takes every digit for itself.
bpe = tokenizer.backend_tokenizer
bpe.pre_tokenizer = Sequence([Digits(individual_digits=True), bpe.pre_tokenizer])
tokenizer.save_pretrained(model)

words = text.read_text(encoding="utf-8")
cut = len(words) - min(10_000, len(words) // 10)
(folder / "train.txt").write_text(words[:cut], encoding="utf-8")
(folder / "held-out.txt").write_text(words[cut:], encoding="utf-8")
print(f"{model}: a tokenizer of {len(tokenizer)} ids; {len(words) - cut} characters are held out")
