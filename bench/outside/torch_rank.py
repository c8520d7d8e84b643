"""One rank of PyTorch on the CPU, for bench/peers: prints the seconds of each step as JSON.

    torch_rank.py '{"layers": 8, "hidden": 256, ...}' eager|compiled|bf16 STEPS

The model, the micro-batches and AdamW are those that zeropp runs beside it.
"""
import json
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (
            t.view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for t in self.qkv(self.ln_1(x)).split(h, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, seq, vocab, tied):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def main():
    shape, mode, steps = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = ("layers", "hidden", "heads", "seq", "vocab", "tied")
    model = Gpt(**{name: shape[name] for name in names})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    run = torch.compile(model) if mode == "compiled" else model
    size = (shape["micro_batches"], shape["micro_batch_size"], shape["seq"] + 1)
    data, seconds = torch.randint(0, shape["vocab"], size), []
    for _ in range(steps):
        start = time.perf_counter()
        for tokens in data:
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "bf16"):
                logits = run(tokens[:, :-1].contiguous()).view(-1, shape["vocab"]).float()
                loss = F.cross_entropy(logits, tokens[:, 1:].reshape(-1))
            (loss / len(data)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    tokens = size[0] * size[1] * shape["seq"]
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":
    main()
