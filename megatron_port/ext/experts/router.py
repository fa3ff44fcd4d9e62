"""The choice of experts for each token, and what keeps their loads equal.

Everything is counted by sample (GShard's group): the capacity of an expert is a number of tokens of one sample, and a
balance loss is a sum over samples. So neither depends on the micro-batch or on the layout. Scores are float32 or wider,
the choice between experts is kept for a recomputed pass, and counts are exact integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.dist.collectives import Buffered, add_buffer, all_gather_first
from megatron_port.core.dist.counter import random_bits, uniform
from megatron_port.core.dist.positions import SequencePartition
from megatron_port.core.dist.record import InitSpec, make_record, record_of
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.core.layers.linear import linear
from megatron_port.core.layers.step import StepContext, TallySpec
from megatron_port.core.model.build import BuildContext
from megatron_port.ext.experts.experts import ExpertOps, torch_experts
from megatron_port.ext.experts.spec import MoESpec
from megatron_port.ext.experts.torch_ops import Routed, Routing, counted
from megatron_port.ext.experts.wide import WIDE

# The router's choice, weights and scores, with the logits' gradient; ``experts.torch_ops`` says what is
# computed.

class _Routed(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, given: torch.Tensor | None, routing: Routing,
        ops: ExpertOps,
    ) -> tuple[torch.Tensor, ...]:
        out = ops.route(logits, bias, routing, given)
        ctx.save_for_backward(out.scores, out.experts)
        ctx.routing, ctx.ops = routing, ops
        ctx.mark_non_differentiable(out.experts, out.margin)
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, _experts: None, dweights: Any, dscores: Any, _margin: None) -> Any:
        scores, experts = ctx.saved_tensors
        return ctx.ops.route_backward(scores, experts, dweights, dscores, ctx.routing), None, None, None, None


def routed(
    logits: torch.Tensor, bias: torch.Tensor | None, given: torch.Tensor | None, routing: Routing, ops: ExpertOps
) -> Routed:
    """Return where the tokens of ``logits`` [tokens, E] go; the gradient flows through weights and scores.

    ``bias`` float32 [E]: of the choice alone. ``given`` int64 [tokens, k]: experts in place of a choice.
    """
    return Routed(*_Routed.apply(logits, bias, given, routing, ops))


def tally_specs(layers: int, experts: int) -> dict[str, TallySpec]:
    """Return what layers of experts count in a step, a row for each layer of the model.

    ``expert_tokens``: choices of each expert, before any is dropped; ``dropped``: of them; ``margin``: by how much the
    last chosen score was above the best one left out, summed over tokens; ``balance_loss`` and ``z_loss``: without
    their factors, summed over samples and over tokens.
    """
    sums = TallySpec((layers,), torch.float64)
    return {
        "expert_tokens": TallySpec((layers, experts)), "dropped": TallySpec((layers,)), "margin": sums,
        "balance_loss": sums, "z_loss": sums,
    }


ROUTES = "routes"
"""Name of the :class:`RouteKeeper` among a step's keepers (``layers.step``)."""


class RouteKeeper(Protocol):
    """Takes the routes of tokens to experts, or fixes them (``telemetry.routes``)."""

    def fixed(self, layer: int, context: StepContext) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the choice that a layer must make: experts int64 [tokens, k], ascending, and which of them the token
        is not dropped by, bool. None: the router chooses."""

    def note(self, layer: int, context: StepContext, experts: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Keep the choice that a layer made (``kept`` None: nothing is dropped)."""


