"""Indices that pruning keeps along each size of the model, from how much they matter or from a list. Without torch.

Of equal importance the lower index stays. Layers may keep different heads, rows and experts, as long as all keep
equally many; the residual stream is one for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.compress import axes
from megatron_port.tools.compress.sizes import Sizes, check_sizes, head_counts, pruned_model

Scores = Mapping[str, np.ndarray]
"""``layers`` [L], ``heads`` [L, a], ``ffn`` [L, f], ``experts`` [L, E], ``hidden`` [h]: larger matters more."""


@dataclass(frozen=True)
class Selection:
    """Indices that are kept, and the model that they make.

    ``indices``: by the size (``compress.axes``) and the layer of the source, -1 for all; where a size has no entry it
    is kept as it is.
    """

    source: ModelConfig
    model: ModelConfig
    layers: tuple[int, ...]
    indices: Mapping[tuple[str, int], np.ndarray]

    def of(self, axis: axes.Axis, layer: int | None) -> np.ndarray | None:
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
        found[axes.HIDDEN, -1] = largest(scores["hidden"], sizes.hidden)
    for layer in kept:
        if sizes.heads or sizes.groups:
            found |= {(axis, layer): rows for axis, rows in _heads(model, sizes, scores["heads"][layer]).items()}
        if sizes.ffn and not model.moe.has_experts(layer):
            found[axes.FFN, layer] = largest(scores["ffn"][layer], sizes.ffn)
        if sizes.experts and model.moe.has_experts(layer):
            found[axes.EXPERTS, layer] = _experts(model, sizes.experts, scores["experts"][layer])
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
        axes.HEADS: query, axes.VALUES: _spread(query, model.value_size), axes.QUERIES: _spread(query, d),
        axes.KEYS: _spread(kept_groups, d), axes.PROJECTION: np.concatenate(rows),
        axes.LATENT_KEYS: _spread(query, d - model.qk_rope_head_dim + model.value_size),
    }


def _spread(parts: np.ndarray, size: int) -> np.ndarray:
    """Return the elements of parts of ``size`` elements each."""
    return (np.asarray(parts)[:, None] * size + np.arange(size)).ravel()
