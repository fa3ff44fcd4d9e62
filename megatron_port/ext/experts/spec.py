"""The feed-forward block of a layer of experts, stated once. Plain Python, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.decoder_spec import mlp_spec
from megatron_port.core.model.ops import INPUT, Op
from megatron_port.core.model.spec import FeedForward, LayerSpec, LinearSpec, MLPSpec, ParameterSpec, Split


@dataclass(frozen=True, kw_only=True)
class MoESpec(FeedForward):
    """The feed-forward block of a layer of experts: ``router``, ``experts``, and what every token passes beside them.

    ``experts``: one of them, with the names of their parameters, which have a dimension of experts in front and are
    divided over expert-parallel ranks along it.
    """

    module = "megatron_port.ext.experts.moe:MoE"
    router: LinearSpec
    experts: MLPSpec
    num_experts: int
    top_k: int
    buffers: tuple[ParameterSpec, ...] = ()
    """Buffers of the router: the bias that only chooses, and the loads of the last step."""
    shared: MLPSpec | None = None
    shared_gate: LinearSpec | None = None

    def ops(self, source: str) -> tuple[Op, ...]:
        """What makes ``mlp`` of ``source``: all of it is one operation of the layer (``inner_ops``)."""
        return (Op(kind="experts", run="mlp", site="output", reads=(source,), writes=("mlp",), part=self),)

    @property
    def inner_ops(self) -> tuple[Op, ...]:
        """What ``model.moe.MoE`` does, in the order of its forward pass: what is beside the experts is computed while
        the rows travel."""
        def op(kind: str, run: str, reads: tuple[str, ...], *writes: str, holds: tuple[str, ...] = ()) -> Op:
            return Op(kind=kind, run=run, site="output", reads=reads, writes=writes, part=self, holds=holds)

        shared = () if self.shared is None else self.shared.ops(INPUT, "shared")
        if self.shared is not None and (self.shared.bias or self.shared_gate is not None):
            shared = (*shared, op("beside", "biased_and_gated", ("shared", INPUT), "beside"))
        beside = shared[-1].writes if shared else ()
        return (
            op("share", "take_share", (INPUT,), "tokens"), op("route", "router", ("tokens",), "route"),
            op("dispatch", "dispatch", ("tokens", "route"), "leaving", "place"), *shared,
            op("arrive", "arrive", ("leaving",), "arrived", "exchange"),
            op("experts up", "experts.up", ("arrived", "exchange"), "hidden"),
            op("experts activation", "experts.activate", ("hidden",), "active"),
            op("experts down", "experts.down", ("active", "exchange"), "results"),
            op("send home", "send_home", ("results", "exchange"), "returned"),
            op("combine", "combine", ("returned", "route", "place"), "own", holds=("leaving", "tokens")),
            op("join shares", "join_shares", ("own", INPUT, *beside), "mlp"),
        )

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products with every token, in the order of the forward pass; not those of the experts."""
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return (self.router, *gate, *(() if self.shared is None else self.shared.linears))

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the module: its own before those of its parts."""
        gate = () if self.shared_gate is None else self.shared_gate.parameters
        shared = () if self.shared is None else self.shared.parameters
        return (*gate, *self.router_parameters, *self.expert_parameters, *shared)

    @property
    def router_parameters(self) -> tuple[ParameterSpec, ...]:
        """Weight [E, h], and bias [E] where it has one."""
        return tuple(replace(p, gradient="routed") for p in self.router.parameters)

    @property
    def expert_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters of all experts, [E, ...], in the order of the forward pass."""
        return tuple(map(self._of_all, self.experts.parameters))

    def _of_all(self, one: ParameterSpec) -> ParameterSpec:
        return replace(
            one, shape=(self.num_experts, *one.shape), split=Split(0, experts=True), gradient="routed",
        )

    @property
    def numel_per_token(self) -> int:
        """Elements of the matrices that one token passes: those of ``top_k`` experts, of the router, of the rest."""
        return self.top_k * self.experts.numel_per_token + sum(linear.weight_numel for linear in self.linears)

    @property
    def idle_numel(self) -> int:
        """Elements of the experts that a token is not sent to."""
        return (self.num_experts - self.top_k) * sum(p.numel for p in self.experts.parameters)

    @property
    def dense_block(self) -> MLPSpec | None:
        """The block beside the experts."""
        return self.shared


def moe_of(layer: LayerSpec) -> MoESpec | None:
    """Return the experts of a layer; None: it is dense."""
    return layer.mlp if isinstance(layer.mlp, MoESpec) else None


BALANCE_BIAS, LAST_STEP = ".mlp.router.balance_bias", ".mlp.router.load"
"""Ends of the names of the router's buffers: the bias that only chooses, and what the step before counted, which a
model's weights have none of."""


def moe_spec(model: ModelConfig) -> MoESpec:
    """Return the feed-forward block of the layers of ``model`` that have experts."""
    moe = model.moe

    def rows(name: str, outputs: int, *, bias: bool = False) -> LinearSpec:
        return LinearSpec(  # its outputs do not grow with the width: muP's "output weights"
            name=f"mlp.{name}", inputs=model.hidden_size, outputs=outputs, parallel="none", bias=bias,
            std=model.init_std / model.width_factor,
        )

    buffers = {BALANCE_BIAS: moe.balance_bias, LAST_STEP: moe.balance_loss == "previous_step"}
    shared = moe.shared_ffn_hidden_size
    return MoESpec(
        router=rows("router", moe.num_experts, bias=moe.router_bias),
        experts=mlp_spec(model, "mlp.experts", model.expert_size), num_experts=moe.num_experts, top_k=moe.top_k,
        buffers=tuple(
            ParameterSpec(name=name.lstrip("."), shape=(moe.num_experts,), init="zeros", decay=False)
            for name, there in buffers.items() if there
        ),
        shared=mlp_spec(model, "mlp.shared", shared) if shared else None,
        shared_gate=rows("shared_gate", 1) if moe.shared_gate else None,
    )
