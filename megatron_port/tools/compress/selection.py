"""Indices that pruning keeps along each size of the model, from how much they matter or from a list. Without torch.

Of equal importance the lower index stays. Layers may keep different heads, rows and experts, as long as all keep
equally many; the residual stream is one for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import xxhash

from megatron_port.core.config.model import ATTENTION, MoEConfig
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.families.settings import norms, shortest_pattern, windows
from megatron_port.ext.telemetry.flops import model_flops, parameter_count
from megatron_port.run.same_model import without_mup
from megatron_port.tools.compress.convert import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    KEYS,
    LATENT_KEYS,
    PROJECTION,
    QUERIES,
    VALUES,
    Axis,
    plain_model,
)
from megatron_port.tools.interop.hf_config import family_for
from megatron_port.tools.plan.text import make_plan

# Sizes of the model that pruning leaves, as an ordinary model configuration. Without torch.
#
# What comes out is a model that ``train``, ``plan`` and the exports know; what a configuration cannot say (layers of
# several widths) is refused with what to change.

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
    out = [f"model.mixer {name!r}: pruning knows attention alone" for name in model.mixers if name != ATTENTION]
    if model.attention_gate and (sizes.heads or sizes.groups):
        out.append("model.attention_gate: heads with gates are not pruned; leave out --heads and --groups")
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
    """Return the patterns of attention, of norms and of rotation of the layers that are left."""
    out = windows(["window" if model.window_of(layer) else "full" for layer in kept], model.sliding_window)
    if model.attention_chunk:
        kinds = [next((kind for kind, size in (("chunk", model.chunk_of(i)), ("window", model.window_of(i))) if size),
                      "full") for i in kept]
        out["attention_pattern"] = shortest_pattern(kinds)
        out |= {"attention_chunk": model.attention_chunk if "chunk" in kinds else 0,
                "sliding_window": model.sliding_window if "window" in kinds else 0}
    out |= norms([model.norms_of(layer) for layer in kept])
    if model.rope_pattern:
        kinds = ["rope" if model.rotates(layer) else "none" for layer in kept]
        out["rope_pattern"] = shortest_pattern(kinds) if "none" in kinds else ()
    return out


Scores = Mapping[str, np.ndarray]
"""``layers`` [L], ``heads`` [L, a], ``ffn`` [L, f], ``experts`` [L, E], ``hidden`` [h]: larger matters more."""


@dataclass(frozen=True)
class Selection:
    """Indices that are kept, and the model that they make.

    ``indices``: by the size (``compress.convert``) and the layer of the source, -1 for all; where a size has no entry
    it is kept as it is.
    """

    source: ModelConfig
    model: ModelConfig
    layers: tuple[int, ...]
    indices: Mapping[tuple[str, int], np.ndarray]

    def of(self, axis: Axis, layer: int | None) -> np.ndarray | None:
        """Return the indices kept along a dimension of a parameter of ``layer``; None: all of them."""
        if axis is None:
            return None
        found = self.indices.get((axis, -1 if layer is None else layer))
        return self.indices.get((axis, -1)) if found is None else found

    def digest(self) -> str:
        """Return 32 hex digits of everything that is kept."""
        out = xxhash.xxh3_128(np.asarray(self.layers, np.int64).tobytes())
        for (axis, layer), kept in sorted(self.indices.items(), key=lambda item: item[0]):
            out.update(f"{axis} {layer} ".encode() + kept.astype(np.int64).tobytes())
        return out.hexdigest()


def select(model: ModelConfig, sizes: Sizes, scores: Scores, drop: Sequence[int] = ()) -> Selection:
    """Choose what is kept of ``model``.

    Args:
        scores: those that ``sizes`` needs.
        drop: layers that go, whatever their importance, in place of ``sizes.layers``.

    Raises:
        ConfigError: what is asked for cannot be had, or an importance that it needs is missing.
    """
    wrong = [n for n in drop if not 0 <= n < model.num_layers]
    if wrong:
        raise ConfigError(f"--drop-layers {wrong[0]}: the layers are 0 to {model.num_layers - 1}")
    if drop and sizes.layers:
        raise ConfigError("--drop-layers and --layers: give one of them")
    kept = tuple(i for i in range(model.num_layers) if i not in set(drop))
    check_sizes(model, sizes, kept)
    missing = sorted(_needed(sizes) - set(scores))
    if missing:
        raise ConfigError(
            f"the importance of {', '.join(missing)} is needed: measure it with `megatron-port compress measure`, and "
            "give its file as --importance"
        )
    if sizes.layers:
        kept = tuple(map(int, largest(scores["layers"], sizes.layers)))
    smaller = pruned_model(model, sizes, kept)
    found: dict[tuple[str, int], np.ndarray] = {}
    if sizes.hidden:
        found[HIDDEN, -1] = largest(scores["hidden"], sizes.hidden)
    for layer in kept:
        if sizes.heads or sizes.groups:
            found |= {(axis, layer): rows for axis, rows in _heads(model, sizes, scores["heads"][layer]).items()}
        if sizes.ffn and not model.moe.has_experts(layer):
            found[FFN, layer] = largest(scores["ffn"][layer], sizes.ffn)
        if sizes.experts and model.moe.has_experts(layer):
            found[EXPERTS, layer] = _experts(model, sizes.experts, scores["experts"][layer])
    return Selection(model, smaller, kept, found)


def _needed(sizes: Sizes) -> set[str]:
    """Return the importance by which the sizes are chosen; that of key/value heads is of their query heads."""
    return {"heads" if name == "groups" else name for name in sizes.asked}


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the ``count`` largest values, ascending."""
    return np.sort(np.argsort(-np.asarray(values, np.float64), kind="stable")[:count])


