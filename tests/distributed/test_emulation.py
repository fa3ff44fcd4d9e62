"""One process that rounds as a layout does has its numbers (test_reduction_order.py: the same function)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Order, RoundingEmulation, make_config, run_case, run_cases, single_run, within_rounding
from pool import RankPool

from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.layers import linear
from megatron_port.tools.parity.comparison import FIRST_STEP, FP32, NOISE_FACTOR, Run, compare
from megatron_port.tools.parity.emulation import RoundingNoise, SplitSumLinearKernels
from megatron_port.tools.parity.rank_sums import ring_sum
from megatron_port.tools.parity.run_record import RankTrace

LLAMA = {"activation": "swiglu", "normalization": "rmsnorm", "add_bias": False, "num_query_groups": 4,
         "position_embedding": "rope"}
GPT = {"tie_embeddings": True, "hidden_dropout": 0.1}
SIZES: dict[str, Any] = {"heads": 4, "key_size": 8, "value_size": 8, "chunk": 4, "segment": 6}
KDA = {"mixer_pattern": ("kda", "attention", "gated_delta"), "recurrent": RecurrentConfig(**SIZES)}
MAMBA = {"mixer_pattern": ("mamba2", "kda"), "recurrent": RecurrentConfig(**SIZES, key_heads=1)}
"""Of one group: B and C are rows that all heads read."""


def test_emulation_of_a_run() -> None:
    sp = {"sequence_parallel": True, "vocab_padding_multiple": 8}
    assert RoundingEmulation.of(make_config(dtype="bf16", layout=sp), Topology(1, 2, 2)) is None
    split = RoundingEmulation.of(make_config(dtype="bf16", layout=sp), Topology(2, 2, 1))
    assert split == RoundingEmulation(2, 8, sequence_parallel=True)
    deepspeed = RoundingEmulation.of(make_config(engine="deepspeed", dtype="bf16", layout=sp), Topology(1, 1, 2))
    assert deepspeed == RoundingEmulation(rounded_weight_gradients=True, tied_in_the_dtype=True)
    assert RoundingEmulation.of(make_config(dtype="bf16", fp8="rowwise"), Topology(2, 1, 1)) is None


def _part(elements: int, rank: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).bfloat16()


def _gloo_sums(sizes: list[int]) -> list[torch.Tensor]:
    out = []
    for size in sizes:
        total = _part(size, dist.get_rank())
        dist.all_reduce(total)
        out.append(total)
    return out


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_ring_is_gloos(ranks: RankPool, world: int) -> None:
    """Bit by bit, in bf16, where almost every other order gives another sum."""
    sizes = [1, 7, 64, 1000, 4097, 1_000_001]
    for size, found in zip(sizes, ranks.run(world, _gloo_sums, sizes)[0]):
        parts = [_part(size, rank) for rank in range(world)]
        assert torch.equal(ring_sum(parts), found), size
        if world > 2 and size >= 1000:
            assert not torch.equal(sum(parts[1:], parts[0]), found)


def _case(engine: str, dtype: str, model: dict[str, Any], own: str, **layout: Any) -> RunConfig:
    return make_config(engine=engine, dtype=dtype, model=model, layout=layout, own_kernels=own)


CASES = [
    (_case("native", "bf16", GPT, "on", sequence_parallel=True), Topology(2, 1, 1)),
    (_case("native", "fp16", GPT, "on"), Topology(2, 1, 1)),
    # 32 and 21 of the 53 ids, and none on two ranks.
    (_case("native", "bf16", LLAMA, "off", sequence_parallel=True, vocab_padding_multiple=32), Topology(4, 1, 1)),
    (_case("native", "bf16", GPT, "off", pipeline_schedule="zb-h1"), Topology(2, 2, 1)),
    (_case("native", "bf16", KDA, "off", sequence_parallel=True), Topology(2, 1, 1)),
    (_case("native", "bf16", MAMBA, "off"), Topology(2, 1, 1)),
    (_case("native", "fp16", MAMBA, "off", sequence_parallel=True), Topology(4, 1, 1)),
    (_case("deepspeed", "bf16", GPT, "off", sequence_parallel=True), Topology(2, 1, 2)),
    (_case("deepspeed", "bf16", LLAMA, "on"), Topology(2, 2, 1)),
    (_case("deepspeed", "bf16", GPT, "on"), Topology(1, 2, 2)),
]


@pytest.mark.parametrize(
    "deepspeed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["native", "deepspeed"]
)
def test_the_first_step_of_a_layout_in_half_precision_is_within_the_bounds_of_fp32(
    ranks: RankPool, deepspeed: bool
) -> None:
    """Loss, gradient norm and every gradient by name; from one process that rounds elsewhere they are far off."""
    cases = [(c, t) for c, t in CASES if (c.engine == "deepspeed") == deepspeed]
    for world in sorted({t.world_size for _, t in cases}):
        members = [(c, t) for c, t in cases if t.world_size == world]
        results = ranks.run(world, run_cases, [(c, t, 1, 1) for c, t in members], deepspeed=deepspeed)
        for i, (config, topology) in enumerate(members):
            run = Run.of([r[i] for r in results])
            one = single_run(config, steps=1, order=RoundingEmulation.of(config, topology))
            near = compare(one, run, replace(FP32, key_bias=FIRST_STEP[config.precision.dtype].key_bias), config.model)
            assert all(d.ok for d in near), "\n".join([str(topology), *map(str, near)])
            far = compare(single_run(config, steps=1), run, FP32, config.model)
            assert max(d.value for d in far if d.quantity == "gradient") > 1e-3


_reduce = linear.reduce_from_tp  # type: ignore[attr-defined]


class _Scaled(torch.autograd.Function):
    """The forward pass alone is wrong."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, factor: float) -> torch.Tensor:
        return y * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def _too_large(factor: float, case: tuple[RunConfig, Topology, int, int]) -> RankTrace:
    """A case whose outputs of row-parallel linears are too large where tp > 1."""
    def reduce(y: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return _Scaled.apply(_reduce(y, group), 1.0 if group is None else factor)

    with mock.patch.object(linear, "reduce_from_tp", reduce):
        return run_case(*case)


@pytest.mark.parametrize(("dtype", "factor"), [("fp16", 1.01), ("bf16", 1.1)])
def test_an_error_common_to_a_layout_and_the_process_in_its_place_is_found(
    ranks: RankPool, dtype: str, factor: float
) -> None:
    """Each is the other's to the bit; that both are too far from the plain process and from fp32 is what shows it."""
    config, topology = _case("native", dtype, {"tie_embeddings": True}, "off"), Topology(2, 1, 1)
    both = Run.of(ranks.run(2, _too_large, factor, (config, topology, 1, 1)))
    cut = SplitSumLinearKernels.forward

    def forward(self: SplitSumLinearKernels, *args: Any) -> Any:
        y, saved = cut(self, *args)
        return (y * factor if self.inputs else y), saved

    def single(order: Order) -> Run:
        with mock.patch.object(SplitSumLinearKernels, "forward", forward):
            return single_run(config, steps=1, order=order)

    right = single_run(config, steps=1, order=RoundingEmulation.of(config, topology))
    assert all(d.ok for d in within_rounding(config, topology, right, lambda order: right))
    found = [d for d in within_rounding(config, topology, both, single) if not d.ok]
    assert found and {d.rule for d in found} == {
        "the reference, from the plain process", "the reference, from fp32"}, "\n".join(map(str, found))


def test_random_errors_are_as_large_as_roundings() -> None:
    """What they do to a well-conditioned gradient is what half precision does, and grows with its roundoff."""
    model = {"num_layers": 1, "qk_norm": True, "attention_softcap": 0.5, "activation": "swiglu"}
    wide = make_config(dtype="fp32", model=model)
    exact = single_run(wide, steps=1)
    moved: dict[str, list[float]] = {}
    for dtype in ("bf16", "fp16"):
        narrow = single_run(make_config(dtype=dtype, model=model), steps=1)
        noisy = [single_run(wide, steps=1, order=n) for n in RoundingNoise.of(make_config(dtype=dtype).precision)[:4]]
        for name, gradient in exact.gradients[0].items():
            far = [float((run.gradients[0][name] - gradient).norm()) for run in (narrow, *noisy)]
            moved.setdefault(name, []).extend([far[0], sum(far[1:]) / 4])
    for name, (bf16, noise_bf16, fp16, noise_fp16) in moved.items():
        assert 6 < noise_bf16 / noise_fp16 < 10, name
        assert 0.25 < bf16 / noise_bf16 < NOISE_FACTOR and 0.25 < fp16 / noise_fp16 < NOISE_FACTOR, name
