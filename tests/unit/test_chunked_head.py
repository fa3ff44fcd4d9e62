"""The head and its loss in chunks of tokens: against torch's cross-entropy of whole logits by autograd, its memory as
planned and as allocated, and what it does not go with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory_matrix import run_of
from rank_memory import measure

from megatron_port.core.config.checks import problems
from megatron_port.core.config.features import DistillationConfig
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.kernels.kernels import load as load_kernels
from megatron_port.ext.kernels.ops.softmax import own_cross_entropy
from megatron_port.ext.memory.chunked_head import ChunkedHead
from megatron_port.ext.telemetry.flops import hardware_flops
from megatron_port.tools.plan.activation_plan import with_activation_plan
from megatron_port.tools.plan.case import Machine, case_of, machine_of
from megatron_port.tools.plan.layer import head_cost
from megatron_port.tools.plan.memory import stage_memory
from megatron_port.tools.plan.rates import Links, Rates, span

MODEL = ModelConfig(
    num_layers=1, hidden_size=12, num_attention_heads=2, vocab_size=53, seq_length=11, tie_embeddings=False,
    head_bias=True, logits_softcap=3.0, normalization="rmsnorm",
)
Z = 0.03
CHUNKS = (1, 4, 6, 9, 33, 100)
"""Of 33 tokens, three at each position: fewer than a position has, sizes that divide nothing, all, more than all."""


def head_of(chunk: int, dtype: torch.dtype, own: bool = False, z_loss: float = Z, **options: Any) -> ChunkedHead:
    """A head of random weights, the same for every size of chunks."""
    providers = torch_providers()
    if own:
        load_kernels("cpu")
        providers = replace(providers, cross_entropy=own_cross_entropy)
    ctx = ParallelContext.single()
    build = BuildContext(
        model=MODEL, layout=LayoutConfig(vocab_padding_multiple=8), ctx=ctx, providers=providers,
        step=StepSlot(DropoutStream(0, ctx.device)), dtype=dtype,
        options=BuildOptions(head_chunk=chunk, z_loss=z_loss, **options),
    )
    head = ChunkedHead(model_spec(MODEL).head, build)
    drawn = torch.Generator().manual_seed(5)
    for p in head.parameters():
        p.data.copy_(torch.randn(p.shape, generator=drawn, dtype=torch.float64) + (p.dim() == 1))
    return head


def exact(head: ChunkedHead, x: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
    """Losses [batch, seq], and by autograd the gradients of x and of the parameters, in fp64."""
    given: Any = (x, head.norm.weight, head.weight, head.bias)
    leaves = [t.detach().double().requires_grad_() for t in given]
    x, norm, weight, bias = leaves
    y = x * (x.square().mean(-1, keepdim=True) + MODEL.norm_epsilon).rsqrt() * norm
    logits = 3.0 * torch.tanh((y @ weight.t() + bias)[..., :53] / 3.0)
    losses = F.cross_entropy(logits.transpose(1, 2), labels.t(), reduction="none") + Z * logits.logsumexp(-1) ** 2
    return [losses.t(), *torch.autograd.grad((losses.t() * factor).sum(), leaves)]


def drawn_input() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations [seq, batch, hidden], labels and factors [batch, seq], a third of these zeros."""
    drawn = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 53, (3, 11), generator=drawn)
    factor = torch.rand(3, 11, generator=drawn, dtype=torch.float64)
    return torch.randn(11, 3, 12, generator=drawn, dtype=torch.float64), labels, factor * (factor > 1 / 3)


