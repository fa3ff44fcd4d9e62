"""Description of a family of Hugging Face models: its configuration and its names, in both directions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.ext.families.settings import windows

# Which fields of a config.json transformers reads, family by family.
#
# Derived from its sources by ``scripts/transformers_fields.py``; transformers itself is not needed here.

FILE = Path(__file__).with_name("transformers_fields.json")


@dataclass(frozen=True)
class Known:
    """Fields of a family in transformers."""

    version: str
    """Version of the transformers whose sources were read."""
    read: frozenset[str]
    """Fields that its model, its configuration or what these use may read, by any of their names."""
    defaults: Mapping[str, Any]
    """Default of each field that its configuration's class has, tables left out."""
    rope: frozenset[str]
    """Keys that the model, or some rope type, reads from a rope table."""

    def default(self, name: str, value: Any) -> bool:
        """Whether this is a field's default, of the same type."""
        default = self.defaults.get(name)
        return default is not None and type(default) is type(value) and default == value

    def inert(self, name: str, value: Any) -> bool:
        """Whether a field changes nothing: transformers does not read it, or this is its default."""
        return name not in self.read or self.default(name, value)

    def older_than(self, version: Any) -> bool:
        """Whether a file is of a later transformers than the one that was read: its fields may be new."""
        return isinstance(version, str) and _numbers(version) > _numbers(self.version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return 5, 23 of "5.23.0.dev1", since patches add no fields; nothing of what is no version."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return (int(found[1]), int(found[2])) if found else ()


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_bytes())
    return found


def known_fields(family: str) -> Known | None:
    """Return the fields of a family; None: it is a plugin's, of which nothing is known."""
    table = _table()
    found = table["families"].get(family)
    if found is None:
        return None
    read = {*table["read"], *found["read"]}
    for pair in found["aliases"].items():
        read |= {*pair} if read.intersection(pair) else set()
    return Known(table["transformers"], frozenset(read), found["defaults"], frozenset(found["rope"]))


# Rotary fields of a ``config.json``, resolved as transformers resolves them.
#
# The table is called ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5), and some of what it holds may also
# stand beside it. Where two places contradict one another, transformers reads one of them: so do we, and note it.

TABLES = ("rope_scaling", "rope_parameters")
"""By the order in which transformers takes them."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
_TYPES = ("default", "linear", "llama3", "yarn")
_INSTEAD = {
    "dynamic": "it changes nothing up to max_position_embeddings tokens: for such texts remove it",
    "longrope": "it has other frequencies for texts longer than original_max_position_embeddings, and this model has "
                "one set; take the family's model for short contexts, e.g. Phi-3-mini-4k",
}
_INSTEAD["su"] = _INSTEAD["longrope"]


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """Return what YaRN multiplies queries and keys by for a context that is ``factor`` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope(f: Fields, base: str, percent: float, theta: float, *, partial: bool) -> dict[str, Any]:
    """Return the rotary fields of a model; see :meth:`Fields.rope`."""
    table = _rope_table(f)
    f.asked.update((base, ORIGINAL_LENGTH))
    _beside(f, table, "rope_theta", base, theta)
    if base == "rope_theta":
        _beside(f, table, "partial_rotary_factor", "partial_rotary_factor", percent)
        f.asked.add("partial_rotary_factor")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in _TYPES:
        more = f": {_INSTEAD[kind]}" if kind in _INSTEAD else ""
        raise f.fault(f"rope_type {kind!r:.80}; only default, linear, llama3 and yarn can be imported{more}")
    if kind in ("llama3", "yarn"):
        _original_length(f, table)
    rope = f.table(table)
    rope.asked.update(("rope_type", "type"))
    out = {
        "position_embedding": "rope", "rope_theta": _number(rope, "rope_theta"),
        "rotary_percent": _number(rope, "partial_rotary_factor", percent),
    }
    if not partial and out["rotary_percent"] != percent:
        raise f.fault(f"partial_rotary_factor is {out['rotary_percent']}; only {percent} can be imported")
    out |= _scaling(rope, str(kind), f) if kind != "default" else {}
    _leave_out(f, rope, table, str(kind))
    return out


def _rope_table(f: Fields) -> dict[str, Any]:
    """Return a copy of the table that transformers reads; note one that it does not."""
    f.asked.update(TABLES)
    found = {name: f.values[name] for name in TABLES if f.values.get(name)}
    for name, table in found.items():
        if not isinstance(table, Mapping):
            raise f.fault(f"{name} is {table!r:.80}; expected a table")
    if not found:
        return {}
    name, table = next(iter(found.items()))
    other = found.get("rope_parameters", table)
    if other != table:
        f.notes.append(
            f"{f.where}: rope_scaling and rope_parameters differ; rope_scaling is read, as in transformers, and nothing"
            f" of rope_parameters, which is {dict(other)!r:.200}"
        )
    return dict(table)


