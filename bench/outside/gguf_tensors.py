"""Holds every tensor that zeropp-weights reads from a GGUF file against the Python package `gguf`.

    cargo build --release -p zeropp-weights --example dump
    python bench/outside/gguf_tensors.py target/release/examples/dump model.gguf

Needs numpy and gguf. Bits have to be equal; the rows of llama's queries and keys are put in their
own order here too.
"""

import json
import subprocess
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

dump, path = sys.argv[1:]
reader = GGUFReader(path)


def number(key):
    field = reader.fields[key]
    return int(field.parts[field.data[0]][0])


heads = number("llama.attention.head_count")
kv_heads = number("llama.attention.head_count_kv")
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
expected = {}
for tensor in reader.tensors:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    name = tensor.name
    if name in WHOLE:
        name = WHOLE[name]
    else:
        _, block, part, kind = name.split(".")
        for wanted, n in [("attn_q", heads), ("attn_k", kv_heads)]:
            if part == wanted:
                rows, columns = values.shape
                values = values.reshape(n, rows // n // 2, 2, columns).swapaxes(1, 2)
                values = values.reshape(rows, columns)
        name = f"model.layers.{block}.{PARTS[part]}.{kind}"
    expected[name] = (tensor.tensor_type.name, values)

process = subprocess.Popen([dump, path], stdout=subprocess.PIPE)
kinds = {}
elements = 0
while line := process.stdout.readline():
    name, shape = json.loads(line)
    count = int(np.prod(shape))
    found = np.frombuffer(process.stdout.read(4 * count), dtype=np.uint32).reshape(shape)
    kind, values = expected.pop(name)
    assert np.array_equal(found, values.view(np.uint32)), name
    kinds[kind] = kinds.get(kind, 0) + 1
    elements += count
assert process.wait() == 0 and not expected, list(expected)[:3]
print(f"{sum(kinds.values())} tensors of {elements} elements are equal to the bit: {kinds}")
