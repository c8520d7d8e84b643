"""PyTorch beside `bench/gpu.sh`, compiled, in bf16, on one GPU: a GPT-2 of 124M parameters and
eight layers of LLaMA-3 8B.

Prints rows of the table. Micro-batches, accumulation and optimizer are those of `bench/gpu`.
`gpu_torch.py gpt2` or `llama` measures one of them.
"""
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HEADS, HIDDEN, SEQ, VOCABULARY = 12, 12, 768, 1024, 50304


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


class LlamaBlock(nn.Module):
    """A layer of LLaMA-3 8B."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(4096, 1e-5), nn.RMSNorm(4096, 1e-5)
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.q, self.kv, self.o = linear(4096, 4096), linear(4096, 2048), linear(4096, 4096)
        self.gate, self.up = linear(4096, 14336), linear(4096, 14336)
        self.down = linear(14336, 4096)

    def forward(self, x, cos, sin):
        b, s, h = x.shape
        n = self.norm_1(x)
        q = self.q(n).view(b, s, 32, 128).transpose(1, 2)
        k, v = (t.view(b, s, 8, 128).transpose(1, 2) for t in self.kv(n).split(1024, dim=2))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, h))
        n = self.norm_2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


def turned(x, cos, sin):
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, layers=8, vocabulary=32768, seq=4096):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4096)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(4096, 1e-5), nn.Linear(4096, vocabulary, bias=False)
        inverse = 500000.0 ** (-torch.arange(0, 64, device="cuda") / 64)
        angles = torch.arange(seq, device="cuda")[:, None] * inverse
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def tokens_per_second(model, samples, seq, vocabulary, micro_batches, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    model = torch.compile(model)
    data = torch.randint(0, vocabulary, (micro_batches, samples, seq + 1), device="cuda")
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tokens in data:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return micro_batches * samples * seq / statistics.median(seconds[steps // 2 :])


def peak():
    """TFLOP/s of a large product of random numbers: zeros would take less power."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 20 * 2 * 8192**3 / best / 1e12


def main():
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU")
    torch.set_float32_matmul_precision("high")
    wanted = sys.argv[1:] or ["gpt2", "llama"]
    name, version = torch.cuda.get_device_name(), torch.__version__
    print(
        f"| PyTorch {version} on {name}: largest matrix product in bf16 | {peak():.1f} TFLOP/s | |"
    )
    if "gpt2" in wanted:
        rate = tokens_per_second(Gpt().cuda(), 16, SEQ, VOCABULARY, 2, 20)
        print(f"| PyTorch, GPT-2, compiled, bf16 | {rate:.0f} tokens/s | |", flush=True)
    if "llama" in wanted:
        rate = tokens_per_second(Llama().cuda(), 1, 4096, 32768, 4, 10)
        print(f"| PyTorch, LLaMA-3 8B, 8 layers of it, compiled, bf16 | {rate:.0f} tokens/s | |")


main()
