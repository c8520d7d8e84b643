"""PyTorch's pipeline and FSDP2 over gloo on the CPU, for bench/peers: prints each step's seconds.

    torchrun --standalone --nproc-per-node $((PP * D)) torch_pipeline.py SHAPE SCHEDULE PP D STEPS

SHAPE is that of torch_rank.py, SCHEDULE a class of torch.distributed.pipelining.schedules; two
stages a rank. D ranks share each stage's parameters. Ranks of D have batches of their own.
"""
import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch_rank import Block

STAGES = 2


class Stage(nn.Module):
    def __init__(self, shape, number, count):
        super().__init__()
        hidden, vocab = shape["hidden"], shape["vocab"]
        self.is_first, self.is_last = number == 0, number == count - 1
        if self.is_first:
            self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(shape["seq"], hidden)
        blocks = range(shape["layers"] // count)
        self.blocks = nn.ModuleList(Block(hidden, shape["heads"]) for _ in blocks)
        if self.is_last:
            self.ln_f, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, x):
        if self.is_first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)) if self.is_last else x


def main():
    shape, name = json.loads(sys.argv[1]), sys.argv[2]
    pp, d, steps = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (pp, d), mesh_dim_names=("pp", "dp"))
    rank, count = mesh["pp"].get_local_rank(), pp * STAGES
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    numbers = [rank, count - 1 - rank] if is_v else [rank, rank + pp]
    models = [Stage(shape, number, count) for number in numbers]
    for model in models if d > 1 else []:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    group, device = mesh["pp"].get_group(), torch.device("cpu")
    pairs = zip(models, numbers)
    stages = [PipelineStage(model, number, count, device, group=group) for model, number in pairs]
    loss = lambda y, want: F.cross_entropy(y.reshape(-1, shape["vocab"]), want.reshape(-1))
    schedule = getattr(schedules, name)(stages, shape["micro_batches"], loss_fn=loss)
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=True)
    samples = shape["micro_batches"] * shape["micro_batch_size"]
    data = torch.randint(0, shape["vocab"], (samples, shape["seq"] + 1))
    x, y, seconds = data[:, :-1].contiguous(), data[:, 1:].contiguous(), []
    last = {"target": y, "losses": []} if count - 1 in numbers else {}
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*([x] if 0 in numbers else []), **last)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "tokens": d * samples * shape["seq"]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
