"""PyTorch's own loader reads our CSV, and we read what PyTorch writes.

Needs PyTorch (checked with 2.11.0); run by hand, because the test suite does not have it:

    python torch_loader.py read DIR     each DIR/*.compute.csv and DIR/*.lowered.csv is loaded by
                                        torch.distributed.pipelining, written again and compared
    python torch_loader.py write DIR    writes the schedules that PyTorch generates to DIR; those in
                                        torch_csv/ beside this file are what torch_csv.rs reads
"""

import csv
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore


def stages_of_rank_0(indices, count):
    """Stages that are never run; the loader wants to know how many there are and which are here."""
    device = torch.device("cpu")
    return [PipelineStage(torch.nn.Linear(4, 4), i, count, device) for i in indices]


def with_ranks(pp, make):
    dist.init_process_group("fake", rank=0, world_size=pp, store=FakeStore())
    try:
        return make()
    finally:
        dist.destroy_process_group()


def cells(path):
    with open(path, newline="") as file:
        return [row for row in csv.reader(file)]


def load(path, form):
    """Loads a file and compares it with what the loader makes of it."""
    rows = cells(path)
    actions = [schedules._Action.from_str(cell) for row in rows for cell in row if cell.strip()]
    parts = [part for a in actions for part in (a.sub_actions or (a,))]
    stages = 1 + max(a.stage_index for a in parts)
    micro_batches = 1 + max(a.microbatch_index for a in parts if a.microbatch_index is not None)
    first = [schedules._Action.from_str(cell) for cell in rows[0] if cell.strip()]
    here = sorted({part.stage_index for a in first for part in (a.sub_actions or (a,))})

    def run():
        runtime = schedules._PipelineScheduleRuntime(
            stages_of_rank_0(here, stages), micro_batches, loss_fn=torch.nn.functional.mse_loss
        )
        runtime._load_csv(str(path), format=form)
        back = str(path) + ".back"
        runtime._dump_csv(back, format=form)
        return cells(back), sum(map(len, runtime.pipeline_order_with_comms.values()))

    back, lowered = with_ranks(len(rows), run)
    assert back == rows, f"{path}: PyTorch changed the schedule"
    print(f"{path.name}: {len(rows)} ranks, {sum(map(len, rows))} cells, {lowered} after lowering")


def read(folder):
    files = sorted(folder.glob("*.csv"))
    assert files, f"no .csv in {folder}"
    for path in files:
        load(path, "compute_only" if path.name.endswith(".compute.csv") else "compute_comms")


def write(folder):
    folder.mkdir(parents=True, exist_ok=True)
    # Name, class, ranks, micro-batches, stages of rank 0; two stages a rank.
    made = [
        ("looped_bfs", schedules.ScheduleLoopedBFS, 2, 3, [0, 2]),
        ("interleaved_1f1b", schedules.ScheduleInterleaved1F1B, 3, 6, [0, 3]),
        ("interleaved_zero_bubble", schedules.ScheduleInterleavedZeroBubble, 2, 4, [0, 2]),
        ("zbv", schedules.ScheduleZBVZeroBubble, 2, 4, [0, 3]),
        ("dualpipe_v", schedules.ScheduleDualPipeV, 2, 5, [0, 3]),
    ]
    loss = torch.nn.functional.mse_loss
    for name, kind, pp, micro_batches, here in made:

        def dump():
            stages = stages_of_rank_0(here, 2 * pp)
            schedule = kind(stages, micro_batches, loss_fn=loss)
            runtime = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss)
            runtime.pipeline_order = schedule.pipeline_order
            runtime.stage_index_to_group_rank = schedule.stage_index_to_group_rank
            runtime._prepare_schedule_with_comms(schedule.pipeline_order)
            runtime._dump_csv(str(folder / f"{name}.compute.csv"), format="compute_only")
            runtime._dump_csv(str(folder / f"{name}.lowered.csv"), format="compute_comms")

        with_ranks(pp, dump)
        print(name)


if __name__ == "__main__":
    {"read": read, "write": write}[sys.argv[1]](Path(sys.argv[2]))