def relative(found: Any, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize(("dtype", "own", "bound"), [
    (torch.float64, False, 1e-12), (torch.float32, False, 2e-6), (torch.float32, True, 2e-6),
    (torch.bfloat16, False, 4e-2), (torch.bfloat16, True, 4e-2),
])
@pytest.mark.parametrize("sums", [False, True])
def test_losses_and_gradients_are_autograds(dtype: torch.dtype, own: bool, bound: float, sums: bool) -> None:
    """``sums``: the weight's gradient goes to an engine's sum in full precision, on top of what that holds."""
    x, labels, factor = drawn_input()
    for chunk in CHUNKS:
        head, given = head_of(chunk, dtype, own), x.to(dtype, copy=True).requires_grad_()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total, added = torch.full(head.weight.shape, 2.0, dtype=wide), list[torch.Tensor]()
        if sums:
            accumulator = WgradAccumulator(added.append, partial(_as_it_is, total))
            head.weight.wgrad_accumulator = accumulator  # type: ignore[attr-defined]
        losses = head.token_losses(given, labels, z_loss=Z)
        (losses * factor.to(losses.dtype)).sum().backward()
        wanted = exact(head, given, labels, factor)
        of_weight = total - 2.0 if sums else head.weight.grad
        found = [losses, given.grad, head.norm.weight.grad, of_weight, head.bias.grad]  # type: ignore[union-attr]
        assert len(added) == sums
        for name, one, other in zip(("loss", "x", "norm", "weight", "bias"), found, wanted, strict=True):
            assert one is not None and relative(one, other) <= bound, (chunk, name, relative(one, other))


def test_a_first_sum_is_written_over() -> None:
    """Whatever lies there: an engine does not clear the sums of its matrices."""
    x, labels, factor = drawn_input()
    head = head_of(6, torch.float64)
    total = torch.full(head.weight.shape, float("nan"), dtype=torch.float64)
    head.weight.wgrad_accumulator = WgradAccumulator(  # type: ignore[attr-defined]
        lambda weight: None, lambda weight: total, lambda weight: total)
    given = x.clone().requires_grad_()
    (head.token_losses(given, labels, z_loss=Z) * factor).sum().backward()
    assert relative(total, exact(head, given, labels, factor)[3]) <= 1e-12


def _as_it_is(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return total


def smoothed(logits: torch.Tensor, labels: torch.Tensor, *, extent: int, **others: Any) -> torch.Tensor:
    """Label smoothing, as a plugin's loss of tokens."""
    flat = logits[..., :extent].flatten(0, -2)
    return F.cross_entropy(flat, labels.flatten(), label_smoothing=0.2, reduction="none").view(labels.shape)


def test_any_loss_of_tokens_goes_with_it_and_evaluations_report_the_cross_entropy() -> None:
    x, labels, factor = drawn_input()
    out: list[list[torch.Tensor]] = []
    for chunk in (4, 100):
        head, given = head_of(chunk, torch.float64, loss=smoothed), x.clone().requires_grad_()
        (head.token_losses(given, labels) * factor).sum().backward()
        whole = head(x)
        reference = smoothed(whole, labels.t().contiguous(), extent=53).t()
        evaluated = head.eval().token_losses(x, labels, z_loss=Z)
        plain = F.cross_entropy(whole[..., :53].transpose(1, 2), labels.t(), reduction="none").t()
        assert relative(evaluated, plain.detach()) <= 1e-12
        leaf = x.clone().requires_grad_()
        head.train().zero_grad()
        (gradient,) = torch.autograd.grad(
            (smoothed(head(leaf), labels.t().contiguous(), extent=53).t() * factor).sum(), leaf)
        assert given.grad is not None and relative(given.grad, gradient) <= 1e-12
        out.append([given.grad, reference])
    assert relative(out[0][0], out[1][0]) <= 1e-12


BASE: dict[str, Any] = {
    "family": "gpt", "dtype": "fp32", "schedule": "1f1b", "vp": 1, "pp": 1, "tp": 1, "sp": False, "zero": 1, "dp": 2,
    "m": 8, "micro": 2, "recompute": "none", "seq": 128, "layers": 2, "hidden": 64, "vocab": 4000,
}
RANKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}), ({"dtype": "bf16"}, {"logits_softcap": 5.0}), ({"tp": 2}, {}), ({"tp": 2, "sp": True}, {}),
    ({"family": "llama", "recompute": "full"}, {"logits_softcap": 5.0}),
    ({"family": "llama", "tp": 2, "sp": True, "dtype": "bf16", "recompute": "full"}, {}),
    ({"pp": 2, "vp": 2, "schedule": "zb-v", "layers": 4, "dtype": "fp16"}, {}),
    ({"family": "llama", "zero": 3, "recompute": "full", "dtype": "bf16"}, {}),
    ({"family": "llama", "vocab": 2000}, {"mtp_layers": 2}),
]