def fixed_route(context: StepContext, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what :meth:`RouteKeeper.fixed` does for a layer; None where nobody fixes routes."""
    routes: RouteKeeper | None = context.keepers.get(ROUTES)
    return None if routes is None else routes.fixed(layer, context)


def note_route(context: StepContext, layer: int, experts: torch.Tensor, kept: torch.Tensor | None) -> None:
    """Hand the choice of a layer to who keeps it, at the first pass: not while recomputing."""
    routes: RouteKeeper | None = context.keepers.get(ROUTES)
    if routes is not None and not context.recomputing:
        routes.note(layer, context, experts, kept)


@dataclass(frozen=True)
class Route:
    """Where the tokens of this rank go: token (row i, sample j) is i * batch + j."""

    experts: torch.Tensor
    """int64 [tokens, k], ascending."""
    weights: torch.Tensor
    """Weights of the experts' results, [tokens, k], float32 or wider."""
    kept: torch.Tensor | None
    """bool [tokens, k]: not dropped; None: none is."""


class _WithLoss(FirstOrderFunction):
    """Hands a tensor on, and gives a term of the loss its gradient: the term's value never travels down the model."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        ctx.like = term.new_ones(())
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, ctx.like


def routing_of(moe: MoEConfig) -> Routing:
    """Return how the router of these layers chooses and weighs."""
    return Routing(
        moe.top_k, moe.score, moe.normalize, moe.scale, groups=moe.groups, top_groups=moe.top_groups,
        group_score=moe.group_score,
    )


def within_capacity(
    experts: torch.Tensor, scores: torch.Tensor, taking_part: torch.Tensor, capacity: int, *, by_score: bool
) -> torch.Tensor:
    """Return which copies bool [positions, batch, k] an expert takes: the first ``capacity`` of each sample, by
    position or from the highest score down (of equal scores by position).

    Scores are compared in half their precision. A token that is repeated where a sample starts has the same hidden
    state each time, and equal scores but for rounding, which is a layout's own.

    All arguments are [positions, batch, k] of whole samples; copies that are not ``taking_part`` take no place.
    """
    positions, batch, k = experts.shape
    flat = experts.masked_fill(~taking_part, 1 << 40).transpose(0, 1).reshape(batch, -1)
    order = torch.arange(positions * k, device=flat.device).expand(batch, -1)
    if by_score:
        coarse = scores.to(torch.float32 if scores.dtype == torch.float64 else torch.bfloat16)
        order = coarse.transpose(0, 1).reshape(batch, -1).sort(dim=1, descending=True, stable=True).indices
    queue = flat.gather(1, order)
    by_expert = queue.sort(dim=1, stable=True)
    place = torch.arange(positions * k, device=flat.device).expand(batch, -1)
    first = torch.searchsorted(by_expert.values, by_expert.values, right=False)
    fits = torch.empty_like(flat, dtype=torch.bool).scatter_(1, by_expert.indices, place - first < capacity)
    out = torch.empty_like(fits).scatter_(1, order, fits)
    return out.view(batch, positions, k).transpose(0, 1) & taking_part


class Router(Buffered):
    """Router of a layer: this rank's share of the tokens, [rows, batch, hidden] → :class:`Route`.

    ``layer``: before its parameters' names; ``index``: its row in tallies and routes; ``share``: which positions
    the rows are.
    """

    balance_bias: torch.Tensor | None
    """Buffer [E]: added to scores for the choice alone."""
    load: torch.Tensor | None
    """Buffer [E]: share of each expert in the last step's choices, times E; 0 before the first."""

    def __init__(
        self, layer: str, index: int, spec: MoESpec, build: BuildContext, share: SequencePartition
    ) -> None:
        super().__init__()
        self.index, self.name, self.moe = index, f"{layer}.mlp.router", build.model.moe
        self.step, self.stream, self._share = build.step, build.stream, share
        self.tensor_group, self.context_group = build.ctx.over("tp"), build.ctx.over("cp")
        self.routing, self.ops = routing_of(self.moe), build.providers.experts or torch_experts
        self.capacity = self.moe.capacity(build.model.seq_length)
        weight, *bias = (build.unsplit(p, layer) for p in spec.router_parameters)
        self.weight = weight
        self.bias = bias[0] if bias else None
        buffers = {"balance_bias": self.moe.balance_bias, "load": self.moe.balance_loss == "previous_step"}
        for name, there in buffers.items():
            if not there:
                self.register_buffer(name, None)
            else:
                record = make_record(
                    f"{self.name}.{name}", (self.moe.num_experts,), build.ctx, init=InitSpec("zeros"), decay=False
                )
                add_buffer(self, name, record, build.ctx.device)

    @property
    def share(self) -> SequencePartition:
        """Return which positions the rows are of in this pass."""
        return self._share.divided(self.step.division)

    def forward(self, x: torch.Tensor) -> Route:
        context = self.step.current
        rows, batch, _ = x.shape
        logits = linear(self._jittered(x), self.weight, self.bias, kernels=WIDE).flatten(0, 1)
        fixed = None if context is None else fixed_route(context, self.index)
        experts, weights, scores, _ = self._routed(logits, None if fixed is None else fixed[0])
        kept = self._kept(experts, scores.detach(), weights.detach(), rows, batch)
        if fixed is not None and kept is not None:
            kept = fixed[1]
        if context is not None:
            note_route(context, self.index, experts, kept)
        if context is not None and torch.is_grad_enabled() and self.training:
            weights = self._with_losses(weights, logits, scores, experts, rows, batch)
            self._count(experts, kept)
        return Route(experts, weights, kept)

    # -- the choice --------------------------------------------------------------------------------------------------

    def _routed(self, logits: torch.Tensor, fixed: torch.Tensor | None) -> Routed:
        """The route of each token, to ``fixed`` experts if there are any; in a recomputed pass to those of the
        first."""
        context, place = self.step.current, f"{self.name}.experts"
        given = fixed if fixed is not None or context is None else context.recalled(place)
        out = routed(logits, self.balance_bias, given, self.routing, self.ops)
        if context is not None:
            context.keep(place, lambda: out.experts)
            if not context.recomputing:
                own = out if fixed is None else self.ops.route(logits.detach(), self.balance_bias, self.routing)
                context.add_tally("margin", self.index, own.margin.double().sum())
        return out

    def _jittered(self, x: torch.Tensor) -> torch.Tensor:
        jitter = self.moe.jitter if self.training and self.stream.enabled else 0.0
        if jitter == 0.0:
            return x
        drawn = self._drawn("jitter", x.shape[0], x.shape[2])
        return x * (1.0 - jitter + 2.0 * jitter * drawn).to(x.dtype)

    def _drawn(self, op: str, rows: int, width: int) -> torch.Tensor:
        """Numbers in (0, 1) for this rank's tokens, float64 [rows, batch, width]: functions of sample, position and
        step."""
        share = self.share
        position = share.residual(share.seq_length(rows * share.pieces)).index(self.stream.device)
        element = position.view(-1, 1, 1) * width + torch.arange(width, device=position.device)
        keys = self.stream.sample_keys(1.0).view(1, -1, 1)
        return uniform(random_bits(element, keys, self.stream.op_key(f"{self.name}.{op}")))

    def _kept(
        self, experts: torch.Tensor, scores: torch.Tensor, weights: torch.Tensor, rows: int, batch: int
    ) -> torch.Tensor | None:
        """Which copies are not dropped: by lot, or because an expert is full; in a recomputed pass the same."""
        context, training = self.step.current, self.training and self.stream.enabled
        by_lot = self.moe.second_expert == "random" and training
        if context is None or not (by_lot or self.capacity):
            return None

        def decide() -> torch.Tensor:
            kept = torch.ones_like(experts, dtype=torch.bool)
            if by_lot:
                lot = self._drawn("second_expert", rows, 1).flatten(0, 1)
                second = weights.sort(dim=1, descending=True, stable=True).indices[:, 1:]
                is_second = torch.arange(2, device=kept.device) == second
                kept &= ~is_second | (2.0 * weights > lot * self.moe.scale)
            return self._fitting(experts, scores.gather(1, experts), kept, batch) if self.capacity else kept

        return context.keep(f"{self.name}.kept", decide)

    def _fitting(
        self, experts: torch.Tensor, scores: torch.Tensor, taking_part: torch.Tensor, batch: int
    ) -> torch.Tensor:
        """Which copies of this rank's tokens are within the capacity of their sample, parts of which others have."""
        mine = [t.unflatten(0, (-1, batch)) for t in (experts, scores, taking_part.to(torch.uint8))]
        whole = [self._of_the_sample(t) for t in mine]
        fits = within_capacity(
            whole[0], whole[1], whole[2].bool(), self.capacity, by_score=self.moe.drop_by == "probability"
        )
        return self.share.residual(len(fits)).take(fits).flatten(0, 1)

    def _of_the_sample(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' rows of whole samples, [rows, ...] → [positions, ...], in the order of the positions."""
        held = all_gather_first(x, self.tensor_group)
        return self.share.division.in_sequence(all_gather_first(held, self.context_group))

    # -- balance -----------------------------------------------------------------------------------------------------

    def _with_losses(
        self, weights: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, rows: int,
        batch: int,
    ) -> torch.Tensor:
        """Return ``weights``, which carry the gradient of this layer's terms of the loss."""
        moe, context, terms = self.moe, self.step.current, []
        assert context is not None
        positions = self.share.seq_length(rows * self.share.pieces)
        if moe.balance_loss != "none":
            shares = scores if moe.score == "softmax" else scores / (scores.sum(dim=1, keepdim=True) + 1e-20)
            loads = self._loads(self._counted(scores, experts), batch, positions)
            balance = (loads * shares.unflatten(0, (rows, batch)).sum(0)).sum() / positions
            context.add_tally("balance_loss", self.index, balance.double())
            terms.append(moe.balance_weight * balance)
        if moe.z_weight:
            z = logits.logsumexp(dim=1).square().sum()
            context.add_tally("z_loss", self.index, z.double())
            terms.append(moe.z_weight / positions * z)
        if not terms:
            return weights
        term = torch.stack(terms).sum() * context.sample_factor
        out: torch.Tensor = _WithLoss.apply(weights, term.to(weights.dtype))
        return out

    def _counted(self, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The choices that a balance loss counts: the token's own, or where a bias balances too those that its scores
        alone would make (DeepSeek-V3, arXiv 2412.19437, equation 18)."""
        context = self.step.current
        if not self.moe.balance_bias or context is None:
            return experts
        return context.keep(
            f"{self.name}.counted",
            lambda: scores.detach().sort(dim=1, descending=True, stable=True).indices[:, : self.moe.top_k],
        )

    def _loads(self, experts: torch.Tensor, batch: int, positions: int) -> torch.Tensor:
        """Share of each expert in the choices, times E: [batch, E] of each sample, or [E] of the last step."""
        if self.load is not None:
            return self.load.to(torch.promote_types(self.weight.dtype, torch.float32))
        number = self.moe.num_experts
        sample = torch.arange(batch, device=experts.device).repeat(experts.shape[0] // batch)
        counts = counted((sample[:, None] * number + experts).flatten(), batch * number)
        for group in (self.tensor_group, self.context_group):
            if group is not None:
                dist.all_reduce(counts, group=group)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return counts.view(batch, number).to(wide) * (number / (self.moe.top_k * positions))

    def _count(self, experts: torch.Tensor, kept: torch.Tensor | None) -> None:
        context = self.step.current
        assert context is not None
        if context.tallies is not None and not context.recomputing:
            counts = counted(experts.flatten(), self.moe.num_experts)
            context.add_tally("expert_tokens", self.index, counts)
            if kept is not None:
                context.add_tally("dropped", self.index, (~kept).sum())

    @torch.no_grad()
    def after_update(self, totals: Mapping[str, torch.Tensor], skipped: torch.Tensor) -> None:
        """Change what balances by the step's counts, unless its update was ``skipped`` (1; else 0): alike on all ranks,
        because the counts are exact."""
        counts = totals["expert_tokens"][self.index]
        total = counts.sum()
        if self.balance_bias is not None and record_of(self.balance_bias).trainable:
            direction = torch.sign(total - counts * self.moe.num_experts).float()
            self.balance_bias.add_(direction * (self.moe.bias_rate * (1.0 - skipped.float())))
        if self.load is not None:
            share = (counts.double() * self.moe.num_experts / total.clamp(min=1).double()).float()
            self.load.copy_(torch.where(skipped > 0, self.load, share))