def _experts(model: ModelConfig, count: int, scores: np.ndarray) -> np.ndarray:
    """Equally many of each group of a router that chooses among groups."""
    groups = model.moe.groups
    each = model.moe.num_experts // groups
    return np.concatenate([
        g * each + largest(scores[g * each : (g + 1) * each], count // groups) for g in range(groups)
    ])


def _heads(model: ModelConfig, sizes: Sizes, scores: np.ndarray) -> dict[str, np.ndarray]:
    """Return what is kept along the sizes that heads govern: the groups whose kept query heads matter most."""
    heads, groups = head_counts(model, sizes)
    before, left = model.num_attention_heads // model.kv_heads, heads // groups
    by_group = np.asarray(scores, np.float64).reshape(model.kv_heads, before)
    best = np.stack([largest(row, left) for row in by_group])
    whole = np.take_along_axis(by_group, best, axis=1).sum(axis=1)
    kept_groups = largest(whole, groups)
    query = np.concatenate([g * before + best[g] for g in kept_groups])
    d = model.head_size
    rows = [
        np.concatenate([_spread(g * (before + 2) + best[g], d), _spread(g * (before + 2) + before + np.arange(2), d)])
        for g in kept_groups
    ]
    return {
        HEADS: query, VALUES: _spread(query, model.value_size), QUERIES: _spread(query, d),
        KEYS: _spread(kept_groups, d), PROJECTION: np.concatenate(rows),
        LATENT_KEYS: _spread(query, d - model.qk_rope_head_dim + model.value_size),
    }


def _spread(parts: np.ndarray, size: int) -> np.ndarray:
    """Return the elements of parts of ``size`` elements each."""
    return (np.asarray(parts)[:, None] * size + np.arange(size)).ravel()


# Parameters, operations and memory of a model before and after compression, from its spec and the planner.

@dataclass(frozen=True)
class Budget:
    """Size and cost of a model."""

    parameters: int
    forward_flops: float
    """Per token, of a sample of ``seq_length``: generation of a text of that length."""
    training_flops: float
    """Per token, forward and backward."""
    memory: float | None
    """Bytes of the fullest device of the run's layout in training, by the planner; None: it cannot be planned."""
    limit: float
    """Device memory in bytes; 0: unknown, the planner refuses this run."""
    step_seconds: float | None
    """Time of a training step of the run, by the planner; None: it cannot be planned."""
    unplanned: str
    """Why not."""
    family: str
    """Hugging Face family as which it is exported, factors multiplied out and shared layers copied; empty: none."""


def budget_of(config: RunConfig, model: ModelConfig) -> Budget:
    """Return what ``model`` takes in the run that ``config`` describes."""
    spec, seq = model_spec(model), model.seq_length
    forward = sum(unit.forward_flops(seq) for unit in spec.units) / seq
    memory, limit, seconds, unplanned = None, 0.0, None, ""
    try:
        plan = make_plan(replace(config, model=model), neighbours=False)
        memory, limit, seconds = plan.fullest.total, plan.limit, plan.step.seconds
    except ConfigError as error:
        unplanned = str(error)
    try:
        family = family_for(plain_model(model))
    except CheckpointError:
        family = ""
    return Budget(
        parameter_count(model), forward, model_flops(model) / seq, memory, limit, seconds, unplanned, family
    )


def rows_of(before: Budget, after: Budget) -> list[tuple[str, str, str, str]]:
    """Return a table: the head, then what, before, after, and after as a share of before."""
    rows = [("", "before", "after", "left")]
    for name, a, b in (
        ("parameters", before.parameters, after.parameters),
        ("forward FLOPs per token", before.forward_flops, after.forward_flops),
        ("training FLOPs per token", before.training_flops, after.training_flops),
    ):
        rows.append((name, f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.1%}"))
    if before.memory is not None and after.memory is not None:
        rows.append((f"memory of the fullest device of {after.limit / 1e9:.1f} GB", f"{before.memory / 1e9:.2f}",
                     f"{after.memory / 1e9:.2f}", f"{after.memory / before.memory:.1%}"))
    if before.step_seconds is not None and after.step_seconds is not None:
        rows.append(("seconds per step", f"{before.step_seconds:.2f}", f"{after.step_seconds:.2f}",
                     f"{after.step_seconds / before.step_seconds:.1%}"))
    rows.append(("Hugging Face family", before.family or "none", after.family or "none", ""))
    return rows
