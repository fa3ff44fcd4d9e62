"""Fields of a ``config.json``: read with transformers' defaults, every one accounted for.

A field that was not asked for is harmless, or transformers does not read it for the family (``known``), or it is
refused by name: it may change what the model computes. What is left out is noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_port.core.config.attention import windows
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.ext.families.known import Known
from megatron_port.ext.families.rope_fields import read_rope

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


class Fields:
    """The fields of a ``config.json``; those that are asked for are remembered."""

    def __init__(
        self, values: Mapping[str, Any], where: str, asked: set[str] | None = None, *, known: Known | None = None,
        notes: list[str] | None = None,
    ) -> None:
        """``known``: the fields that transformers reads for this family; None: a plugin's. ``notes`` gets a sentence
        for what is read otherwise than it is written."""
        self.values, self.where, self.known = values, where, known
        self.asked: set[str] = set() if asked is None else asked
        self.notes: list[str] = [] if notes is None else notes

    def changed(self, **values: Any) -> Fields:
        """Return these fields with other values of some; what is asked of either is remembered by both."""
        return Fields({**self.values, **values}, self.where, self.asked, known=self.known, notes=self.notes)

    def table(self, values: Mapping[str, Any]) -> Fields:
        """Return the fields of a rope table of the file."""
        return Fields(values, f"{self.where}, rope table", notes=self.notes)

    def get(self, name: str, default: Any, *names: str) -> Any:
        """Return the value of the field that is called ``name`` or one of ``names``. Its type must be the default's.
        Absent: ``default``; null as well, where transformers' own default is null."""
        self.asked.update((name, *names))
        given = {key: self.values[key] for key in (name, *names) if self.values.get(key) is not None}
        if any(value != next(iter(given.values())) for value in given.values()):
            said = " and ".join(f"{key} {value!r:.60}" for key, value in given.items())
            raise self.fault(f"{said} are one field by two names; leave one of them")
        for key, value in given.items():
            number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
            if type(value) is not type(default) and not number:
                raise self.fault(f"{key} is {value!r:.80}; expected {type(default).__name__}")
            return float(value) if number else value
        self._no_null(name, *names)
        return default

    def _no_null(self, *names: str) -> None:
        """Raise CheckpointError where a field is null and transformers' default is something else: the two differ."""
        for name in names:
            default = self.known.defaults.get(name) if self.known else None
            if name in self.values and default:  # a default that is off is what null is
                raise self.fault(f"{name} is null, which is not its default {default!r:.60}; write the value meant")

    def fault(self, what: str) -> CheckpointError:
        """Return an error whose message starts with the file."""
        return CheckpointError(f"{self.where}: {what}")

    def refuse(self, name: str, ours: Any, what: str) -> None:
        """Raise CheckpointError unless the field is absent or ``ours``; ``what``: what another value would need."""
        self.asked.add(name)
        value = self.values.get(name)
        if value is None and ours:
            self._no_null(name)
        if value is not None and value != ours:
            raise self.fault(f"{name} is {value!r:.80}: {what}; only {ours!r} can be imported")

    def window(self, name: str, default: int) -> int:
        """Return a window of attention in tokens, 0 where there is none. It may be longer than the context that the
        file names: a text may be longer still. Absent: ``default``; null or 0: none."""
        self.asked.add(name)
        found = self.values.get(name, default)
        if found is not None and (not isinstance(found, int) or found < 0):
            raise self.fault(f"{name} is {found!r:.80}; expected a number of tokens")
        return found or 0

    def windows_by_layer(self, layers: int) -> dict[str, Any]:
        """Return the windows of Qwen's models: of the layers that ``layer_types`` names, otherwise of those from
        ``max_window_layers`` on; none unless ``use_sliding_window``."""
        used, first = self.get("use_sliding_window", False), self.get("max_window_layers", 28)
        window = self.window("sliding_window", 4096)
        kinds = self._kinds(layers)
        if kinds is None and not used:
            return {}
        if kinds is None:
            kinds = ["window" if i >= first else "full" for i in range(layers)]
        if not used and "window" in kinds:
            raise self.fault("layer_types has sliding_attention, but use_sliding_window is false")
        return windows(kinds, window)

    def or_none(self, name: str, default: Any, none: Any = 0.0) -> Any:
        """Return a field whose null means ``none``. Absent: ``default``."""
        self.asked.add(name)
        return none if name in self.values and self.values[name] is None else self.get(name, default)

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

    def rope(self, base: str, percent: float, theta: float = 10000.0, *, partial: bool = False) -> dict[str, Any]:
        """Rotary fields of a model from ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5), and the fields
        beside them. ``base``: the older name of ``rope_theta``, by default ``theta``; ``percent``: share of a head that
        is rotated. ``partial``: ``partial_rotary_factor`` may say another share."""
        return read_rope(self, base, percent, theta, partial=partial)

    def refuse_unknown(self, names: Mapping[str, Any], harmless: Iterable[str]) -> None:
        """Every one of ``names`` that is not null must have been asked for, be harmless, or change nothing in
        transformers, which is noted. Raises CheckpointError."""
        known, left = self.known, {*self.asked, *harmless}
        unknown = {k: v for k, v in sorted(names.items()) if v is not None and k not in left}
        inert = {k: v for k, v in unknown.items() if known is not None and known.inert(k, v)}
        refused = {k: v for k, v in unknown.items() if k not in inert}
        unread = {k: v for k, v in inert.items() if known is not None and not known.default(k, v)}
        newer = known is not None and known.older_than(self.values.get("transformers_version"))
        if newer:
            refused |= unread
        if refused:
            since = ""
            if known is not None and newer:
                version = self.values.get("transformers_version")
                since = f". The file is of transformers {version}; known here is what {known.version} reads"
            raise self.fault(
                f"unknown field {_listed(refused)}: it may change what the model computes; if it does not, remove it"
                f"{since}"
            )
        if unread and known is not None:
            self.notes.append(
                f"{self.where}: {len(unread)} {'field' if len(unread) == 1 else 'fields'} left out, which transformers "
                f"{known.version} does not read for this family: {_listed(unread)}"
            )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} ({value!r:.60})" for key, value in values.items())


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
