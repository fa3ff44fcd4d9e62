"""Fields of a ``config.json``: read with transformers' defaults, every one accounted for.

A field that was neither asked for nor is known to be harmless is refused by name: it may change what the model
computes. null is absent, as it is in transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_port.config.attention import windows
from megatron_port.config.schema import ModelConfig
from megatron_port.errors import CheckpointError

ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
HARMLESS = frozenset({
    # What the file is, and for whom.
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "auto_map",
    "tokenizer_class", "problem_type", "id2label", "label2id", "num_labels", "task_specific_params",
    "finetuning_task", "_commit_hash", "_attn_implementation_autoset", "attn_implementation",
    # What a call returns, and how much of it is computed at a time.
    "use_cache", "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate",
    "output_scores", "chunk_size_feed_forward", "torchscript", "use_bfloat16", "gradient_checkpointing",
    # Tokens with a meaning, and settings of generation.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "num_beams",
    "num_beam_groups", "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "early_stopping",
    "max_length", "min_length", "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty",
    "prefix",
    # Of encoders and decoders; a language model is neither.
    "is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size",
})
"""Fields of any family that change nothing in what a language model computes."""
_ATTENTION = {"full_attention": "full", "sliding_attention": "window"}
_ROPE_TABLES = ("rope_parameters", "rope_scaling")


class Fields:
    """The fields of a ``config.json``; those that are asked for are remembered."""

    def __init__(self, values: Mapping[str, Any], where: str, asked: set[str] | None = None) -> None:
        self.values, self.where = values, where
        self.asked: set[str] = set() if asked is None else asked

    def get(self, name: str, default: Any, *names: str) -> Any:
        """Return the first of ``name`` and ``names`` that is present and not null. Its type must be the default's."""
        self.asked.update((name, *names))
        for key in (name, *names):
            value = self.values.get(key)
            if value is None:
                continue
            number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
            if type(value) is not type(default) and not number:
                raise self.fault(f"{key} is {value!r:.80}; expected {type(default).__name__}")
            return float(value) if number else value
        return default

    def fault(self, what: str) -> CheckpointError:
        """Return an error whose message starts with the file."""
        return CheckpointError(f"{self.where}: {what}")

    def refuse(self, name: str, ours: Any, what: str) -> None:
        """Raise CheckpointError unless the field is absent or ``ours``; ``what``: what another value would need."""
        self.asked.add(name)
        value = self.values.get(name)
        if value is not None and value != ours:
            raise self.fault(f"{name} is {value!r:.80}: {what}; only {ours!r} can be imported")

    def window(self, name: str, default: int, length: int) -> int:
        """Return a window of attention; 0 where there is none, or it is no shorter than ``length`` tokens. Absent:
        ``default``; null or 0: none."""
        self.asked.add(name)
        found = self.values.get(name, default)
        if found is not None and (not isinstance(found, int) or found < 0):
            raise self.fault(f"{name} is {found!r:.80}; expected a number of tokens")
        return 0 if not found or found >= length else found

    def windows_by_layer(self, layers: int, length: int) -> dict[str, Any]:
        """Return the windows of Qwen's models: of the layers that ``layer_types`` names, otherwise of those from
        ``max_window_layers`` on; none unless ``use_sliding_window``."""
        used, first = self.get("use_sliding_window", False), self.get("max_window_layers", 28)
        window = self.window("sliding_window", 4096, length)
        kinds = self._kinds(layers)
        if kinds is None and not used:
            return {}
        if kinds is None:
            kinds = ["window" if i >= first else "full" for i in range(layers)]
        if not used and "window" in kinds:
            raise self.fault("layer_types has sliding_attention, but use_sliding_window is false")
        return windows(kinds, window)

    def or_none(self, name: str, default: float) -> float:
        """Return a number whose null means none, 0. Absent: ``default``."""
        return 0.0 if name in self.values and self.values[name] is None else self.get(name, default)

    def windows_by_type(self, layers: int, default: Sequence[str], window: int) -> dict[str, Any]:
        """Return the windows of the layers that ``layer_types`` names, by default ``default`` repeated."""
        kinds = self._kinds(layers)
        if kinds is None:
            kinds = [_ATTENTION[default[i % len(default)]] for i in range(layers)]
        return windows(kinds, self.get("sliding_window", window))

    def _kinds(self, layers: int) -> list[str] | None:
        """Return our kinds of attention of the layers by ``layer_types``, or None where that is absent."""
        self.asked.add("layer_types")
        kinds = self.values.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _ATTENTION for kind in kinds):
            raise self.fault(f"layer_types is {kinds!r:.80}; expected {' or '.join(_ATTENTION)} for {layers} layers")
        return [_ATTENTION[kind] for kind in kinds]

    def activation(self, value: str) -> str:
        """Return our name of an ungated activation."""
        if value not in ACTIVATIONS:
            raise self.fault(f"activation {value!r:.80} is not one of {', '.join(ACTIVATIONS)}, which this model has")
        return ACTIVATIONS[value]

    def silu(self) -> None:
        """The activation must be SwiGLU's."""
        if self.get("hidden_act", "silu") != "silu":
            raise self.fault(f"hidden_act {self.values['hidden_act']!r:.80}: only silu (SwiGLU) can be imported")

    def rope(self, base: str, percent: float, theta: float = 10000.0) -> dict[str, Any]:
        """Rotary fields of a model from ``rope_parameters`` (transformers 5), or ``rope_scaling`` and the fields
        beside it (4). ``base``: the older name of ``rope_theta``, by default ``theta``; ``percent``: share of a head
        that is rotated."""
        self.asked.update(_ROPE_TABLES)
        table = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(table, Mapping):
            raise self.fault(f"rope_parameters is {table!r:.80}")
        rope = Fields({**self.values, **table}, f"{self.where}, rope_parameters", self.asked)
        out = _rope(rope, base, percent, theta)
        rope.refuse_unknown(table, ())
        return out

    def refuse_unknown(self, names: Mapping[str, Any], harmless: Iterable[str]) -> None:
        """Every one of ``names`` that is not null must have been asked for, or be harmless. Raises CheckpointError."""
        unknown = sorted(k for k, v in names.items() if v is not None and k not in {*self.asked, *harmless})
        if unknown:
            shown = ", ".join(f"{key} ({names[key]!r:.60})" for key in unknown)
            raise self.fault(
                f"unknown field {shown}: it may change what the model computes; if it does not, remove it"
            )


