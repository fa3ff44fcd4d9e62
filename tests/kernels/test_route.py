"""The router of a mixture of experts: its choice by a rule written in Python, scores, weights and gradients in fp64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_port.ext.experts import torch_ops as router
from megatron_port.ext.experts.experts import ExpertOps, torch_experts
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose_experts import OwnExperts, own_experts, own_limit

INFINITY = float("inf")
ULP = float(torch.finfo(torch.float32).eps)
providers = pytest.mark.parametrize("ops", [own_experts, torch_experts], ids=["own", "torch"])


@dataclass(frozen=True)
class Rule:
    """A router: how many experts there are, and what ``route`` takes."""

    experts: int
    k: int
    groups: int = 1
    top_groups: int = 1
    group_score: router.GroupScore = "top2"
    score: router.Score = "softmax"
    normalise: bool = True
    scale: float = 1.0

    @property
    def routing(self) -> router.Routing:
        return router.Routing(
            self.k, self.score, self.normalise, self.scale, groups=self.groups, top_groups=self.top_groups,
            group_score=self.group_score,
        )

    def run(
        self, ops: ExpertOps | OwnExperts, logits: Tensor, bias: Tensor | None, given: Tensor | None = None
    ) -> Any:
        return ops.route(logits, bias, self.routing, given)

    def back(
        self, ops: ExpertOps | OwnExperts, scores: Tensor, experts: Tensor, dweights: Tensor | None,
        dscores: Tensor | None,
    ) -> Tensor:
        return ops.route_backward(scores, experts, dweights, dscores, self.routing)


RULES = [
    Rule(8, 2), Rule(1, 1), Rule(64, 1, normalise=False), Rule(128, 8, score="sigmoid", scale=2.5),
    Rule(256, 8, 8, 4, "top2", "sigmoid", scale=2.5), Rule(160, 6, 8, 3, "max", normalise=False, scale=16.0),
    Rule(70, 3, 5, 2, "max"), Rule(512, 32, 32, 20), Rule(33, 32),
]


def random_logits(rule: Rule, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and a bias that changes the choice."""
    g = torch.Generator().manual_seed(seed + rule.experts)
    return torch.randn(tokens, rule.experts, generator=g) * 2, torch.randn(rule.experts, generator=g) * 0.05


def comparable(value: float) -> float:
    lowest = torch.finfo(torch.float32).min
    return INFINITY if value != value else max(value, lowest)


