"""Sizes of the model that pruning leaves, as an ordinary model configuration. Without torch.

What comes out is a model that ``train``, ``plan`` and the exports know; what a configuration cannot say (layers of
several widths) is refused with what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_port.core.config.attention import shortest_pattern, windows
from megatron_port.core.config.moe import MoEConfig
from megatron_port.core.config.same_model import without_mup
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes asked for; 0: unchanged."""

    layers: int = 0
    heads: int = 0
    """Query heads."""
    groups: int = 0
    """Key/value heads."""
    ffn: int = 0
    """Rows of the MLP of dense layers."""
    experts: int = 0
    hidden: int = 0

    @property
    def asked(self) -> dict[str, int]:
        """The sizes that change, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name)}


def pruned_model(model: ModelConfig, sizes: Sizes, kept: Sequence[int]) -> ModelConfig:
    """Return the configuration of what is left of ``model``.

    ``kept``: the layers, ascending. Derived sizes (of a head, of the MLP) are written out, because they do not follow
    from the new widths. Modules that predict further tokens are left out: they serve training alone.

    Raises:
        ConfigError: everything that cannot be had, and what to change.
    """
    check_sizes(model, sizes, kept)
    problems = _layer_problems(model, kept)
    if problems:
        raise ConfigError(problems)
    heads, groups = head_counts(model, sizes)
    if sizes.hidden:
        model = without_mup(model)
        if model.scale_embedding:  # the factor stays what the weights were trained with
            factor = model.embedding_multiplier * model.hidden_size**0.5
            model = replace(model, scale_embedding=False, embedding_multiplier=factor)
    moe = replace(model.moe, num_experts=sizes.experts) if sizes.experts else model.moe
    return replace(
        model, num_layers=len(kept), num_attention_heads=heads, num_query_groups=groups if groups != heads else 0,
        head_dim=model.head_size, ffn_hidden_size=sizes.ffn or model.ffn_size,
        hidden_size=sizes.hidden or model.hidden_size, moe=_moe_of(model, moe, kept), mtp_layers=0,
        **_patterns(model, kept),
    )


def check_sizes(model: ModelConfig, sizes: Sizes, kept: Sequence[int]) -> None:
    """Check the sizes by themselves, before anything is chosen. Raises ConfigError with what to change."""
    problems = _problems(model, sizes) if kept else ["no layer is left; keep at least one"]
    if problems:
        raise ConfigError(problems)


def head_counts(model: ModelConfig, sizes: Sizes) -> tuple[int, int]:
    """Return the query and the key/value heads that are left. Where one of the two is asked for, whole groups stay
    together: fewer key/value heads take their query heads with them, and fewer query heads leave each group equally
    many."""
    before = model.num_attention_heads // model.kv_heads
    if sizes.heads and not sizes.groups:
        groups = sizes.heads if before == 1 else model.kv_heads
        return sizes.heads, groups
    if sizes.groups and not sizes.heads:
        return sizes.groups * before, sizes.groups
    return sizes.heads or model.num_attention_heads, sizes.groups or model.kv_heads


def _problems(model: ModelConfig, sizes: Sizes) -> list[str]:
    limits = {
        "layers": model.num_layers, "heads": model.num_attention_heads, "groups": model.kv_heads,
        "ffn": model.ffn_size, "experts": model.moe.num_experts, "hidden": model.hidden_size,
    }
    out = []
    for name, value in sizes.asked.items():
        if name == "experts" and not model.moe.enabled:
            out.append(f"--experts {value}: the model has no layers of experts; leave it out")
        elif not 0 < value <= limits[name]:
            out.append(f"--{name} {value}: the model has {limits[name]}; give 1 to {limits[name]}")
    return out or [*_head_problems(model, sizes), *_expert_problems(model, sizes)]


def _head_problems(model: ModelConfig, sizes: Sizes) -> list[str]:
    heads, groups = head_counts(model, sizes)
    before = model.num_attention_heads // model.kv_heads
    if model.kv_lora_rank and heads != groups:
        return [f"--groups {groups}: latent attention has as many key/value heads as query heads; give --heads alone"]
    if heads % groups:
        near = range(groups, model.num_attention_heads + 1, groups)
        return [
            f"{heads} query heads do not divide by {groups} key/value heads; use --heads "
            f"{min(near, key=lambda n: abs(n - heads))}, or another --groups"
        ]
    if heads // groups > before:
        return [
            f"{heads} query heads over {groups} key/value heads are {heads // groups} for each, and the model has "
            f"{before}: use --heads {groups * before}, or more --groups"
        ]
    return []


def _expert_problems(model: ModelConfig, sizes: Sizes) -> list[str]:
    left, moe, out = sizes.experts, model.moe, []
    if left and left < moe.top_k:
        out.append(f"--experts {left}: each token goes to top_k {moe.top_k} experts; use at least {moe.top_k}")
    if left and left != moe.num_experts and moe.groups > 1:
        if left % moe.groups:
            out.append(f"--experts {left}: routers choose among {moe.groups} groups of equal size; use a multiple of "
                       f"{moe.groups}")
        elif moe.top_k > moe.top_groups * (left // moe.groups):
            least = -(-moe.top_k // moe.top_groups) * moe.groups
            out.append(f"--experts {left}: top_k {moe.top_k} experts do not fit into {moe.top_groups} of "
                       f"{moe.groups} groups of {left // moe.groups}; use at least {least}")
    dense = not all(map(moe.has_experts, range(model.num_layers)))
    if sizes.ffn and not dense:
        out.append(f"--ffn {sizes.ffn}: every layer has experts, whose widths are not pruned; use --experts")
    return out


def _layer_problems(model: ModelConfig, kept: Sequence[int]) -> list[str]:
    """Reasons why the remaining layers have no configuration: those with experts must follow a rule."""
    if not model.moe.enabled:
        return []
    with_experts = [model.moe.has_experts(layer) for layer in kept]
    if any(with_experts) and _rule_of(with_experts) is None:
        return [
            f"layers {', '.join(map(str, kept))} are left, of which "
            f"{', '.join(str(n) for n, has in zip(kept, with_experts) if has)} have experts: no first_dense and every "
            "makes these; choose the layers with --drop-layers"
        ]
    return []


def _rule_of(with_experts: Sequence[bool]) -> tuple[int, int] | None:
    """Return (first_dense, every) by which exactly these layers have experts; None: there are none."""
    count = len(with_experts)
    for first in range(count + 1):
        for every in range(1, count + 1):
            made = [i >= first and (i - first + 1) % every == 0 for i in range(count)]
            if made == list(with_experts):
                return first, every
    return None


def _moe_of(model: ModelConfig, moe: MoEConfig, kept: Sequence[int]) -> MoEConfig:
    if not moe.enabled:
        return moe
    with_experts = [model.moe.has_experts(layer) for layer in kept]
    if not any(with_experts):
        return MoEConfig()
    first, every = _rule_of(with_experts) or (moe.first_dense, moe.every)
    return replace(moe, first_dense=first, every=every, ffn_hidden_size=model.expert_size)


def _patterns(model: ModelConfig, kept: Sequence[int]) -> dict[str, Any]:
    """Return the patterns of attention and of rotation of the layers that are left."""
    out = windows(["window" if model.window_of(layer) else "full" for layer in kept], model.sliding_window)
    if model.rope_pattern:
        kinds = ["rope" if model.rotates(layer) else "none" for layer in kept]
        out["rope_pattern"] = shortest_pattern(kinds) if "none" in kinds else ()
    return out
