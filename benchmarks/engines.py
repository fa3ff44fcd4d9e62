"""The two engines on the same run: seconds of a step, start-up of the ranks.

    python benchmarks/engines.py --out benchmarks/results/engines.json
    python benchmarks/engines.py --device cuda --out benchmarks/results/engines-DEVICE.json    (one GPU, one rank)

Steps: pp 2 x dp 2, four gloo ranks with one thread each, both engines built in the same processes, one step of each in
turn; the ratio is of medians. Bytes: of the tensors that rank 0 hands to each collective between replicas in a step,
and what a ring sends of them (an all-reduce of n bytes 2 (d - 1) / d n, the others (d - 1) / d n); native's are
compared with the plan, to the byte, in tests/unit/test_plan_bytes.py.
Start-up: `megatron-port train --nproc 8` of one step, wall time, engines in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.io.files import write_text
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.build import DTYPES, build_engine, topology_of
from megatron_port.run.device import choose_device


def run_config(engine: str, dtype: str, device: str = "cpu") -> RunConfig:
    """The run that both engines train: small on four CPU ranks, GPT-2's shape on one GPU."""
    if device != "cpu":
        return RunConfig(
            engine=engine,
            model=ModelConfig(
                num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50304, seq_length=1024
            ),
            layout=LayoutConfig(vocab_padding_multiple=1), batch=BatchConfig(micro_batch_size=8, global_batch_size=64),
            precision=PrecisionConfig(dtype=dtype), optimizer=OptimizerConfig(lr=1e-4),
            backend=BackendConfig(device="auto"),
        )
    return RunConfig(
        engine=engine,
        model=ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, vocab_size=512, seq_length=64),
        layout=LayoutConfig(pipeline_parallel_size=2, data_parallel_size=2, vocab_padding_multiple=1),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=16), precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(lr=1e-3), backend=BackendConfig(device="cpu", attention="math"),
    )


def batches(config: RunConfig, ctx: ParallelContext) -> list[MicroBatch]:
    """This replica's micro-batches."""
    b, s = config.batch.micro_batch_size, config.model.seq_length
    count = config.batch.global_batch_size // (b * ctx.topology.dp)
    tokens = torch.randint(0, config.model.vocab_size, (count, b, s + 1), generator=torch.Generator().manual_seed(1))
    return [
        MicroBatch(tuple(range(m * b, (m + 1) * b)), tokens=t[:, :-1] if ctx.is_first_stage else None,
                   labels=t[:, 1:] if ctx.is_last_stage else None)
        for m, t in enumerate(tokens)
    ]


COLLECTIVES = {
    "allreduce": "all-reduce", "allreduce_coalesced": "all-reduce", "reduce": "reduce", "broadcast": "broadcast",
    "reduce_scatter": "reduce-scatter", "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter", "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "allgather": "all-gather", "_allgather_base": "all-gather", "all_gather_single": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather", "allgather_coalesced": "all-gather",
}
"""Method of a process group → what it does."""
LEAST = 4096
"""Bytes: smaller tensors (losses, norms, flags) are not counted."""


class Bytes:
    """Counts what both engines hand to the process groups over some ranks, from below both of them."""

    def __init__(self, members: list[int]) -> None:
        self.members, self.moved = members, dict.fromkeys(sorted(set(COLLECTIVES.values())), 0)
        for name, kind in COLLECTIVES.items():
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None:
                setattr(dist.ProcessGroup, name, self._counting(method, kind))

    def _counting(self, method: Any, kind: str) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if dist.get_process_group_ranks(group) == self.members:
                self.moved[kind] += max(_size(a) for a in args)  # of input and output the whole tensor
            return method(group, *args, **kwargs)

        return call

    def take(self) -> dict[str, int]:
        """Bytes since the last call, by collective."""
        out = {kind: size for kind, size in self.moved.items() if size}
        self.moved = dict.fromkeys(self.moved, 0)
        return out


