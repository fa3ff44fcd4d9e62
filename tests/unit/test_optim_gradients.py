"""What counts in the norm, and which gradients are summed: over all ranks of a layout, without processes."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contexts import rank_of, slice_record

from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.dist.counter import key_of
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import SEQUENCE, InitSpec, ParameterRecord, record_of
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage, build_chunks
from megatron_port.core.model.shapes import model_records
from megatron_port.core.optim.gradients import (
    global_square_norm,
    owned_gradients,
)
from megatron_port.core.pipeline.partition import balanced_layers
from megatron_port.ext.deepspeed.reduction import reduce_partial_gradients

MODEL = ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=4, vocab_size=13, seq_length=8)
TOPOLOGIES = [Topology(), Topology(tp=2), Topology(pp=4), Topology(tp=2, pp=2, dp=2), Topology(tp=4, pp=3),
              Topology(tp=4, kv_copies=2), Topology(tp=2, pp=2, kv_copies=2)]
Pairs = list[tuple[ParameterRecord, torch.Tensor]]


def model_of(topology: Topology, *, tied: bool = True) -> ModelConfig:
    """With fewer key/value heads than tp ranks where the topology has copies of them."""
    groups = topology.tp // topology.kv_copies if topology.kv_copies > 1 else 0
    return dataclasses.replace(MODEL, tie_embeddings=tied, num_query_groups=groups)


def context_of(topology: Topology, rank: int) -> ParallelContext:
    return ParallelContext(topology, rank, torch.device("cpu"), topology.coordinates(rank))


def stage_of(topology: Topology, rank: int, *, tied: bool, sp: bool) -> GPTStage:
    ctx = context_of(topology, rank)
    layout = LayoutConfig(
        tensor_parallel_size=topology.tp, pipeline_parallel_size=topology.pp, sequence_parallel=sp,
        vocab_padding_multiple=8,
    )
    build = BuildContext(
        model=model_of(topology, tied=tied), layout=layout, ctx=ctx, providers=torch_providers(),
        step=StepSlot(DropoutStream(0, ctx.device)), dtype=torch.float32,
    )
    (stage,) = build_chunks(build, balanced_layers([0.0, *[1.0] * MODEL.num_layers, 0.0], topology.pp))
    return stage


def whole_gradient(record: ParameterRecord, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key_of(record.name) % (1 << 40))
    return torch.randn(record.shape, generator=generator, dtype=torch.float64).to(dtype)


def rank_gradients(stage: GPTStage, dtype: torch.dtype) -> Pairs:
    """This rank's slice of one gradient of the whole model, zero in the padding."""
    out = []
    for parameter in stage.parameters():
        record = record_of(parameter)
        grad = torch.zeros(record.local_shape, dtype=dtype)
        record.local_view(grad).copy_(whole_gradient(record, dtype)[record.box()])
        out.append((record, grad))
    return out


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_each_logical_element_is_owned_once(topology: Topology, sp: bool, tied: bool) -> None:
    count: dict[str, torch.Tensor] = {}
    for rank in range(topology.world_size):
        stage, ctx = stage_of(topology, rank, tied=tied, sp=sp), context_of(topology, rank)
        for record in (record_of(p) for p in stage.parameters()):
            seen = count.setdefault(record.name, torch.zeros(record.shape, dtype=torch.int64))
            seen[record.box()] += record.is_owned(ctx.mesh, ctx.rank)
    want = {n: r.shape for n, r in model_records(model_of(topology, tied=tied)).items()}
    assert {n: tuple(c.shape) for n, c in count.items()} == want
    for name, seen in count.items():
        assert bool((seen == 1).all()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_ranks_squares_add_up_to_the_whole_models(topology: Topology, dtype: torch.dtype) -> None:
    """Without groups each rank returns its own share; the shares of a replica are the whole."""
    total = 0.0
    for rank in range(topology.world_size):
        stage, ctx = stage_of(topology, rank, tied=True, sp=True), context_of(topology, rank)
        if ctx.index("dp"):
            continue
        share = global_square_norm(owned_gradients(rank_gradients(stage, dtype), ctx), ctx)
        assert share.dtype == torch.float64 and share.dim() == 0  # the same on ranks that count nothing
        total += float(share)
    records = model_records(model_of(topology)).values()
    want = sum(float(whole_gradient(r, dtype).double().square().sum()) for r in records)
    assert total == pytest.approx(want, rel=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squares_of_halves_are_summed_in_fp32(dtype: torch.dtype) -> None:
    grads = [torch.full((70000,), 2.0, dtype=dtype)]
    assert float(global_square_norm(grads, ParallelContext.single())) == pytest.approx(4 * 70000, rel=1e-6)


def test_a_rank_that_counts_nothing_has_norm_zero() -> None:
    topology = Topology(tp=2)
    ctx = ParallelContext(topology, 1, torch.device("cpu"), topology.coordinates(1))
    record = slice_record("norm.weight", (4,), init=InitSpec("ones"), decay=False)
    assert owned_gradients([(record, torch.ones(4))], ctx) == []
    assert float(global_square_norm([], ctx)) == 0.0


def test_not_finite_stays_not_finite() -> None:
    for bad in (float("inf"), float("nan")):
        norm = global_square_norm([torch.tensor([1.0, bad, 0.0, 0.0])], ParallelContext.single())
        assert not torch.isfinite(norm)


class Recorder:
    """Stands in for the collective: each call is kept, the sum is twice the tensor (two equal ranks)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[torch.dtype, int, object]] = []
        monkeypatch.setattr(dist, "all_reduce", self)

    def __call__(self, tensor: torch.Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM) -> None:
        self.calls.append((tensor.dtype, tensor.numel(), group))
        tensor.mul_(2)


@pytest.mark.parametrize("tied", [True, False])
def test_only_partial_gradients_are_summed_over_tp(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    recorder = Recorder(monkeypatch)
    stage = stage_of(Topology(tp=2), 0, tied=tied, sp=True)
    ctx = rank_of(Topology(tp=2), tp="tp")
    grads = rank_gradients(stage, torch.float32)
    before = {r.name: g.clone() for r, g in grads}
    reduce_partial_gradients(grads, ctx)
    doubled = {r.name for r, g in grads if torch.equal(g, 2 * before[r.name])}
    unchanged = {r.name for r, g in grads if torch.equal(g, before[r.name])}
    # Every replicated parameter: norms, row-parallel biases, positions. A forgotten one drifts silently.
    assert doubled == {r.name for r, _ in grads if r.split_dim is None} and doubled
    assert unchanged == {r.name for r, _ in grads if r.split_dim is not None}
    assert recorder.calls == [(torch.float32, sum(g.numel() for r, g in grads if r.split_dim is None), "tp")]


def test_copies_of_key_value_heads_are_summed_over_those_that_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    stage = stage_of(Topology(tp=4, kv_copies=2), 1, tied=True, sp=False)
    grads = rank_gradients(stage, torch.float32)
    before = [g.clone() for _, g in grads]
    reduce_partial_gradients(grads, rank_of(Topology(tp=4, kv_copies=2), 1, tp="tp", kv_copies="kv"))
    doubled = [r for (r, g), b in zip(grads, before) if not torch.equal(g, b)]
    assert sorted(r.name for r in doubled) == sorted(
        f"layers.{i}.attention.qkv.{kind}" for i in range(4) for kind in ("weight", "bias")
    )
    assert all(r.extent[0] == 2 * 4 for r in doubled) and {call[2] for call in recorder.calls} == {"kv"}


def test_without_sequence_parallelism_nothing_is_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    stage = stage_of(Topology(tp=2), 0, tied=True, sp=False)
    ctx = rank_of(Topology(tp=2), tp="tp")
    reduce_partial_gradients(rank_gradients(stage, torch.float32), ctx)
    assert recorder.calls == []


def test_one_collective_a_dtype_and_shapes_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    shapes = {"a": (2, 3), "b": (4,), "c": (1, 5), "d": (2, 2, 2)}
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32, "d": torch.bfloat16}
    grads = [
        (slice_record(n, s, init=InitSpec("zeros"), decay=False, partial_over=SEQUENCE),
         torch.arange(prod(s), dtype=dtypes[n]).view(s))
        for n, s in shapes.items()
    ]
    # Not contiguous: a transposed view must be written through.
    base = torch.arange(6.0).view(3, 2)
    grads[0] = (grads[0][0], base.t())
    ctx = rank_of(Topology(tp=2), tp="tp")
    reduce_partial_gradients(iter(grads), ctx)
    assert sorted((str(d), n) for d, n, _ in recorder.calls) == [("torch.bfloat16", 12), ("torch.float32", 11)]
    assert torch.equal(base, 2 * torch.arange(6.0).view(3, 2))
    for record, grad in grads[1:]:
        assert torch.equal(grad, 2 * torch.arange(prod(record.shape), dtype=grad.dtype).view(record.shape))
