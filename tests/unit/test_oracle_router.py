"""What a router draws, drops, balances and counts, against numpy: docs/moe.md's definitions, with enough draws that a
biased one fails."""

from __future__ import annotations

import math
from decimal import ROUND_FLOOR, Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import WHOLE_SEQUENCE
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepShared, StepSlot, Tallies
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.experts.router import Router, tally_specs
from megatron_port.ext.experts.spec import moe_of
from megatron_port.run.build import build_engine

HIDDEN, FACTOR = 16, 0.25


def router_of(seq: int, batch: int, experts: int, seed: int = 0, **moe: Any) -> Router:
    """A router in training, with a micro-batch under way."""
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, seq_length=seq, vocab_size=53,
        moe=MoEConfig(num_experts=experts, ffn_hidden_size=8, **moe),
    )
    step = StepSlot(DropoutStream(seed, torch.device("cpu")))
    tallies = Tallies(tally_specs(1, experts), step.stream.device)
    step.announce(3, tuple(range(batch)), StepShared(sample_factor=FACTOR, tallies=tallies))
    spec = moe_of(model_spec(model).layers[0])
    assert spec is not None
    router = Router("layers.0", 0, spec, BuildContext(
        model=model, layout=LayoutConfig(), ctx=ParallelContext.single("cpu"), providers=torch_providers(),
        step=step, dtype=torch.float64,
    ), WHOLE_SEQUENCE)
    with torch.no_grad():
        for p in router.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    return router


