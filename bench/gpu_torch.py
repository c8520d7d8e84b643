"""PyTorch beside `bench/gpu.sh`: a compiled GPT-2 of 124M parameters in bf16 on one GPU.

Prints a row of the table. Micro-batch, accumulation and optimizer are those of `bench/gpu`.
"""
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HEADS, HIDDEN, SEQ, VOCABULARY = 12, 12, 768, 1024, 50304
SAMPLES, MICRO_BATCHES, STEPS = 16, 2, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (
            t.view(b, s, HEADS, h // HEADS).transpose(1, 2)
            for t in self.qkv(self.ln_1(x)).split(h, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(HIDDEN)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.view(-1))


def main():
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU")
    torch.set_float32_matmul_precision("high")
    model = Gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    model = torch.compile(model)
    data = torch.randint(0, VOCABULARY, (MICRO_BATCHES, SAMPLES, SEQ + 1), device="cuda")
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tokens in data:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    rate = MICRO_BATCHES * SAMPLES * SEQ / statistics.median(seconds[STEPS // 2 :])
    name, version = torch.cuda.get_device_name(), torch.__version__
    a = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    peak = 20 * 2 * 8192**3 / best / 1e12
    print(f"| PyTorch {version} on {name}: largest matrix product in bf16 | {peak:.1f} TFLOP/s | |")
    print(f"| PyTorch, GPT-2, compiled, bf16, one process | {rate:.0f} tokens/s | |")


main()