def run_in_chunks(choices: dict[str, Any], model: dict[str, Any], chunk: int) -> RunConfig:
    config = run_of({**BASE, **choices})
    return replace(
        config, model=replace(config.model, **model), activations=replace(config.activations, head_chunk=chunk))


def both(config: RunConfig) -> tuple[float, float, float]:
    """Bytes that a rank of the last stage allocates and that are planned, and those of its logits."""
    case, _ = case_of(config)
    stage = case.grid.last_stage
    planned = stage_memory(case, Machine(cluster=config.cluster, hardware=config.hardware), stage)
    found = measure(config, stage * case.dp * case.tp)
    logits = case.padded_vocab / case.tp * case.micro_batch * case.model.seq_length * case.width
    return found.peak, planned.allocated + round(found.held - planned.static), logits


@pytest.mark.parametrize(("choices", "model"), RANKS)
def test_planned_bytes_are_the_ranks_own(choices: dict[str, Any], model: dict[str, Any]) -> None:
    for chunk in (32, 100):
        measured, planned, _ = both(run_in_chunks(choices, model, chunk))
        assert planned == pytest.approx(measured, rel=0.02), chunk


def test_a_rank_has_the_logits_of_one_chunk() -> None:
    """Whole logits are 4.1 MB: 7/8 of them go at least, in forward passes with what torch's loss makes of them."""
    measured = {chunk: both(run_in_chunks({}, {}, chunk)) for chunk in (0, 32)}
    logits = measured[0][2]
    assert measured[0][0] - measured[32][0] >= 7 / 8 * logits


def test_the_planner_counts_one_more_product() -> None:
    """Of three; products of fewer rows take no less."""
    config, machine, costs = run_in_chunks({"seq": 256}, {}, 0), machine_of(load("clusters/dgx-h100").config), []
    for chunk in (0, 512, 128):
        case, _ = case_of(replace(config, activations=replace(config.activations, head_chunk=chunk)))
        costs.append(head_cost(case, Rates.of(machine), Links.of(machine), span(machine, case.tp, 1)))
    forward = costs[0].forward
    assert forward / 2 < costs[1].backward - costs[0].backward <= forward
    more = hardware_flops(config.model, chunked_head=True) - hardware_flops(config.model)
    assert more == 2 * 4000 * 64 * 256 == model_spec(config.model).head.forward_flops(256)
    assert costs[2].backward >= costs[1].backward and costs[1].forward == forward


def test_chunks_are_chosen_where_whole_logits_do_not_fit() -> None:
    def chosen(memory: float, *changes: str) -> int:
        config = load("models/llama-8b", [
            "engine=native", "layout.tensor_parallel_size=8", "model.seq_length=131072", "activations.head_chunk=-1",
            "activations.policy=full", "layout.sequence_parallel=true", "precision.dtype=bf16", *changes,
        ]).config
        cluster = load("clusters/dgx-h100").config
        if memory:
            config = replace(config, cluster=replace(cluster.cluster, memory_gb=memory), hardware=cluster.hardware)
        return with_activation_plan(config, 8).activations.head_chunk

    assert chosen(1000.0) == 0 and chosen(20.0) == 2**28 // (2 * 129024 // 8) // 128 * 128  # logits: 4.2 GB
    assert chosen(0.0) > 0 == chosen(0.0, "model.seq_length=16384")  # on a device that nobody described
    assert chosen(20.0, "model.seq_length=4096") == 0  # less than a chunk


@pytest.mark.parametrize(("change", "words"), [
    (lambda c: replace(c, engine="deepspeed"), "whose pipeline passes whole logits"),
    (lambda c: replace(c, layout=replace(c.layout, zero_stage=3), distillation=DistillationConfig(teacher="t")),
     "the weights of the teacher's head"),
    (lambda c: replace(c, activations=replace(c.activations, head_chunk=-2)), "head_chunk"),
])
def test_refusals(change: Callable[[RunConfig], RunConfig], words: str) -> None:
    found = problems(change(run_in_chunks({}, {}, 32)), world_size=2)
    assert any(words in problem for problem in found), found