def chosen_by(rule: Rule, values: list[float]) -> tuple[list[int], float]:
    """The rule in words: the best groups, of their experts the best, of equals the first; and the margin."""
    size = rule.experts // rule.groups
    allowed = range(rule.experts)
    if rule.groups > 1:
        def of_group(g: int) -> float:
            best = sorted(values[g * size : (g + 1) * size], reverse=True)
            return best[0] if rule.group_score == "max" else comparable(float(torch.tensor(best[:2]).sum()))

        ordered = sorted(range(rule.groups), key=lambda g: (-of_group(g), g))[: rule.top_groups]
        allowed = [e for e in range(rule.experts) if e // size in ordered]  # type: ignore[assignment]
    best = sorted(allowed, key=lambda e: (-values[e], e))
    left = [values[e] for e in best[rule.k - 1 : rule.k + 1]]
    margin = left[0] - left[1] if len(left) == 2 else 0.0
    return sorted(best[: rule.k]), margin if abs(margin) < INFINITY else 0.0


def assert_chosen(rule: Rule, out: router.Routed, bias: Tensor | None) -> None:
    values = (out.scores if bias is None else out.scores + bias).cpu()
    for token, row in enumerate(values.tolist()):
        experts, margin = chosen_by(rule, list(map(comparable, row)))
        assert out.experts[token].tolist() == experts, (rule, token)
        assert float(out.margin[token]) == float(torch.tensor(margin)), (rule, token)


@providers
def test_the_choice_is_that_of_the_rule_on_its_own_scores(device: torch.device, ops: ExpertOps) -> None:
    """Random scores, ones with many equals, and ones that are not finite."""
    for rule in RULES:
        logits, bias = (t.to(device) for t in random_logits(rule, 14))
        logits[4:8] = (logits[4:8] / 2).round()  # equals
        logits[8] = 0.0
        logits[9, 0] = INFINITY
        logits[10, rule.experts // 2] = float("nan")
        logits[11] = -INFINITY
        logits[12] = logits[12] * 100  # scores that underflow to equals
        for given in (None, bias, torch.where(bias > 0, bias, -INFINITY)):
            out = rule.run(ops, logits, given)
            assert out.experts.dtype == torch.int64 and out.weights.shape == out.experts.shape == (14, rule.k)
            assert_chosen(rule, out, given)


@providers
def test_given_experts_are_those_of_a_choice(device: torch.device, ops: ExpertOps) -> None:
    """The bits of the router's own choice where they are it; else the weights of those, in their order."""
    for rule in RULES:
        logits, bias = (t.to(device) for t in random_logits(rule, 9))
        first = rule.run(ops, logits, bias)
        again = rule.run(ops, logits, None, first.experts)
        assert all(map(torch.equal, again[:3], first[:3])) and not bool(again.margin.any()), rule
        g = torch.Generator().manual_seed(rule.experts)
        other = torch.rand(9, rule.experts, generator=g).argsort(-1)[:, : rule.k]
        experts, weights, scores, margin = rule.run(ops, logits, bias, other.to(device))
        wanted, _ = exact_router(rule, logits.cpu().double(), other)
        assert torch.equal(experts.cpu(), other) and torch.equal(scores, first.scores) and not bool(margin.any())
        assert float(((weights.cpu() - wanted) / wanted).abs().max()) < 16 * ULP, rule


def exact_router(rule: Rule, logits: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, scores) in fp64 of a choice."""
    scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
    weights = scores.gather(-1, experts)
    return (weights / weights.sum(-1, keepdim=True) if rule.normalise else weights) * rule.scale, scores


def summands(rule: Rule, scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None) -> Tensor:
    """Sizes of what a gradient of the logits is summed from, which is what its roundings are relative to."""
    size = torch.zeros_like(scores) if dscores is None else dscores.abs().double()
    if dweights is not None:
        chosen, each = scores.gather(-1, experts), dweights.abs().double()
        if rule.normalise:
            total = chosen.sum(-1, keepdim=True)
            each = (each + (each * chosen / total).sum(-1, keepdim=True)) / total
        size = size.scatter_add(-1, experts, each * rule.scale)
    return scores * (size + (size * scores).sum(-1, keepdim=True))


@providers
def test_scores_weights_and_gradients(device: torch.device, ops: ExpertOps) -> None:
    """Within a few roundings of autograd in fp64 with the same choice."""
    for rule in RULES:
        logits, bias = random_logits(rule, 11, 1)
        experts, weights, scores, _ = (t.cpu() for t in rule.run(ops, logits.to(device), bias.to(device)))
        leaf = logits.double().requires_grad_()
        exact = exact_router(rule, leaf, experts)
        for found, wanted, roundings in ((weights, exact[0].detach(), 16), (scores, exact[1].detach(), 8)):
            assert float(((found - wanted) / wanted).abs().max()) < roundings * ULP, rule
        g = torch.Generator().manual_seed(2)
        given = [torch.randn(t.shape, generator=g) for t in exact]
        for parts in ((0, 1), (0,), (1,)):
            grads = [given[i] if i in parts else None for i in (0, 1)]
            on = [t if t is None else t.to(device) for t in grads]
            found = rule.back(ops, scores.to(device), experts.to(device), *on).cpu()
            wanted, = torch.autograd.grad([exact[i] for i in parts], leaf, [given[i].double() for i in parts],
                                          retain_graph=True)
            size = summands(rule, exact[1].detach(), experts, *grads)
            assert float(((found - wanted).abs() / size).max()) < 16 * ULP, (rule, parts)


@pytest.mark.parametrize("rule, tokens", [
    (Rule(8, 1, score="sigmoid"), 10_000), (Rule(8, 2), 10_000), (Rule(64, 8), 100_000),
    (Rule(128, 8, score="sigmoid"), 10_000), (Rule(256, 8), 10_000), (Rule(256, 8, 8, 4, score="sigmoid"), 10_000),
    (Rule(64, 2, 8, 2, "max"), 10_000),
], ids=lambda v: f"{v.experts}-{v.k}-{v.groups}" if isinstance(v, Rule) else str(v))
def test_tokens_go_where_topk_sends_them(own: Path, rule: Rule, tokens: int) -> None:
    """topk of fp64 scores; where it differs, the two experts' values are as close as float scores can tell. SLOW=1: a
    hundred thousand tokens each."""
    kernels.load("cpu")
    logits, bias = random_logits(rule, 100_000 if os.environ.get("SLOW") == "1" else tokens, 3)
    experts, _, scores, margin = rule.run(own_experts, logits, bias)
    values = (logits.double().softmax(-1) if rule.score == "softmax" else logits.double().sigmoid()) + bias
    allowed = values
    if rule.groups > 1:
        runs = values.unflatten(-1, (rule.groups, -1))
        best = runs.topk(2 if rule.group_score == "top2" else 1).values.sum(-1).topk(rule.top_groups).indices
        inside = torch.zeros(runs.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        allowed = runs.masked_fill(~inside.unsqueeze(-1), -INFINITY).flatten(1)
    wanted = allowed.topk(rule.k).indices.sort(-1).values
    differ = (experts != wanted).any(-1).nonzero().flatten().tolist()
    assert len(differ) <= 3
    for token in differ:
        mine, other = values[token, experts[token]].sum(), values[token, wanted[token]].sum()
        assert float((mine - other).abs()) < 8 * ULP * (1 + float(bias.abs().max())), token
    torchs = rule.run(torch_experts, logits[:10_000], bias)
    assert int((experts[:10_000] != torchs[0]).any(-1).sum()) <= 1
    assert torch.allclose(scores[:10_000], torchs[2], rtol=8 * ULP, atol=0)
    assert torch.allclose(margin[:10_000], torchs[3], rtol=0, atol=8 * ULP * (1 + float(bias.abs().max())))


@providers
def test_sums_of_nothing(device: torch.device, ops: ExpertOps) -> None:
    """Scores that underflow give weights of 0, not NaN; a weight that is always 1 has no gradient."""
    rule = Rule(64, 2, score="sigmoid")
    logits = torch.full((3, 64), -200.0, device=device)
    experts, weights, scores, _ = rule.run(ops, logits, None)
    assert experts.tolist() == [[0, 1]] * 3 and not bool(weights.any())
    assert bool(rule.back(ops, scores, experts, torch.ones_like(weights), None).isfinite().all())
    one = Rule(64, 1)
    experts, weights, scores, _ = one.run(ops, random_logits(one, 5)[0].to(device), None)
    assert weights.tolist() == [[1.0]] * 5
    assert not bool(one.back(ops, scores, experts, torch.full_like(weights, 3.7), None).any())
    none = torch.empty(0, 64, device=device)
    experts, weights, scores, margin = one.run(ops, none, None)
    assert experts.shape == (0, 1) and margin.shape == (0,)
    assert one.back(ops, scores, experts, weights, scores).shape == (0, 64)


def test_the_same_bits_again_on_any_number_of_threads(device: torch.device) -> None:
    rule, threads, seen = Rule(256, 8, 8, 4), torch.get_num_threads(), []
    logits, bias = (t.to(device) for t in random_logits(rule, 70))
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out = rule.run(own_experts, logits, bias)
            seen.append((*out, rule.back(own_experts, out[2], out[0], out[1], out[2])))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *seen))


def test_opcheck(own: Path) -> None:
    kernels.load("cpu")
    logits, bias = torch.randn(5, 16), torch.randn(16)
    torch.library.opcheck(torch.ops.megatron_port.route, (logits, bias, None, 2, True, 4, 2, True, True, 2.5))
    chosen, weights, scores, _ = torch.ops.megatron_port.route(logits, None, None, 2, False, 1, 1, False, False, 1.0)
    torch.library.opcheck(
        torch.ops.megatron_port.route, (logits, None, chosen, 2, False, 1, 1, False, False, 1.0))
    torch.library.opcheck(
        torch.ops.megatron_port.route_backward, (scores, chosen, weights, scores, False, False, 1.0))


@pytest.mark.parametrize("change, text", [
    ({"logits": lambda x: x.t()}, "not contiguous"),
    ({"logits": lambda x: x.bfloat16()}, r"must be float32 \[tokens, experts\]"),
    ({"bias": lambda b: b[:-1].contiguous()}, "bias has 15 elements, not 16"),
    ({"given": lambda g: g[1:]}, "chosen has 2 elements, not 3"),
    ({"k": lambda k: 5}, "cannot choose 5 of 16 experts from the best 1 of 4 groups"),
    ({"groups": lambda g: 3}, "groups are equal"),
    ({"k": lambda k: 0}, "must be from 1 to 512"),
    ({"groups": lambda g: 16}, "each group two"),
])
def test_refusals(device: torch.device, change: dict[str, Callable[[Any], Any]], text: str) -> None:
    given: dict[str, Any] = {
        "logits": torch.randn(3, 16, device=device), "bias": torch.randn(16, device=device),
        "given": torch.zeros(3, 1, dtype=torch.int64, device=device), "k": 1, "sigmoid": False,
        "groups": 4, "top_groups": 1, "two": True, "normalise": True, "scale": 1.0,
    }
    given |= {name: how(given[name]) for name, how in change.items()}
    with pytest.raises(RuntimeError, match=text):
        torch.ops.megatron_port.route(**given)


def test_what_the_own_router_cannot_take_is_said_with_its_limits() -> None:
    assert own_limit(512, 32, 32) == ""
    for sizes in ((513, 1, 1), (512, 33, 1), (512, 1, 33)):
        assert f"not {sizes[0]}, {sizes[1]} and {sizes[2]}" in own_limit(*sizes)
