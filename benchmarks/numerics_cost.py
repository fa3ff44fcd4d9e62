"""What the numerics guard and the replica check cost, beside a step of the same model in the same run.

    python benchmarks/numerics_cost.py [--device cuda] [--layers 12 --hidden 512 --vocab 24576 --seq 512 --batch 4]

Prints CPU seconds (wall seconds on a GPU): a step of the native engine; the scalar work that the guard adds to it on
host and device; a replica check, and its share at the default interval; the state check of one update, which hashes
weights, masters and moments twice (here all of them: under ZeRO-1 masters and moments are divided by dp).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch

from megatron_port.core.config.checks import resolve
from megatron_port.core.config.schema import BatchConfig, LayoutConfig, ModelConfig, PrecisionConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.api import StepResult
from megatron_port.core.engine.loss_reduction import skip_for_loss
from megatron_port.ext.health.numerics import NumericsGuard
from megatron_port.ext.health.replicas import BitsHash
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.build import DTYPES, build_engine
from megatron_port.run.device import choose_device


def seconds(run: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Least time of ``repeat`` calls, after one that warms up."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    spent = []
    for _ in range(repeat + 1):
        if device.type != "cpu":
            torch.cuda.synchronize()
        started = clock()
        run()
        if device.type != "cpu":
            torch.cuda.synchronize()
        spent.append(clock() - started)
    return min(spent[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16")
    for name, default in (("layers", 12), ("hidden", 512), ("vocab", 24576), ("seq", 512), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    config = resolve(RunConfig(
        engine="native", layout=LayoutConfig(zero_stage=0), precision=PrecisionConfig(dtype=a.dtype),
        model=ModelConfig(num_layers=a.layers, hidden_size=a.hidden, num_attention_heads=a.hidden // 64,
                          vocab_size=a.vocab, seq_length=a.seq),
        batch=BatchConfig(global_batch_size=a.batch),
    ), 1)
    config = dataclasses.replace(config, backend=dataclasses.replace(config.backend, device=a.device))
    chosen = choose_device(a.device)
    ctx, device = ParallelContext.single(chosen.torch_device), chosen.torch_device
    providers = choose_providers(
        config.backend, chosen, DTYPES[a.dtype], engine="native", attention_dropout=0.0
    )
    engine = build_engine(config, ctx, providers)
    tokens = torch.randint(0, a.vocab, (a.batch, 1, a.seq + 1))
    batches = [MicroBatch((i,), tokens=t[:, :-1].contiguous(), labels=t[:, 1:].contiguous())
               for i, t in enumerate(tokens)]
    step = seconds(lambda: engine.train_step(batches, step=0, lr=1e-4), device, 2)
    guard, result = NumericsGuard(config), StepResult(loss=4.0, tokens=1, grad_norm=1.0)
    sums = torch.ones(2, dtype=torch.float64, device=device)

    def healthy() -> None:
        for _ in range(100):
            limits = guard.limits()
            torch.maximum(skip_for_loss(sums, limits.largest[0]), sums[0].float())
            guard.judge(result, limits)
            guard.accept(result)

    added = seconds(healthy, device, 5) / 100
    digest, weights = BitsHash(device), [p for _, p in engine.named_parameters()]
    check = seconds(lambda: torch.stack([digest(p) for p in weights]).sum().item(), device, 3)
    state = 2 * seconds(lambda: engine.watch.verify_state().item(), device, 3)
    interval = config.telemetry.replica_check_interval
    count = sum(p.numel() for p in weights)
    print(f"{count / 1e6:.1f} M parameters, {a.dtype}, {a.batch * a.seq} tokens per step, {device}")
    print(f"step                {step:.4f} s")
    print(f"guard, a step       {added * 1e6:.0f} us = {100 * added / step:.4f} % of it")
    print(f"state check, a step {state:.4f} s = {100 * state / step:.2f} % of it (contained in it)")
    print(f"replica check       {check:.4f} s; every {interval} steps {100 * check / interval / step:.4f} % of a step")


if __name__ == "__main__":
    main()