def inputs(seq: int, batch: int) -> torch.Tensor:
    return torch.randn(seq, batch, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def totals(router: Router) -> dict[str, torch.Tensor]:
    assert router.step.current is not None and router.step.current.tallies is not None
    return router.step.current.tallies.totals(None)


def is_uniform(u: np.ndarray, cells: int = 20) -> bool:
    """Chi-square of numbers in (0, 1) over equal cells: within five deviations of its mean."""
    counts = np.histogram(u, cells, (0.0, 1.0))[0]
    wanted = u.size / cells
    chi = float(((counts - wanted) ** 2 / wanted).sum())
    return counts.sum() == u.size and abs(chi - (cells - 1)) < 5 * math.sqrt(2 * (cells - 1))


# ------------------------------------------------------------------------------------------------ jitter


def factors(router: Router, x: torch.Tensor) -> np.ndarray:
    """What the router multiplies its input by: with the identity for its matrix, sigmoid scores are of the input."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(HIDDEN))
    route = router(x)
    assert route.experts.shape[1] == HIDDEN  # all of them, ascending
    out: np.ndarray = (torch.logit(route.weights.detach()).view_as(x) / x).numpy()
    return out


@pytest.mark.parametrize("jitter", [0.01, 0.4])
def test_jitter_is_uniform_on_both_sides_of_one(jitter: float) -> None:
    """32,768 draws: mean, variance, range and cells of a uniform distribution from 1 - jitter to 1 + jitter, each
    element by itself, by multiplication (arXiv 2101.03961, section 2.2)."""
    router = router_of(64, 32, HIDDEN, jitter=jitter, score="sigmoid", normalize=False, top_k=HIDDEN)
    x = torch.full((64, 32, HIDDEN), 2.0, dtype=torch.float64)
    x[::2] = -0.5
    drawn = factors(router, x)
    u = (drawn - (1 - jitter)) / (2 * jitter)
    n = u.size
    assert 0 < u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * n) and abs(u.var() - 1 / 12) < 5 / math.sqrt(180 * n)
    assert is_uniform(u)
    for axis in range(3):  # neighbours, in any direction, have nothing in common
        a, b = (np.take(u, range(start, u.shape[axis] - 1 + start), axis).ravel() - 0.5 for start in (0, 1))
        assert abs((a * b).mean() * 12) < 5 / math.sqrt(a.size)
    router.stream.enabled = False
    np.testing.assert_allclose(factors(router, x), 1.0, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ the second expert


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_second_of_two_is_drawn_with_twice_its_weight(scale: float) -> None:
    """32,768 tokens (GShard, arXiv 2006.16668, algorithm 1): in each cell of weights as often as they say; the first
    always; all in evaluation."""
    router = router_of(512, 64, 6, second_expert="random", scale=scale)
    x = 0.5 * inputs(512, 64)
    route = router(x)
    weights = (route.weights.detach() / scale).numpy()
    assert route.kept is not None
    kept, second = route.kept.numpy(), weights.argmin(1)[:, None]
    assert np.take_along_axis(kept, 1 - second, 1).all()
    p, used = 2 * np.take_along_axis(weights, second, 1)[:, 0], np.take_along_axis(kept, second, 1)[:, 0]
    assert p.min() > 0 and p.max() <= 1
    cells = np.array_split(np.argsort(p), 8)
    chi = [(used[c].sum() - p[c].sum()) ** 2 / (p[c] * (1 - p[c])).sum() for c in cells]
    assert sum(chi) < 8 + 5 * math.sqrt(16), chi
    assert int(totals(router)["dropped"][0]) == (~kept).sum()
    router.stream.enabled = False
    assert router(x).kept is None


# ------------------------------------------------------------------------------------------------ capacity


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 5000), st.integers(1, 64))
def test_capacity_is_rounded_down(hundredths: int, k: int, seq: int, experts: int) -> None:
    """The number that is written, 1.15, not the binary one below it; at least one token."""
    factor = Decimal(hundredths) / 100
    wanted = int((factor * k * seq / experts).quantize(Decimal(1), ROUND_FLOOR))
    moe = MoEConfig(num_experts=experts, top_k=k, capacity_factor=float(factor))
    assert moe.capacity(seq) == max(1, wanted)


def test_capacity_of_a_written_factor() -> None:
    assert MoEConfig(num_experts=8, top_k=1, capacity_factor=1.15).capacity(800) == 115  # 114.99999999999999 in binary
    assert MoEConfig(num_experts=8, top_k=2, capacity_factor=1.25).capacity(10) == 3  # of 3.125
    assert MoEConfig(num_experts=64, top_k=1, capacity_factor=1.0).capacity(32) == 1  # of 0.5
    assert MoEConfig(num_experts=8, top_k=2).capacity(10) == 0  # no limit


def takers(experts: np.ndarray, scores: np.ndarray, capacity: int, *, by_score: bool) -> np.ndarray:
    """Copies [positions, batch, k] that find a place, one expert after the other."""
    kept = np.zeros(experts.shape, bool)
    for sample in range(experts.shape[1]):
        for expert in np.unique(experts[:, sample]):
            copies = [(t, j) for t, j in zip(*np.nonzero(experts[:, sample] == expert))]
            if by_score:
                copies.sort(key=lambda c: -scores[c[0], sample, expert])
            for t, j in copies[:capacity]:
                kept[t, sample, j] = True
    return kept


@pytest.mark.parametrize("drop_by", ["position", "probability"])
@pytest.mark.parametrize(("top_k", "capacity_factor"), [(1, 1.25), (2, 0.8), (2, 1.0), (3, 0.05)])
def test_who_finds_a_place_at_an_expert(drop_by: Any, top_k: int, capacity_factor: float) -> None:
    """Of each sample the first, or the highest scores; dropped copies are counted."""
    router = router_of(30, 4, 5, top_k=top_k, normalize=top_k > 1, capacity_factor=capacity_factor, drop_by=drop_by)
    x = inputs(30, 4)
    route = router(x)
    logits = (x @ router.weight.T).detach().numpy()
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    experts = route.experts.view(30, 4, top_k).numpy()
    capacity = max(1, math.floor(capacity_factor * top_k * 30 / 5 + 1e-9))
    wanted = takers(experts, scores, capacity, by_score=drop_by == "probability")
    assert route.kept is not None and np.array_equal(route.kept.view(30, 4, top_k).numpy(), wanted)
    assert 0 < int(totals(router)["dropped"][0]) == (~wanted).sum()


# ------------------------------------------------------------------------------------------------ balance


def softmax(z: torch.Tensor) -> torch.Tensor:
    e = z.exp()
    return e / e.sum(-1, keepdim=True)


def one_hot(experts: torch.Tensor, number: int) -> torch.Tensor:
    return (experts[..., None] == torch.arange(number)).double().sum(-2)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["sequence", "previous_step", "sequence, by scores alone"])
def test_balance_and_z_losses_are_the_papers(score: Any, kind: str) -> None:
    """Switch's E Σ f P (arXiv 2101.03961, equation 4) over a sample's tokens, with f of the step before under
    previous_step, or of the choice without the bias (DeepSeek-V3, equation 18); ST-MoE's mean of log² Z (arXiv
    2202.08906, equation 5). Values and the gradient of the router; times the number of samples."""
    seq, batch, experts, k = 12, 3, 6, 2
    biased = kind == "sequence, by scores alone"
    router = router_of(seq, batch, experts, top_k=k, score=score, balance_loss=kind.split(",")[0], balance_weight=0.7,
                       z_weight=0.3, balance_bias=biased)
    last = torch.tensor([5.0, 0.0, 1.0, 2.0, 3.0, 1.0], dtype=torch.float64) / 12  # shares of all choices
    if router.load is not None:
        assert not router.load.any()  # before the first step
        router.load.copy_(last * experts)
    if router.balance_bias is not None:
        router.balance_bias.copy_(torch.linspace(1.0, -1.0, experts))
    x = inputs(seq, batch)
    route = router(x)
    (0.0 * route.weights.sum()).backward()
    weight = router.weight.detach().clone().requires_grad_()
    z = x @ weight.T
    p = softmax(z) if score == "softmax" else 1 / (1 + (-z).exp())
    share = p / p.sum(-1, keepdim=True)
    chosen = p.argsort(-1, descending=True)[..., :k] if biased else route.experts.view(seq, batch, k)
    f = last.expand(batch, experts) if kind == "previous_step" else one_hot(chosen, experts).mean(0) / k
    balance = experts * (f * share.mean(0)).sum()
    log_z = z.exp().sum(-1).log()
    ((0.7 * balance + 0.3 * log_z.square().mean(0).sum()) * FACTOR).backward()
    found = totals(router)
    assert float(found["balance_loss"][0]) == pytest.approx(float(balance), rel=1e-6)  # shares are buffers in fp32
    assert float(found["z_loss"][0]) == pytest.approx(float(log_z.square().sum()), rel=1e-12)
    assert router.weight.grad is not None and weight.grad is not None
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=2e-6, atol=1e-9)
    if biased:
        assert not torch.equal(chosen.sort(-1).values, route.experts.view(seq, batch, k))


def test_what_a_step_leaves_behind() -> None:
    """Shares times E, which are 1 where all are equal; the bias rises below the mean and falls above it, by its rate
    whatever the distance (arXiv 2408.15664, algorithm 1); nothing after a refused update."""
    router = router_of(8, 2, 4, balance_loss="previous_step", balance_bias=True, bias_rate=0.25, top_k=2)
    assert router.load is not None and router.balance_bias is not None
    accepted, refused = torch.tensor(0.0), torch.tensor(1.0)
    router.after_update({"expert_tokens": torch.tensor([[10, 10, 10, 10]])}, accepted)
    assert router.load.tolist() == [1.0] * 4 and router.balance_bias.tolist() == [0.0] * 4
    router.after_update({"expert_tokens": torch.tensor([[0, 9, 10, 21]])}, accepted)
    assert router.load.tolist() == pytest.approx([0.0, 0.9, 1.0, 2.1])
    assert router.balance_bias.tolist() == [0.25, 0.25, 0.0, -0.25]
    router.after_update({"expert_tokens": torch.tensor([[40, 0, 0, 0]])}, refused)
    assert router.load.tolist() == pytest.approx([0.0, 0.9, 1.0, 2.1])
    assert router.balance_bias.tolist() == [0.25, 0.25, 0.0, -0.25]


@pytest.mark.parametrize("kind", ["sequence", "previous_step"])
def test_a_step_adds_the_means_over_its_samples(kind: Any) -> None:
    """Two micro-batches of two samples, by the engine: what both losses add to the last router's gradient, from what
    that router read; and what the step leaves in the buffers."""
    seq, experts, k = 8, 5, 2
    gradients: dict[float, list[torch.Tensor]] = {}
    read: list[tuple[torch.Tensor, torch.Tensor]] = []
    for weight in (0.0, 0.3):
        config = RunConfig(
            engine="native", seed=3, precision=PrecisionConfig(dtype="fp64"), data=DataConfig(synthetic=True),
            batch=BatchConfig(micro_batch_size=2, global_batch_size=4), backend=BackendConfig(device="cpu"),
            optimizer=OptimizerConfig(clip_grad=0.0), model=ModelConfig(
                num_layers=2, hidden_size=HIDDEN, num_attention_heads=2, seq_length=seq, vocab_size=53, init_std=0.5,
                moe=MoEConfig(num_experts=experts, top_k=k, ffn_hidden_size=8, balance_loss=kind, balance_bias=True,
                              bias_rate=0.25, balance_weight=weight, z_weight=2 * weight)),
        )
        engine: Any = build_engine(config, ParallelContext.single(), torch_providers())
        found = gradients.setdefault(weight, [])
        engine.on_gradients = lambda pairs, found=found: found.append(
            {r.name: g.clone() for r, g in pairs}["layers.1.mlp.router.weight"])
        router = engine.stage.layers[1].mlp.router
        matrix = router.weight.detach().clone()
        router.register_forward_hook(lambda m, x, out: read.append((x[0].detach(), out.experts)))
        for step in range(3):
            both = torch.randint(0, 53, (4, seq + 1), generator=torch.Generator().manual_seed(step))
            engine.train_step([
                MicroBatch((4 * step + i, 4 * step + i + 1), both[i : i + 2, :-1], both[i : i + 2, 1:]) for i in (0, 2)
            ], step=step, lr=0.0)
    assert len(read) == 12
    w = matrix.requires_grad_()
    shares = torch.zeros(experts, dtype=torch.float64)
    bias = torch.zeros(experts)
    for step in range(3):
        x = torch.cat([x for x, _ in read[6 + 2 * step : 8 + 2 * step]], dim=1)
        chosen = torch.cat([e.view(seq, 2, k) for _, e in read[6 + 2 * step : 8 + 2 * step]], dim=1)
        z = x @ w.T
        by_score = softmax(z).argsort(-1, descending=True)[..., :k]
        f = shares.expand(4, experts) if kind == "previous_step" else one_hot(by_score, experts).mean(0) / k
        balance = experts * (f * softmax(z).mean(0)).sum(1).mean()
        (wanted,) = torch.autograd.grad(0.3 * balance + 0.6 * z.exp().sum(-1).log().square().mean(), w)
        torch.testing.assert_close(gradients[0.3][step] - gradients[0.0][step], wanted, rtol=1e-5, atol=1e-8)
        counts = one_hot(chosen, experts).sum((0, 1))
        shares, bias = counts / counts.sum(), bias + 0.25 * torch.sign(counts.mean() - counts).float()
    assert torch.equal(router.balance_bias, bias) and bias.any()
    if kind == "previous_step":
        torch.testing.assert_close(router.load.double(), shares * experts, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------ choice and counts


@pytest.mark.parametrize("moe", [
    {"top_k": 2}, {"top_k": 2, "score": "sigmoid", "normalize": False, "scale": 2.5},
    {"top_k": 3, "groups": 4, "top_groups": 2, "group_score": "max"},
    {"top_k": 3, "groups": 4, "top_groups": 2, "group_score": "top2", "score": "sigmoid", "scale": 2.5},
    {"top_k": 3, "groups": 4, "top_groups": 1, "group_score": "top2", "balance_bias": True},
])
def test_choice_weights_and_counts(moe: dict[str, Any]) -> None:
    """Token by token in plain Python; the margin is what decided the last choice."""
    seq, batch, experts = 9, 2, 12
    config = MoEConfig(num_experts=experts, **moe)
    router, x = router_of(seq, batch, experts, **moe), inputs(seq, batch)
    bias = np.zeros(experts)
    if router.balance_bias is not None:
        router.balance_bias.copy_(torch.linspace(-0.5, 0.5, experts))
        bias = router.balance_bias.double().numpy()
    route = router(x)
    margin, counts = 0.0, np.zeros(experts, int)
    for token, z in enumerate((x @ router.weight.T).detach().numpy().reshape(-1, experts)):
        p = np.exp(z) / np.exp(z).sum() if config.score == "softmax" else 1 / (1 + np.exp(-z))
        value = (p + bias).reshape(config.groups, -1)
        best = np.sort(value, 1)[:, ::-1]
        of_group = best[:, 0] if config.group_score == "max" else best[:, :2].sum(1)
        open_to = np.argsort(-of_group)[: config.top_groups] if config.groups > 1 else np.arange(1)
        allowed = [i for i in range(experts) if i // value.shape[1] in open_to]
        order = sorted(allowed, key=lambda i: -(p + bias)[i])
        chosen = sorted(order[: config.top_k])
        weights = p[chosen] / (p[chosen].sum() if config.normalize else 1.0) * config.scale
        assert route.experts[token].tolist() == chosen
        np.testing.assert_allclose(route.weights[token].detach().numpy(), weights, rtol=1e-12)
        counts[chosen] += 1
        if len(order) > config.top_k:
            margin += (p + bias)[order[config.top_k - 1]] - (p + bias)[order[config.top_k]]
    found = totals(router)
    assert found["expert_tokens"][0].tolist() == counts.tolist()
    assert float(found["margin"][0]) == pytest.approx(margin, rel=1e-12)


@pytest.mark.parametrize(("first", "every", "layers"), [
    (0, 1, [0, 1, 2, 3, 4, 5, 6]), (0, 2, [1, 3, 5]), (3, 1, [3, 4, 5, 6]), (0, 3, [2, 5]), (1, 3, [3, 6]),
])
def test_which_layers_have_experts(first: int, every: int, layers: list[int]) -> None:
    """As transformers' Qwen2-MoE counts decoder_sparse_step, and DeepSeek-V3 first_k_dense_replace."""
    moe = MoEConfig(num_experts=4, first_dense=first, every=every)
    assert [i for i in range(7) if moe.has_experts(i)] == layers
    assert not any(MoEConfig().has_experts(i) for i in range(7))
