"""The feed-forward block of a layer of experts: each token passes a few of many (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.core.dist.collectives import join_shares, take_share
from megatron_port.core.dist.record import SEQUENCE, InitSpec, Shard, attach, make_record
from megatron_port.core.layers.fused import add_bias
from megatron_port.core.layers.linear import linear
from megatron_port.core.layers.step import TallySpec
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.mlp import MLP, FeedForwardBlock, activate
from megatron_port.core.model.program import Program, Watch
from megatron_port.ext.experts.experts import (
    Dispatched,
    Exchange,
    announced_rows,
    combined,
    copies,
    grouped_linear,
    plan_exchange,
    send_home,
    torch_experts,
)
from megatron_port.ext.experts.router import Route, Router, tally_specs
from megatron_port.ext.experts.spec import MoESpec
from megatron_port.ext.experts.torch_ops import counted

EXCHANGES = 2
"""Exchanges of rows in a forward pass: to the experts and back."""


class Experts(nn.Module):
    """This rank's experts of a layer, for rows [n, hidden] sorted by expert; their biases are added."""

    up_weight: nn.Parameter
    up_bias: nn.Parameter | None
    down_weight: nn.Parameter
    down_bias: nn.Parameter | None

    def __init__(self, layer: str, spec: MoESpec, build: BuildContext) -> None:
        super().__init__()
        self.activation, self.providers = spec.experts.activation, build.providers
        for name in ("up_weight", "up_bias", "down_weight", "down_bias"):
            self.register_parameter(name, None)
        for one in spec.expert_parameters:
            # Tensor-parallel ranks send tokens of their own, whatever the layout, so gradients are partial along tp.
            record = make_record(
                f"{layer}.{one.name}", one.shape, build.ctx, init=InitSpec(one.init, one.std), decay=one.decay,
                shards=(Shard(0, ("ep",)),), partial_over=SEQUENCE,
            )
            values = torch.empty(record.local_shape, dtype=build.dtype, device=build.ctx.device)
            part, kind = one.name.split(".")[-2:]
            self.register_parameter(f"{part}_{kind}", attach(nn.Parameter(values), record))

    def up(self, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """Return the first product [n, ffn] of rows [n, hidden] that an exchange has brought."""
        return grouped_linear(rows, self.up_weight, self.up_bias, exchange.counts)

    def activate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input [n, ffn] of the second product from the output of the first."""
        return activate(hidden, self.activation, self.providers)

    def down(self, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """Return the second product [n, hidden]."""
        return grouped_linear(rows, self.down_weight, self.down_bias, exchange.counts)


class MoE(FeedForwardBlock):
    """Router, experts, and what every token passes beside them: [seq(/tp), batch, hidden] → same shape, with biases.
    ``MoESpec.inner_ops`` states what it does, and in which order; this module has what computes it.

    Each tensor-parallel rank routes its own share of the tokens: under sequence parallelism those that it has, else a
    share that it takes at the entry, and all shares are joined at the exit.
    """

    bias = None
    """Nothing is left for the caller to add."""

    def __init__(self, name: str, index: int, spec: MoESpec, build: BuildContext) -> None:
        super().__init__()
        ctx = build.ctx
        self.program = Program(spec.inner_ops)
        self.watch: Watch | None = None
        """Sees the values of a pass by their names in ``MoESpec.inner_ops``."""
        self.group, self.sequence_parallel = ctx.over("tp"), build.sequence_parallel
        self.expert_group, self.num_experts = ctx.over("ep"), spec.num_experts
        self.pieces, self.ops = ctx.size("tp"), build.providers.experts or torch_experts
        self.row_exchange = build.providers.row_exchange
        self.exchanges = 0 if self.expert_group is None else EXCHANGES
        share = replace(build.partition, piece=ctx.index("tp"), pieces=self.pieces)
        self.router = Router(name, index, spec, build, share)
        self.experts = Experts(name, spec, build)
        self.shared_gate = None
        if spec.shared_gate is not None:
            (weight,) = spec.shared_gate.parameters
            self.shared_gate = build.unsplit(weight, name)
        self.shared = None if spec.shared is None else MLP(name, index, spec.shared, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program.run(self, x, self.watch)

    def take_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [rows, batch, hidden]."""
        tokens = x if self.sequence_parallel else take_share(self._divisible(x), self.group)
        # The gradients of router and rows meet here, on every layout, before they join those of others that read x.
        return tokens.view_as(tokens)

    def _divisible(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with rows behind it so that all ranks have as many; only generation meets other lengths."""
        missing = -x.shape[0] % self.pieces
        return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x

    def dispatch(self, tokens: torch.Tensor, route: Route) -> tuple[Dispatched, torch.Tensor]:
        """Send copies of the tokens [rows, batch, hidden] to their experts; return also where each token's copies are
        in this rank's order by expert, int64 [tokens, k] (-1: dropped)."""
        k, experts = route.experts.shape[1], route.experts.flatten()
        if route.kept is not None:
            experts = experts.masked_fill(~route.kept.flatten(), self.num_experts)
        by_expert = experts.sort(stable=True)
        counts = counted(experts, self.num_experts + 1)[: self.num_experts]
        exchange = plan_exchange(self._rows(counts), counts, self.expert_group, self.row_exchange, len(experts))
        exchange = exchange.filled_by(self.experts.up_weight)
        order = by_expert.indices[: sum(exchange.sent)]
        place = torch.full_like(experts, -1)
        place[order] = torch.arange(len(order), device=order.device)
        place = place.view(-1, k)
        return Dispatched(copies(tokens.flatten(0, 1), order // k, place, self.ops), exchange), place

    def _rows(self, counts: torch.Tensor) -> torch.Tensor:
        """Return :func:`announced_rows`, in a recomputed pass those of the first, without an exchange or a wait."""
        context = self.router.step.current
        if context is None:
            return announced_rows(counts, self.expert_group)
        return context.keep(f"{self.router.name}.rows", lambda: announced_rows(counts, self.expert_group))

    def biased_and_gated(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return what every token of x passes beside its experts, from its last product."""
        assert self.shared is not None
        out = add_bias(out, self.shared.bias)
        if self.shared_gate is not None:
            out = out * linear(x, self.shared_gate).sigmoid()
        return out

    @staticmethod
    def arrive(leaving: Dispatched) -> tuple[torch.Tensor, Exchange]:
        """Return the rows of this rank's experts, and the exchange of their results."""
        return leaving.arrive()

    send_home = staticmethod(send_home)

    def combine(self, returned: torch.Tensor, route: Route, place: torch.Tensor) -> torch.Tensor:
        """Return of each of this rank's tokens [tokens, hidden] the weighted sum of its experts' results."""
        return combined(returned, place, route.weights, self.ops)

    def join_shares(
        self, own: torch.Tensor, x: torch.Tensor, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sums of all tokens of x, with what they pass beside their experts."""
        out = own.view(-1, *x.shape[1:])
        if not self.sequence_parallel:
            out = join_shares(out, self.group)[: x.shape[0]]
        return out if beside is None else out + beside

    @staticmethod
    def tallies(spec: MoESpec, layers: int) -> Mapping[str, TallySpec]:
        """Return what the routers count (:func:`tally_specs`)."""
        return tally_specs(layers, spec.num_experts)

    def after_update(self, totals: Mapping[str, torch.Tensor], skipped: torch.Tensor) -> None:
        """Change what balances the experts; see :meth:`Router.after_update`."""
        self.router.after_update(totals, skipped)

