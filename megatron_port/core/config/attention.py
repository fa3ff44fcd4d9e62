"""Needs of a run's attention beyond the causal softmax, and which providers can meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_port.core.config.conflicts import Table
from megatron_port.core.config.schema import ModelConfig, RunConfig

SERVED = {
    "sdpa": frozenset({"window", "documents", "runs"}),
    "flash_attn": frozenset({"window", "softcap", "documents", "runs"}),
    "fa3": frozenset[str](), "fa4": frozenset[str](),  # they stand in torch's place, which gives them no window
}
"""Parts of a mask that each provider can do (fields of :class:`MaskNeeds`); own and math can do all of it."""
_WORDS = {
    "window": "a window (model.sliding_window)", "softcap": "soft-capped scores (model.attention_softcap)",
    "sinks": "attention sinks (model.attention_sinks)",
    "documents": "attention within documents (data.attention_documents)",
    "runs": "queries at other positions than the keys (layout.context_parallel_size)",
    "partials": "partial results in fp32 (layout.cp_method = \"ring\")",
}


@dataclass(frozen=True)
class MaskNeeds:
    """Needs of a run's attention beyond the causal softmax."""

    window: bool = False
    softcap: bool = False
    sinks: bool = False
    documents: bool = False
    runs: bool = False
    """Queries are some positions of the sequence, and keys all or others."""
    partials: bool = False
    """Results over parts of the keys, which are merged."""

    @classmethod
    def of(cls, config: RunConfig) -> MaskNeeds:
        """Return the needs of a run's model and of its data."""
        model, layout = config.model, config.layout
        divided = layout.context_parallel_size > 1
        kinds = model.attention_pattern[: model.num_layers] or ("window",)
        return cls(
            window="window" in kinds and 0 < model.sliding_window < model.seq_length,
            softcap=model.attention_softcap > 0, sinks=model.attention_sinks,
            documents=config.data.attention_documents == "within",
            runs=divided and layout.cp_method != "heads", partials=divided and layout.cp_method == "ring",
        )

    @property
    def any(self) -> bool:
        """Whether attention is more than causal."""
        return self.window or self.softcap or self.sinks or self.documents or self.runs or self.partials

    def problem(self, provider: str) -> str:
        """Return what is needed and the provider cannot do, as a sentence, or nothing."""
        served = SERVED.get(provider, frozenset(_WORDS))
        missing = [words for name, words in _WORDS.items() if getattr(self, name) and name not in served]
        return f"{provider} cannot serve {' and '.join(missing)}" if missing else ""


def own_gpu_problem(dtype: str, head_size: int, mask: MaskNeeds) -> str:
    """Return why the own attention kernel for GPUs cannot serve tensors of a dtype (fp32, fp16, bf16) and a head size,
    or nothing. ``head_size`` 0: not known."""
    if dtype not in ("fp16", "bf16"):
        return f"own attention on a GPU takes fp16 and bf16, not {dtype}"
    if head_size > 128 or head_size % 8:
        return f"own attention on a GPU takes heads of up to 128 elements, a multiple of 8, not {head_size}"
    lacking = [words for name, words in _WORDS.items()
               if getattr(mask, name) and name in ("softcap", "sinks", "partials")]
    return f"own attention on a GPU cannot serve {' and '.join(lacking)}" if lacking else ""


CAUSAL = MaskNeeds()
"""Nothing beyond the causal softmax."""


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest pattern that, repeated, begins with ``kinds``."""
    # The longest beginning of each part of the list that is also its end (Knuth, Morris and Pratt): linear, whatever a
    # file brings.
    ends = [0] * len(kinds)
    for i in range(1, len(kinds)):
        length = ends[i - 1]
        while length and kinds[i] != kinds[length]:
            length = ends[length - 1]
        ends[i] = length + (kinds[i] == kinds[length])
    return tuple(kinds[: len(kinds) - ends[-1]]) if kinds else ()


def windows(kinds: Sequence[str], window: int) -> dict[str, Any]:
    """Return the fields of a model whose layers have these kinds of attention, in their one shortest form."""
    pattern = shortest_pattern(kinds) if window else ("full",)
    if pattern == ("full",):
        return {"sliding_window": 0, "attention_pattern": ()}
    return {"sliding_window": window, "attention_pattern": () if pattern == ("window",) else pattern}


def windows_of(model: ModelConfig) -> dict[str, Any]:
    """Return the windows of a model in their shortest form."""
    if not model.attention_pattern:
        return {}
    kinds = ["window" if model.window_of(layer) else "full" for layer in range(min(model.num_layers, 1 << 16))]
    return windows(kinds, model.sliding_window)


def _layers(config: RunConfig) -> list[str]:
    """Name kinds of layers that do not exist, or that have no window."""
    m, pattern = config.model, config.model.attention_pattern
    if unknown := sorted(set(pattern) - {"full", "window"}):
        return [f"model.attention_pattern has {unknown[0]!r}; each entry must be full or window"]
    out = []
    if len(pattern) > m.num_layers:
        out.append(
            f"model.attention_pattern has {len(pattern)} entries for num_layers {m.num_layers}; give one per layer, or "
            "fewer that are repeated"
        )
    if "window" in pattern and not m.sliding_window:
        out.append("model.attention_pattern has windows, but sliding_window is 0; e.g. sliding_window = 4096")
    if pattern and "window" not in pattern and m.sliding_window:
        out.append(
            f"model.sliding_window {m.sliding_window} is of no layer: attention_pattern {list(pattern)} has no "
            "\"window\"; leave one of the two out"
        )
    return out + _provider(config)


def _provider(config: RunConfig) -> list[str]:
    """Name what the provider that was asked for cannot do."""
    asked, needs, out = config.backend.attention, MaskNeeds.of(config), []
    if config.model.attention_dropout > 0 and needs.partials and asked == "own":
        out.append(
            f"model.attention_dropout {config.model.attention_dropout} under layout.cp_method \"ring\" needs "
            "backend.attention auto or math: own drops no probabilities of parts of the keys; or use cp_method "
            "\"gather\""
        )
    if problem := needs.problem(asked):
        out.append(f"backend.attention = \"{asked}\": {problem}; use auto, own or math")
    return out


CONFLICTS = (Table(sized=True, more=(_layers,)),)