def _beside(f: Fields, table: dict[str, Any], key: str, field: str, default: float) -> None:
    """Put into the table what it lacks and a field beside it has, by default ``default``; note a contradiction."""
    beside = f.values.get(field)
    if beside is None and field in f.values and key not in table and field != "partial_rotary_factor":
        raise f.fault(f"{field} is null; write the number")
    if key not in table:
        table[key] = default if beside is None else beside
    elif beside is not None and beside != table[key]:
        f.notes.append(
            f"{f.where}: {field} {beside!r:.40} is not read: the rope table has {table[key]!r:.40}, which transformers "
            "takes"
        )


def _original_length(f: Fields, table: dict[str, Any]) -> None:
    """Put the length before scaling into the table: the field beside it, where there is one, is what transformers
    takes; without either it is the context that the file names."""
    if table.get(ORIGINAL_LENGTH, 1) is not None and ORIGINAL_LENGTH in f.values:
        beside = f.values[ORIGINAL_LENGTH]
        if table.get(ORIGINAL_LENGTH, beside) != beside:
            f.notes.append(
                f"{f.where}: {ORIGINAL_LENGTH} is {table[ORIGINAL_LENGTH]!r:.40} in the rope table and {beside!r:.40} "
                "beside it; the latter is read, as in transformers"
            )
        table[ORIGINAL_LENGTH] = beside
    elif ORIGINAL_LENGTH not in table:
        table[ORIGINAL_LENGTH] = _context(f)
    length = table[ORIGINAL_LENGTH]
    if type(length) is not int or length < 1:
        raise f.fault(f"{ORIGINAL_LENGTH} is {length!r:.40}; expected the tokens of the context before scaling")


def _context(f: Fields) -> int:
    """Return the context that the file names, or its family's default."""
    default = f.known.defaults.get("max_position_embeddings", 0) if f.known else 0
    found: int = f.get("max_position_embeddings", default)
    return found


def _number(rope: Fields, name: str, default: float | None = None) -> float:
    """Return a number of the table that transformers takes as it is: null is none."""
    rope.asked.add(name)
    value = rope.values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        what = "is missing" if name not in rope.values else f"is {value!r:.60}"
        raise rope.fault(f"{name} {what}; expected a number above 0")
    return float(value)


