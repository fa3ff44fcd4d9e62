"""One training case, run on any layout: what the parity tests send to the ranks."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from corpora import loaded_batches

from megatron_port.core.config.features import OffloadConfig
from megatron_port.core.config.schema import (
    ActivationsConfig,
    BackendConfig,
    BatchConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.loader import RankView
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.layers.providers import Providers
from megatron_port.core.optim.schedules import BatchSchedule, learning_rate
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.settings import MaskNeeds
from megatron_port.run.build import DTYPES, build_engine, with_shared_layers
from megatron_port.run.device import choose_device
from megatron_port.tools.parity import emulation as half_precision
from megatron_port.tools.parity.comparison import Deviation, Run
from megatron_port.tools.parity.emulation import (
    ORDERS,
    REORDERINGS,
    Reordering,
    RoundingEmulation,
    RoundingNoise,
    apply_reduction_order,
)
from megatron_port.tools.parity.run_record import RankTrace, record_run

LR = 1e-2
Order = Reordering | RoundingEmulation | RoundingNoise | None
"""Reduction order of the reference process: another, that of a layout, with random errors, its own."""
__all__ = [
    "LR",
    "REORDERINGS",
    "Order",
    "Reordering",
    "RoundingEmulation",
    "make_batches",
    "make_config",
    "run_case",
    "run_cases",
    "single_run",
    "within_rounding",
]


def make_config(
    *,
    engine: Any = "native",
    dtype: Any = "fp32",
    model: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    micro_batch_size: int = 2,
    global_batch_size: int = 8,
    clip_grad: float = 0.5,
    mask_loss: bool = False,
    own_kernels: Any = "off",
    fp8: Any = "none",
    data: dict[str, Any] | None = None,
) -> RunConfig:
    """Return a small run with clipping active, an odd vocabulary and an uneven number of layers.

    ``layout`` may also say ``recompute``: the policy of activations, or under policy plan the sites of each layer.

    The choices are not typed: parametrized tests and drawn cases hand them on as plain strings.
    """
    base: dict[str, Any] = {
        "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 53, "seq_length": 16,
    }
    layout = {"vocab_padding_multiple": 1, **(layout or {})}
    policy: Any = layout.pop("recompute", "none")
    own = own_kernels == "on" and dtype != "fp64"
    attention: Literal["own", "math"] = "own" if own else "math"
    config = RunConfig(
        engine=engine,
        model=ModelConfig(**{**base, **(model or {})}),
        layout=LayoutConfig(**layout),
        activations=ActivationsConfig(policy=policy) if not isinstance(policy, tuple) else ActivationsConfig(
            policy="plan", layers=policy
        ),
        batch=BatchConfig(micro_batch_size=micro_batch_size, global_batch_size=global_batch_size),
        precision=PrecisionConfig(dtype=dtype, fp8=fp8, initial_loss_scale=1024.0),
        # With Adam's usual eps an element whose gradient is rounding noise takes a full step of either sign, and half
        # precisions underflow some of them to zero: losses then compare noise. 1e-5 is 1e-3 of the gradients' rms here.
        optimizer=OptimizerConfig(lr=LR, clip_grad=clip_grad, eps=1e-5, decay="constant"),
        backend=BackendConfig(
            device="cpu", attention=attention, own_kernels=own_kernels if dtype != "fp64" else "off",
            optimizer="torch" if engine == "deepspeed" else "auto",
        ),
    )
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, mask_eod_loss=mask_loss, **(data or {}))
    )


def sample_tokens(config: RunConfig, sample_id: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [seq + 1] of a sample and, when the loss is masked, its mask [seq]: functions of the sample's id."""
    generator = torch.Generator().manual_seed(1000 + sample_id)
    tokens = torch.randint(0, config.model.vocab_size, (config.model.seq_length + 1,), generator=generator)
    if not config.data.mask_eod_loss:
        return tokens, None
    # Samples count very differently many tokens, so a mean of means is not the mean. Of the first step one pair counts
    # none (a whole micro-batch, or all that a replica has), of the second step no sample does.
    mask = (torch.rand(config.model.seq_length, generator=generator) < (0.2, 0.9, 0.5)[sample_id % 3]).float()
    mask[0], total = 1.0, config.batch.global_batch_size
    if (total > 4 and sample_id % total in (total - 4, total - 3)) or sample_id // total == 1:
        mask.zero_()
    return tokens, mask


