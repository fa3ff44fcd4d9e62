"""Section ``[fine_tuning]``: low-rank adapters that are trained beside frozen weights, and what stands against them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_port.core.config.conflicts import Conflict, Rule, Table, native_only
from megatron_port.core.config.ranges import Count, Fraction, PathSetting, Positive

if TYPE_CHECKING:
    from megatron_port.core.config.schema import ModelConfig, RunConfig

TARGETS = (
    "query", "key", "value", "query_down", "query_up", "kv_down", "kv_up", "output", "gate", "up", "down",
)
"""Matrices of a layer that may have an adapter."""


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig:
    """Low-rank adapters: the weights of checkpoint.initial_weights are frozen, and what is trained and saved are two
    thin matrices beside each of the layers' matrices (engine native; docs/fine-tuning.md)."""

    method: Literal["none", "lora", "dora"] = "none"
    """none (all weights are trained) | lora (W + s B A; Hu et al., arXiv 2106.09685) | dora (its rows scaled to trained
    lengths; Liu et al., arXiv 2402.09353)"""
    rank: Count = 8
    """Rows of A and columns of B, r."""
    alpha: Positive = 16.0
    """The factor s is alpha / r."""
    rslora: bool = False
    """The factor s is alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732)."""
    dropout: Fraction = 0.0
    """Probability, on what A reads (lora)."""
    targets: tuple[str, ...] = ()
    """Matrices with an adapter: query, key, value, output, gate, up, down; for latent attention query_down, query_up,
    kv_down, kv_up instead of the first three. Empty: all that the model has."""
    adapters: PathSetting = ""
    """PEFT folder that the adapters start from; empty: A is drawn and B is zero, as in PEFT."""

    @property
    def enabled(self) -> bool:
        """Whether weights are frozen."""
        return self.method != "none"

    @property
    def scale(self) -> float:
        """Factor of the product of B and A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


NO_ADAPTERS = FineTuningConfig()


def targets_of(model: ModelConfig) -> tuple[str, ...]:
    """Return the matrices that a layer of ``model`` has."""
    lacking: set[str] = set() if "glu" in model.activation else {"gate"}
    if all(map(model.moe.has_experts, range(model.num_layers))) and not model.moe.shared_ffn_hidden_size:
        lacking |= {"gate", "up", "down"}
    if not model.kv_lora_rank:
        lacking |= {"query_down", "query_up", "kv_down", "kv_up"}
    else:
        lacking |= {"key", "value", *(("query",) if model.q_lora_rank else ("query_down", "query_up"))}
    return tuple(target for target in TARGETS if target not in lacking)


def _targets(config: RunConfig) -> list[str]:
    asked, present = config.fine_tuning.targets, targets_of(config.model)
    if unknown := [target for target in asked if target not in TARGETS]:
        return [f"fine_tuning.targets {unknown[0]!r} is unknown; use {', '.join(TARGETS)}"]
    missing = [target for target in asked if target not in present]
    return [f"fine_tuning.targets {missing[0]!r}: this model has {', '.join(present)}"] if missing else []


CONFLICTS = (
    Table(asked="a [fine_tuning] section", on=lambda c: not c.fine_tuning.enabled and c.fine_tuning != NO_ADAPTERS,
          rows=(Conflict("fine_tuning.method", "which trains all weights",
                         'set method = "lora" or "dora", or leave the section out', refused=("none",)),)),
    Table(on=lambda c: c.fine_tuning.enabled, asked='fine_tuning.method "{c.fine_tuning.method}"', rows=(
        Conflict("fine_tuning.dropout", "the whole product would be computed twice, with and without",
                 "use dropout = 0, or method lora",
                 when=lambda c: c.fine_tuning.method == "dora" and c.fine_tuning.dropout),
        native_only("which trains and keeps state for every weight"),
        Rule(lambda c: not c.checkpoint.initial_weights,
             "{asked} without checkpoint.initial_weights, whose weights it leaves as they are; name a Hugging Face "
             "folder, a run folder or a checkpoint"),
    ), more=(_targets,)),
)