def _size(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        size = argument.numel() * argument.element_size()
        return size if size >= LEAST else 0
    return sum(_size(a) for a in argument) if isinstance(argument, list | tuple) else 0


def ring_bytes(moved: dict[str, int], d: int) -> float:
    """What one rank of ``d`` sends."""
    return sum(size * (2 if kind == "all-reduce" else 1) * (d - 1) / d for kind, size in moved.items())


def rank_main(rank: int, port: int, steps: int, out: str, device_name: str, world: int) -> None:
    """One rank: both engines, in turn."""
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = choose_device(device_name)
    backend = "nccl" if device.torch_device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    rows = []
    counter = Bytes([0, 1])  # rank 0's replicas: dp varies faster than pp
    for dtype in ("fp32", "bf16") if device_name == "cpu" else ("bf16",):
        engines: dict[str, Any] = {}
        for name in ("native", "deepspeed"):
            config = run_config(name, dtype, device_name)
            ctx = ParallelContext.create(topology_of(config), device.torch_device)
            providers = choose_providers(config.backend, device, DTYPES[dtype], engine=name, attention_dropout=0.0)
            engines[name] = (build_engine(config, ctx, providers), ctx, batches(config, ctx))
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        losses: dict[str, list[float]] = {name: [] for name in engines}
        moved: dict[str, dict[str, int]] = {}
        for step in range(steps + 2):
            for name, (engine, _, data) in engines.items():
                dist.barrier()
                counter.take()
                began = time.perf_counter()
                losses[name].append(engine.train_step(data, step=step, lr=1e-3).loss)
                dist.barrier()
                moved[name] = counter.take()
                if step >= 2:
                    seconds[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        rows.append({
            "dtype": dtype, "seconds": medians, "all": seconds, "ratio": medians["native"] / medians["deepspeed"],
            "bytes_of_rank_0": moved, "ring_bytes_of_rank_0": {name: ring_bytes(m, 2) for name, m in moved.items()},
            "losses": {name: values[-1] for name, values in losses.items()},
        })
        for _, ctx, _ in engines.values():
            ctx.close()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def start_up(repeats: int) -> dict[str, Any]:
    """Wall seconds of a run of one step on eight ranks, by engine."""
    seconds: dict[str, list[float]] = {"native": [], "deepspeed": []}
    for _ in range(repeats):
        for engine, values in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run.toml"
                run.write_text(
                    f'name = "start"\noutput_dir = "{folder}"\nengine = "{engine}"\n[model]\nnum_layers = 4\n'
                    "hidden_size = 64\nnum_attention_heads = 4\nvocab_size = 256\nseq_length = 32\n[layout]\n"
                    "tensor_parallel_size = 2\npipeline_parallel_size = 2\n[batch]\nmicro_batch_size = 1\n"
                    'global_batch_size = 8\n[precision]\ndtype = "fp32"\n[data]\nsynthetic = true\n'
                    "[training]\nsteps = 1\n"
                    '[checkpoint]\nsave_final = false\n[backend]\ndevice = "cpu"\n'
                )
                began = time.perf_counter()
                command = [sys.executable, "-m", "megatron_port", "train", str(run), "--nproc", "8"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                values.append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": medians, "all": seconds, "ratio": medians["native"] / medians["deepspeed"]}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=29641)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hardware", default=platform.processor() or platform.machine(), help="named in the result")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    world = 4 if args.device == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "rows.json")
        mp.spawn(rank_main, args=(args.port, args.steps, target, args.device, world), nprocs=world)
        rows = json.loads(Path(target).read_text())
    for row in rows:
        seconds = row["seconds"]
        print(f"{row['dtype']}: native {seconds['native']:.3f} s, deepspeed {seconds['deepspeed']:.3f} s, "
              f"ratio {row['ratio']:.2f}; losses {row['losses']}")
        for name, moved in row["bytes_of_rank_0"].items():
            sent = row["ring_bytes_of_rank_0"][name]
            print(f"  {name} between replicas, rank 0: {moved}; sent by a ring: {sent:.0f}")
    started = start_up(args.repeats) if args.device == "cpu" else None
    if started:
        print(f"start-up of 8 ranks: native {started['seconds']['native']:.1f} s, deepspeed "
              f"{started['seconds']['deepspeed']:.1f} s, ratio {started['ratio']:.2f}")
    if args.out:
        result = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "cores": os.cpu_count(),
                  "hardware": args.hardware,
                  "config": repr(replace(run_config("native", "bf16", args.device), name="engines")), "steps": rows,
                  "start_up": started}
        write_text(args.out, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
