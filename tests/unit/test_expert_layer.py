"""Layers of experts on one process: against a loop over experts in plain torch, and what peers got wrong in silence.

The tests of ``tests/distributed/test_expert_errors.py`` have the faults that need several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import make_batches, make_config, providers_of
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepContext, StepShared, StepSlot, Tallies
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.experts.experts import grouped_linear
from megatron_port.ext.experts.moe import MoE
from megatron_port.ext.experts.router import tally_specs
from megatron_port.ext.experts.spec import moe_of
from megatron_port.ext.telemetry.flops import active_count, model_flops
from megatron_port.run.build import build_engine

SEQ, BATCH, HIDDEN, EXPERTS = 8, 3, 16, 6
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 2, "seq_length": SEQ, "vocab_size": 53,
                         "num_layers": 1}


def make_layer(dtype: torch.dtype = torch.float64, **moe: Any) -> MoE:
    """A layer with a micro-batch of three samples under way."""
    model = ModelConfig(**SIZES, moe=MoEConfig(num_experts=EXPERTS, **{"ffn_hidden_size": 8, **moe}))
    step = StepSlot(DropoutStream(0, torch.device("cpu")))
    tallies = Tallies(tally_specs(1, EXPERTS), step.stream.device)
    step.announce(1, tuple(range(BATCH)), StepShared(sample_factor=0.25, tallies=tallies))
    spec = moe_of(model_spec(model).layers[0])
    assert spec is not None
    layer = MoE("layers.0", 0, spec, BuildContext(
        model=model, layout=LayoutConfig(), ctx=ParallelContext.single("cpu"), providers=torch_providers(),
        step=step, dtype=dtype,
    ))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return layer


def tokens_of(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SEQ, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def context_of(layer: MoE) -> StepContext:
    context = layer.router.step.current
    assert context is not None
    return context


def by_hand(layer: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and terms of the loss, by docs/moe.md, with every expert computing every token."""
    moe, e, flat = layer.router.moe, layer.experts, x.flatten(0, 1)
    z = flat @ layer.router.weight.T
    p = z.softmax(-1) if moe.score == "softmax" else z.sigmoid()
    chosen = torch.zeros_like(p).scatter(1, p.topk(moe.top_k).indices, 1.0)
    weight = p * chosen
    if moe.normalize:
        weight = weight / weight.sum(1, keepdim=True)
    assert e.up_bias is not None and e.down_bias is not None
    out = torch.zeros_like(flat)
    for i in range(EXPERTS):
        hidden = F.gelu(flat @ e.up_weight[i].flatten(0, -2).T + e.up_bias[i].flatten())
        out = out + moe.scale * weight[:, i : i + 1] * (hidden @ e.down_weight[i].T + e.down_bias[i])
    loss = z.logsumexp(1).square().sum() * moe.z_weight / SEQ
    share = p / p.sum(1, keepdim=True)
    for sample in range(BATCH):
        of_sample = slice(sample, None, BATCH)
        mean = share[of_sample].mean(0)
        loss = loss + moe.balance_weight * (chosen[of_sample].mean(0) * EXPERTS / moe.top_k * mean).sum()
    return out.view_as(x), 0.25 * loss


@pytest.mark.parametrize("moe", [
    {"top_k": 2}, {"top_k": 1, "normalize": False}, {"top_k": 3, "score": "sigmoid", "scale": 2.5},
], ids=["two", "one", "sigmoid"])
def test_gradients_of_router_and_experts_are_those_of_a_loop(moe: dict[str, Any]) -> None:
    """Nothing is lost between the experts' results, the balance and z losses, and the router."""
    layer = make_layer(**moe, balance_loss="sequence", balance_weight=0.1, z_weight=0.01)
    x, other = tokens_of(), tokens_of()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
    parameters = list(layer.parameters())
    out, (plain, loss) = layer(x), by_hand(layer, other)
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(out, [x, *parameters], grad)
    wanted = torch.autograd.grad([plain, loss], [other, *parameters], [grad, torch.ones_like(loss)])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_router_in_half_precision_scores_in_fp32() -> None:
    """Scores, and what is compared, are those of an fp32 router of the same values; not rounded to bf16."""
    layer, wide = make_layer(torch.bfloat16), make_layer(torch.float32)
    wide.router.weight.data.copy_(layer.router.weight)
    x = tokens_of(torch.bfloat16)
    route, expected = layer.router(x), wide.router(x.float())
    assert route.weights.dtype == torch.float32 and torch.equal(route.experts, expected.experts)
    torch.testing.assert_close(route.weights, expected.weights, rtol=1e-6, atol=0)


def test_the_second_experts_lot_does_not_see_the_scale() -> None:
    found = [make_layer(second_expert="random", scale=scale).router(tokens_of()) for scale in (1.0, 4.0)]
    assert found[0].kept is not None and not bool(found[0].kept.all())
    assert torch.equal(found[0].kept, found[1].kept) and torch.equal(4.0 * found[0].weights, found[1].weights)


def test_counts_are_exact_and_move_the_bias_by_the_counts_alone() -> None:
    """A count beyond 2^24, one more than the mean: a float32 does not tell them apart."""
    router = make_layer(balance_bias=True, bias_rate=0.5).router
    counts = torch.full((1, EXPERTS), 1 << 30)
    counts[0, 2] += 6
    assert context_of(make_layer()).tallies.specs["expert_tokens"].dtype == torch.int64  # type: ignore[union-attr]
    router.after_update({"expert_tokens": counts}, torch.tensor(0.0))
    assert router.balance_bias is not None
    assert router.balance_bias.tolist() == [0.5, 0.5, -0.5, 0.5, 0.5, 0.5]
    router.after_update({"expert_tokens": counts}, torch.tensor(1.0))  # refused
    assert router.balance_bias.tolist() == [0.5, 0.5, -0.5, 0.5, 0.5, 0.5]