def sample_starts(config: RunConfig, sample_id: int) -> torch.Tensor | None:
    """Where the documents of a sample start, int32 [seq], a function of its id: drawn, at every token, at the second
    and the last, none but the first."""
    if config.data.attention_documents == "across":
        return None
    seq, kind = config.model.seq_length, sample_id % 5
    drawn = torch.randperm(seq, generator=torch.Generator().manual_seed(2000 + sample_id))[: 1 + kind]
    edges = {1: torch.arange(seq), 2: torch.tensor([1, seq - 1]), 3: torch.tensor([0])}.get(kind, drawn)
    starts = torch.zeros(seq, dtype=torch.int32)
    starts[edges] = edges.to(torch.int32)
    return starts.cummax(0).values


Batches = Callable[[int], list[MicroBatch]]


def make_batches(config: RunConfig, ctx: ParallelContext, reordering: Reordering | None = None) -> Batches:
    """This rank's micro-batches of a step, by the data law of docs/architecture.md; of the run's loader, where it has
    corpora or synthetic tokens, else of samples that are functions of their ids."""
    if config.data.train or config.data.synthetic:
        return loaded_batches(config, ctx, reordering)
    dp, view = ctx.size("dp"), RankView.on(config, ctx)
    schedule = BatchSchedule(config.batch, dp)

    def batches(step: int) -> list[MicroBatch]:
        out = []
        first, total = schedule.step_plan(step)
        b, order = config.batch.micro_batch_size, list(range(total))
        if reordering is not None:
            b, order = reordering.micro_batch_size(total), reordering.order(total)
        for m in range(total // (b * dp)):
            ids = tuple(first + order[(m * dp + ctx.index("dp")) * b + i] for i in range(b))
            drawn = [sample_tokens(config, i) for i in ids]
            tokens = torch.stack([t for t, _ in drawn])
            masks = [m for _, m in drawn if m is not None]
            starts = [None if s is None else s.numpy() for s in (sample_starts(config, i) for i in ids)]
            out.append(view.micro_batch(
                ids, tokens.numpy() if view.reads else None, mask=torch.stack(masks) if masks else None, starts=starts,
                labels_masked=bool(masks),
            ))
        return out

    return batches


CYCLE = 4
"""Steps after which the samples of :func:`cycled_batches` are the first again."""


def cycled_batches(config: RunConfig, ctx: ParallelContext, reordering: Reordering | None = None) -> Batches:
    """This rank's micro-batches of a step, of few samples, so that a long run learns them."""
    made = functools.cache(make_batches(config, ctx, reordering))
    return lambda step: made(step % CYCLE)


def providers_of(config: RunConfig) -> Providers:
    """What the case's ``backend`` asks for, on the CPU."""
    return choose_providers(
        config.backend, choose_device("cpu"), DTYPES[config.precision.dtype], engine=config.engine,
        attention_dropout=config.model.attention_dropout, fp8=config.precision.fp8, mask=MaskNeeds.of(config),
        moe=config.model.moe,
    )


def release_deepspeed(engine: Any) -> None:
    """Undo what keeps a DeepSpeed engine alive for ever: hooks on its parameters, a module global, its groups.

    Each gloo group has a thread that polls, and DeepSpeed makes nine a run: forty cases on the same ranks would slow
    each other down. A run of our own ends with its process.
    """
    from deepspeed.runtime.pipe import p2p
    from torch.distributed.distributed_c10d import _world

    if engine is not None:
        engine.engine.destroy()
    p2p._grid = None
    for group in [g for g in _world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def run_case(
    config: RunConfig, topology: Topology, steps: int, gradient_steps: int = 1, order: Order = None,
    make: Callable[[RunConfig, ParallelContext, Reordering | None], Batches] = make_batches,
) -> RankTrace:
    """Train on this rank and record; the function that ranks are sent. ``make``: the batches."""
    layout = config.layout
    ctx = ParallelContext.create(
        with_shared_layers(config, dataclasses.replace(
            topology, vp=layout.virtual_pipeline_size, folded=layout.pipeline_schedule == "zb-v",
            kv_copies=config.model.kv_heads_held(topology.tp) // config.model.kv_heads, shard=layout.shard_size,
        )), "cpu"
    )
    engine = None
    try:
        engine = build_engine(config, ctx, providers_of(config))
        if isinstance(order, Reordering):
            apply_reduction_order(engine.stage, order)  # type: ignore[attr-defined]
        elif order is not None:
            order.emulate_rounding(engine.stage)  # type: ignore[attr-defined]
        batches = make(config, ctx, order if isinstance(order, Reordering) else None)
        return record_run(
            engine, ctx, batches, steps=steps, evaluate=True,
            lr=lambda step: learning_rate(config.optimizer, step, config.training.steps),
            # In half precision it would measure how Adam amplifies rounding (docs/parity.md).
            evaluate_after=config.precision.dtype in ("fp32", "fp64"), gradient_steps=gradient_steps,
        )
    finally:
        ctx.close()
        if config.engine == "deepspeed":
            release_deepspeed(engine)
            del engine
            gc.collect()


def run_with_sums(
    cases: Sequence[tuple[RunConfig, Topology]],
    make: Callable[[RunConfig, ParallelContext, Reordering | None], Batches],
) -> list[tuple[RankTrace, list[dict[str, float]]]]:
    """Three steps of each case on this rank, with the named sums of each step."""
    train_step, seen, out = NativeEngine.train_step, list[dict[str, float]](), []

    def keeping(self: NativeEngine, *args: Any, **options: Any) -> Any:
        result = train_step(self, *args, **options)
        seen.append(dict(result.auxiliary))
        return result

    with patch.object(NativeEngine, "train_step", keeping):
        for config, topology in cases:
            trace = run_case(config, topology, 3, 3, make=make)
            out.append((trace, seen[-3:]))
    return out


def run_cases(cases: Sequence[tuple[RunConfig, Topology, int, int]]) -> list[RankTrace]:
    """Several cases of one world size on the same ranks, one after the other."""
    return [run_case(*case) for case in cases]


def run_cycled(config: RunConfig, topology: Topology, steps: int) -> RankTrace:
    """Train on this rank, on few samples, and record the first step's gradients."""
    return run_case(config, topology, steps, 1, None, cycled_batches)


def digest(trace: RankTrace) -> str:
    """Return the SHA-256 of one rank's record, to the bit."""
    out = hashlib.sha256(repr((trace.losses, trace.grad_norms, trace.eval_loss, trace.final_eval_loss)).encode())
    for name, shape, offset, values in (s for part in (*trace.gradients, trace.weights, trace.copies) for s in part):
        out.update(repr((name, tuple(shape), tuple(offset))).encode() + values.contiguous().numpy().tobytes())
    return out.hexdigest()


def digest_cases(cases: Sequence[tuple[RunConfig, Topology, int, int]]) -> list[str]:
    """Run cases on this rank; the function that ranks are sent."""
    return [digest(run_case(*case)) for case in cases]


def _alone(config: RunConfig) -> RunConfig:
    """On one process, engine native."""
    return dataclasses.replace(
        config, engine="native", backend=dataclasses.replace(config.backend, optimizer="auto"),
        layout=LayoutConfig(vocab_padding_multiple=1, pipeline_schedule="1f1b"), offload=OffloadConfig(),
    )


def single_run(
    config: RunConfig, *, steps: int, gradient_steps: int = 1, order: Order = None,
    make: Callable[[RunConfig, ParallelContext, Reordering | None], Batches] = make_batches,
) -> Run:
    """The reference: one process, the native engine, in this very process, one thread."""
    config = _alone(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Run.of([run_case(config, Topology(), steps, gradient_steps, order, make)])
    finally:
        torch.set_num_threads(threads)


def within_rounding(
    config: RunConfig, topology: Topology, other: Run, single: Callable[[Order], Run]
) -> list[Deviation]:
    """Compare ``other`` with one process that rounds where its layout does (``parity.emulation``).

    single: the run on one process, in an order.
    """
    places = RoundingEmulation.of(config, topology)
    there, wide = single(places), _alone(_in_fp32(config))
    return half_precision.within_rounding(config, other, half_precision.SingleRuns(
        rounding_there=there, ordered=lambda count: [single(order) for order in ORDERS[:count]],
        plain=lambda: there if places is None else _first_step(_alone(config)),
        fp32=lambda: _first_step(wide),
        noisy=lambda: [single_run(wide, steps=1, order=noise) for noise in RoundingNoise.of(config.precision)],
    ))


def _in_fp32(config: RunConfig) -> RunConfig:
    """On torch's ops."""
    backend = dataclasses.replace(config.backend, own_kernels="off", attention="math")
    return dataclasses.replace(
        config, backend=backend, precision=dataclasses.replace(config.precision, dtype="fp32", fp8="none")
    )


@functools.lru_cache(maxsize=256)
def _first_step(config: RunConfig) -> Run:
    return single_run(config, steps=1)