def _scaling(rope: Fields, kind: str, f: Fields) -> dict[str, Any]:
    """Return the fields of frequencies that are scaled."""
    rope.asked.add("factor")
    if kind == "yarn" and "factor" in rope.values and rope.values["factor"] is None:
        factor = _context(f) / rope.values[ORIGINAL_LENGTH]
    else:
        factor = _number(rope, "factor")
    if factor < 1:
        raise rope.fault(f"factor is {factor}; expected at least 1")
    out: dict[str, Any] = {"rope_scaling": kind, "rope_factor": factor}
    if kind == "linear":
        return out
    rope.asked.add(ORIGINAL_LENGTH)
    out["rope_original_length"] = rope.values[ORIGINAL_LENGTH]
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if high <= low:
            raise rope.fault(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return out | {"rope_low_freq_factor": low, "rope_high_freq_factor": high}
    return out | _yarn(rope, factor)


def _yarn(rope: Fields, factor: float) -> dict[str, Any]:
    """Return YaRN's own fields: 0 and null are the default of the turns, null of ``truncate`` is false."""
    turns = {
        name: _number(rope, name) if rope.values.get(name) else default
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    rope.asked.update((*turns, "attention_factor", "mscale", "mscale_all_dim", "truncate"))
    if turns["beta_fast"] <= turns["beta_slow"]:
        raise rope.fault(f"beta_fast {turns['beta_fast']} must be above beta_slow {turns['beta_slow']}")
    return {
        "rope_beta_fast": turns["beta_fast"], "rope_beta_slow": turns["beta_slow"],
        "rope_attention_factor": _attention_factor(rope, factor),
        "rope_truncate": bool(rope.values.get("truncate", True)),
    }


def _attention_factor(rope: Fields, factor: float) -> float:
    """Return the factor on queries and keys, 0 for what ``factor`` alone makes it."""
    if rope.values.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    scales = [_number(rope, name) for name in ("mscale", "mscale_all_dim") if rope.values.get(name)]
    if len(scales) < 2:
        if scales:
            rope.notes.append(f"{rope.where}: mscale and mscale_all_dim are read together only; one alone is left out")
        return 0.0
    return yarn_growth(factor, scales[0]) / yarn_growth(factor, scales[1])


def _leave_out(f: Fields, rope: Fields, table: Mapping[str, Any], kind: str) -> None:
    """Note keys of the table that its rope type does not read. Refuse them without a rope type that scales, where
    another reads them: it may be meant. Refuse them too in a plugin's family."""
    left = {k: v for k, v in table.items() if v is not None and k not in rope.asked}
    read = {k: v for k, v in left.items() if f.known is None or (kind == "default" and k in f.known.rope)}
    if read:
        shown = ", ".join(f"{key} ({value!r:.60})" for key, value in read.items())
        raise rope.fault(
            f"unknown field {shown}: rope_type {kind} does not read it, so another may be meant; if not, remove it"
        )
    if left:
        shown = ", ".join(f"{key} ({value!r:.60})" for key, value in left.items())
        f.notes.append(f"{rope.where}: left out, since transformers' rope_type {kind} does not read it: {shown}")


# Fields of a ``config.json``: read with transformers' defaults, every one accounted for.
#
# A field that was not asked for is harmless, or transformers does not read it for the family (``known``), or it is
# refused by name: it may change what the model computes. What is left out is noted.

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


Dimensions = tuple[int | Literal["rows", "columns"], ...]
Rows = tuple[str, int, int] | tuple[str, int, int, int]
Rotation = Literal["halves", "first", "interleaved"]
"""Order of the elements of a head that rope rotates."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of our modules in the family's files, without ``.weight`` or ``.bias``."""

    prefix: str
    """Before every name but the head's; files of the bare model leave it out."""
    outside: Mapping[str, str]
    """Modules outside the layers, the head left out."""
    head: str
    """The whole name of the head's matrix."""
    layer: str
    """Before the names of a layer, ``{}`` for its number."""
    number: Callable[[ModelConfig, int, str], int] | None = None
    """(model, our layer, what is in it) → number of the layer there that has it; None: the same."""
    inside: Mapping[str, str | tuple[str, ...]]
    """Modules of a layer. Several names: the parts of a fused matrix, in our order (query, key, value; gate, up).
    Experts have ``{}`` for their number; a name without it is of one tensor [experts, in, out] that has no ``.weight``
    behind it, nor ``.bias`` but ``_bias``, and in which gate and up alternate."""
    mixers: Mapping[str, Mapping[str, str | tuple[str, ...]]] = field(default_factory=dict)
    """By ``model.mixer``: modules of the layers that have it, in place of those above."""
    rows: Mapping[str, Callable[[ModelConfig], Iterable[Rows]]] = field(default_factory=dict)
    """Parameters of a layer whose rows are there in another order, or that have other names than their modules: model
    → (tensor of the layer there, its first row, how many rows) in our order, and the expert whose rows they are where
    the tensor has all experts along its first dimension."""
    convolutions: tuple[str, ...] = ()
    """Ends of names of matrices that are there [rows, 1, columns]."""
    dimensions: Mapping[str, Dimensions] = field(default_factory=dict)
    """By ends of names: dimensions there of what else has others than [rows, columns] or [rows]; beside these, of 1."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Parts of names → what files may have in their place."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts of names of transformers' parameters → those of the tensors in files that it joins by rows."""
    left_out: tuple[str, ...] = ()
    """Beginnings of names of tensors that transformers does not load."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Last parts of names that are neither ``weight`` nor ``bias``."""
    loaded: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in files → what transformers makes of them."""
    ahead: Mapping[str, str] = field(default_factory=dict)
    """Modules of multi-token prediction, which are there as further layers, beside those of a layer; empty: the family
    has none."""
    ahead_copies: tuple[str, str] = ("", "")
    """In each of them, the copies of the token table and of the head's matrix."""
    qkv_by_group: bool = False
    """A fused projection there has each key/value head's queries, key and value together; else all queries, all keys,
    all values."""
    rotation: Rotation = "halves"
    """halves: element i of a head pairs with i + d/2, as ours; first: of r rotated elements, which come first, i with
    i + r/2; interleaved: of these 2i with 2i + 1."""
    transposed: tuple[str, ...] = ()
    """Ends of names of matrices that are stored as [in, out]."""
    buffers: tuple[str, ...] = ()
    """Ends of names that older versions saved although they are no parameters."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of transformers, in both directions."""

    name: str
    """``model_type`` in config.json."""
    architecture: str
    """transformers' class of the language model."""
    read: Callable[[Fields], dict[str, Any]]
    """Fields of :class:`ModelConfig` from those of a config.json. Raises CheckpointError for what our model cannot
    compute."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The family's own fields of a config.json."""
    names: Names
    names_of: Callable[[ModelConfig], Names] | None = None
    """Names of a model, where modules of its layers are called by what the model has; otherwise ``names``."""
    harmless: frozenset[str] = frozenset()
    """Fields of the family that change nothing in what a language model computes."""
    twin: bool = False
    """Computes what a family before it in the registry does, under other names; a model is exported as itself."""