def test_a_recomputed_pass_routes_as_the_first_and_counts_nothing() -> None:
    """Its input is other than the first's, as rounding may make it, and so are its scores: not its experts."""
    layer = make_layer(capacity_factor=1.0, balance_loss="sequence", z_weight=0.1)
    context, step = context_of(layer), layer.router.step
    first = layer.router(tokens_of())
    assert context.tallies is not None
    counted = {name: value.clone() for name, value in context.tallies.totals(None).items()}
    assert int(counted["expert_tokens"].sum()) == 2 * SEQ * BATCH and float(counted["margin"].sum()) > 0
    with step.use(step.state().again()):
        again = layer.router(-tokens_of())
    assert torch.equal(again.experts, first.experts) and torch.equal(again.kept, first.kept)
    assert not torch.equal(again.weights, first.weights)
    for name, value in context.tallies.totals(None).items():
        assert torch.equal(value, counted[name]), name


def test_the_balance_bias_is_not_cast_and_survives_a_checkpoint() -> None:
    config = make_config(dtype="bf16", model={**SIZES, "moe": MoEConfig(
        num_experts=EXPERTS, ffn_hidden_size=8, balance_bias=True,
    )})
    engine = build_engine(config, ParallelContext.single("cpu"), providers_of(config))
    assert isinstance(engine, NativeEngine)
    (_, bias), = engine.buffers
    engine.train_step(make_batches(config, engine.ctx)(0), step=0, lr=1e-2)
    assert bias.dtype == torch.float32 and bool(bias.any())
    kept = bias.clone()
    engine.stage.half()
    (record, cast), = recorded_buffers(engine.stage)
    assert cast.dtype == torch.float32 and torch.equal(cast, kept)
    saved = {piece.name: piece for piece in engine.state_pieces()}
    assert torch.equal(saved[record.name].tensor.view(-1), kept)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_experts_without_tokens_have_no_gradient_and_spoil_none(dtype: torch.dtype) -> None:
    """All tokens go to two of six experts."""
    layer = make_layer(dtype, balance_bias=True)
    assert layer.router.balance_bias is not None
    layer.router.balance_bias[[1, 4]] = 10.0
    x = tokens_of(dtype)
    with poisoned_memory():
        out = layer(x)
        out.backward(torch.ones_like(out))
    assert bool(out.isfinite().all()) and x.grad is not None and bool(x.grad.isfinite().all())
    for name, p in layer.experts.named_parameters():
        assert p.grad is not None and bool(p.grad.isfinite().all()), name
        used = p.grad.flatten(1).abs().amax(1) > 0
        assert used.tolist() == [False, True, False, False, True, False], name
    assert layer.router.weight.grad is not None and bool(layer.router.weight.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_rows_at_all(dtype: torch.dtype) -> None:
    """A rank whose experts nobody chose."""
    weight = torch.randn(2, 16, 8, dtype=dtype, requires_grad=True)
    rows = torch.empty(0, 8, dtype=dtype, requires_grad=True)
    with poisoned_memory():
        out = grouped_linear(rows, weight, None, (0, 0))
        out.backward(torch.ones_like(out))
    assert out.shape == (0, 16) and weight.grad is not None and not bool(weight.grad.any())


READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""torch's own words for operators whose result, or its size, hangs on values: on a GPU the host waits for those."""


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sized = (kwargs or {}).get("output_size") is not None  # the caller says how many
        self.count += not sized and any(tag in func.tags for tag in READS_VALUES)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the counts, in the forward pass; never in the backward pass, nor where the forward pass is computed again.
    (``tests/ghost/expert_waits.py`` counts the runtime's waits.)"""
    reads: list[tuple[str, torch.Size]] = []

    def noted(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor) -> Any:
            reads.append((name, tensor.shape))
            return method(tensor)

        return read

    layer = make_layer(top_k=2, capacity_factor=1.0, balance_loss="sequence", balance_bias=True, z_weight=0.1,
                       jitter=0.01, second_expert="random", groups=3, top_groups=2)
    x, other, step = tokens_of(), HostReads(), layer.router.step
    for name in ("cpu", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    on_the_host = ("tolist", torch.Size([2, 1, EXPERTS]))
    with other:
        out = layer(x)
        assert reads == [("cpu", torch.Size([EXPERTS])), on_the_host]
        with step.use(step.state().again()):
            out = layer(x)
        out.backward(torch.ones_like(out))
    assert reads[2:] == [on_the_host]
    assert other.count == 0


def test_operations_of_a_token_are_those_of_its_experts() -> None:
    """Six per active parameter of a matrix and token, forward and backward; idle experts and those beyond cost none."""
    dense = ModelConfig(**SIZES, add_bias=False, ffn_hidden_size=8)
    sparse = replace(dense, moe=MoEConfig(num_experts=EXPERTS, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=24))
    expert = 2 * HIDDEN * 8
    more = 2 * expert + EXPERTS * HIDDEN + 2 * HIDDEN * 24 - expert  # in place of the dense block
    assert model_flops(sparse) - model_flops(dense) == 6 * SEQ * more
    assert active_count(sparse) - active_count(dense) == more
    wider = replace(sparse, moe=replace(sparse.moe, num_experts=2 * EXPERTS))
    assert model_flops(wider) - model_flops(sparse) == 6 * SEQ * EXPERTS * HIDDEN  # the router's rows