def _rope(rope: Fields, base: str, percent: float, theta: float) -> dict[str, Any]:
    kind = rope.get("rope_type", "default", "type")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise rope.fault(f"rope_type {kind!r:.80}; only default, linear, llama3 and yarn can be imported")
    out = {
        "position_embedding": "rope", "rope_theta": rope.get("rope_theta", theta, base),
        "rotary_percent": rope.get("partial_rotary_factor", percent),
    }
    if kind == "default":
        return out
    out |= {"rope_scaling": kind, "rope_factor": rope.get("factor", 1.0)}
    if kind in ("llama3", "yarn"):
        out["rope_original_length"] = length = rope.get("original_max_position_embeddings", 0)
        if length < 1:
            raise rope.fault(f"rope_type {kind} without original_max_position_embeddings")
    if kind == "llama3":
        out |= {
            "rope_low_freq_factor": rope.get("low_freq_factor", 1.0),
            "rope_high_freq_factor": rope.get("high_freq_factor", 4.0),
        }
    if kind == "yarn":
        for name in ("mscale", "mscale_all_dim"):
            rope.refuse(name, None, "another factor on the scores")
        out |= {
            "rope_beta_fast": rope.get("beta_fast", 32.0), "rope_beta_slow": rope.get("beta_slow", 1.0),
            "rope_attention_factor": rope.get("attention_factor", 0.0), "rope_truncate": rope.get("truncate", True),
        }
    return out


def rope_scaling(model: ModelConfig) -> dict[str, Any]:
    """``rope_scaling`` as versions 4 and 5 both read it."""
    if model.rope_scaling == "none":
        return {"rope_scaling": None}
    table: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = model.rope_original_length
    if model.rope_scaling == "llama3":
        table |= {"low_freq_factor": model.rope_low_freq_factor, "high_freq_factor": model.rope_high_freq_factor}
    if model.rope_scaling == "yarn":
        table |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
        if model.rope_attention_factor:
            table["attention_factor"] = model.rope_attention_factor
        if not model.rope_truncate:
            table["truncate"] = False
    return {"rope_scaling": table}


def windows_by_layer_there(model: ModelConfig) -> dict[str, Any]:
    """Fields of Qwen's models that :meth:`Fields.windows_by_layer` reads."""
    found = [model.window_of(layer) for layer in range(model.num_layers)]
    if not any(found):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True, "sliding_window": model.sliding_window,
        "max_window_layers": next(i for i, window in enumerate(found) if window),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in found],
    }


def layer_types(model: ModelConfig) -> dict[str, Any]:
    """``layer_types`` and ``sliding_window``."""
    found = [model.window_of(layer) for layer in range(model.num_layers)]
    return {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in found],
        "sliding_window": model.sliding_window or None,
    }


def activation_there(model: ModelConfig) -> str:
    """transformers' name of an activation without a gate."""
    return "gelu_new" if model.activation == "gelu_tanh" else "gelu"


def common_sizes(model: ModelConfig) -> dict[str, Any]:
    """Sizes by the names that most families have."""
    return {
        "num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads, "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.seq_length, "attention_dropout": model.attention_dropout,
    }
