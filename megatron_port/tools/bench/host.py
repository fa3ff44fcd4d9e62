"""Seconds of the host: steps of the program on a few tokens of small models, and of one with more weights. No run that
is to be planned is among them.

On a GPU the models are so small that the device waits for the host. On a CPU, which computes as well, a layer is timed
in models wide enough that its products leave nothing of the host's own data in a core's cache, as in a run; the
products are measured by themselves and taken off.

A step of m micro-batches takes S + m (B + L · layers): S for the step (norm, update, hashes of the state, which grow
with the weights), B for each micro-batch, L for each of its layers.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch

from megatron_port.core.config.checks import resolve
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.context import ParallelContext
from megatron_port.core.dist.device import DeviceInfo
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.build import build_engine
from megatron_port.tools.bench.passes import DTYPES, mean_over_ranks, product_seconds
from megatron_port.tools.plan.case import Case, Machine, case_of
from megatron_port.tools.plan.kernel_table import Entry
from megatron_port.tools.plan.layer import layer_products, start_seconds
from megatron_port.tools.plan.rates import Rates
from megatron_port.tools.plan.step import optimizer_seconds

FEW, MANY = 1, 5
"""Layers of the two small models."""
LENGTH = 8
SMALL, WIDE, WIDEST = 32, 256, 512
"""Hidden sizes."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step with no micro-batch, and of each micro-batch."""

    fixed: float
    micro_batch: float


def _config(config: RunConfig, layers: int, hidden: int, dtype: str, policy: str = "none") -> RunConfig:
    """A run of one process on this machine with a model of these sizes."""
    model = ModelConfig(
        name="host", num_layers=layers, hidden_size=hidden, num_attention_heads=2, vocab_size=256, seq_length=LENGTH,
        hidden_dropout=0.0, attention_dropout=0.0,
    )
    run = RunConfig(cluster=config.cluster, backend=config.backend, model=model)
    return resolve(with_values(run, {
        "engine": "native", "batch.micro_batch_size": 1, "batch.global_batch_size": 4, "precision.dtype": dtype,
        "layout.zero_stage": 1, "layout.data_parallel_size": 1, "activations.policy": policy,
    }), 1)


def step_time(config: RunConfig, device: DeviceInfo, budget_s: float) -> StepTime:
    """Median times of steps of two and of four micro-batches, taken apart."""
    dtype = DTYPES[config.precision.dtype]
    providers = choose_providers(config.backend, device, dtype, engine="native")
    engine = build_engine(config, ParallelContext.single(device.torch_device), providers)
    tokens = torch.arange(LENGTH).expand(1, LENGTH).contiguous()
    times: dict[int, list[float]] = {2: [], 4: []}
    ends, step = time.perf_counter() + budget_s, 0
    while len(times[2]) < 6 or time.perf_counter() < ends:
        for count, found in times.items():
            batches = [MicroBatch(sample_ids=(i,), tokens=tokens, labels=tokens) for i in range(count)]
            started = time.perf_counter()
            engine.train_step(batches, step=step, lr=1e-4)  # its loss is a number: the device has finished
            found.append(time.perf_counter() - started)
            step += 1
    two, four = (statistics.median(found[2:]) for found in times.values())
    return StepTime(max(2 * two - four, 0.0), (four - two) / 2)


def host_entries(
    config: RunConfig, device: DeviceInfo, machine: Machine, dtype: str, ranks: int, budget_s: float
) -> list[Entry]:
    """The host's seconds as a table's entries, the mean over the ranks, all of which call this."""
    small = [_config(config, layers, SMALL, dtype) for layers in (FEW, MANY)]
    wide = [_config(config, layers, WIDE, dtype) for layers in (FEW, MANY)]
    again = _config(config, MANY, SMALL if device.is_gpu else WIDE, dtype, "full")
    runs = [*small, *(small if device.is_gpu else wide), again, _config(config, 2, WIDEST, dtype)]
    found = [step_time(one, device, (4 if one in small else 10) * budget_s) for one in runs]
    fixed = mean_over_ranks([one.fixed for one in found], ranks)
    passes = mean_over_ranks([one.micro_batch for one in found], ranks)
    forward, backward = mean_over_ranks(_products(wide[0], device, dtype, budget_s), ranks)
    layer = max((passes[3] - passes[2]) / (MANY - FEW) - forward - backward, 1e-9)
    repeated = max((passes[4] - passes[3]) / MANY - forward, 1e-9)
    micro_batch = passes[0] - FEW * (passes[1] - passes[0]) / (MANY - FEW)
    cases, counted = [_case(runs[i]) for i in (0, -1)], replace(
        Rates.of(machine), memory=1.0, launch=0.0, table=None, host=1.0
    )
    calls = sum(start_seconds(cases[0], model_spec(cases[0].model).layers[0], counted))
    few, many = (optimizer_seconds(case, counted) for case in cases)  # at a byte a second: their bytes
    update = max((fixed[-1] - fixed[0]) / (many - few), 1e-15)
    entries = [
        Entry("host", "", "", (1,), 1e-6 * calls / layer),
        Entry("host-recompute", "", "", (1,), 1e-6 / repeated),
        Entry("host-micro-batch", "", "", (1,), 1e-6 / max(micro_batch, 1e-9)),
        Entry("host-step", "", "", (1,), 1e-6 / max(fixed[0] - few * update, 1e-9)),
    ]
    # On a GPU the small models' updates are launches; a large one's is a pass over memory, which is measured as such.
    return entries if device.is_gpu else [*entries, Entry("update", "", dtype, (many,), 1e-9 / update)]


def _products(config: RunConfig, device: DeviceInfo, dtype: str, budget_s: float) -> list[float]:
    """Seconds of a layer's products in a forward and in a backward pass; 0 on a GPU, where the host starts them."""
    if device.is_gpu:
        return [0.0, 0.0]
    case = _case(config)
    shapes = layer_products(case, model_spec(case.model).layers[0])
    found = [product_seconds((int(r), int(c), int(k)), dtype, device.torch_device, budget_s) for r, c, k in shapes]
    return [sum(one for one, *_ in found), sum(two + three for _, two, three in found)]


def _case(config: RunConfig) -> Case:
    return case_of(config, 1)[0]
