"""``config.json`` of the families of ``model.families``, and our model: both directions, nothing guessed.

What our model cannot compute is refused with the field that asks for it, and so is a field that nobody here knows.
Read as JSON; transformers is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_port.core.config.choices import installed_problems
from megatron_port.core.config.dump import leaves
from megatron_port.core.config.model import ATTENTION
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.core.registry import FAMILIES, MIXERS
from megatron_port.ext.families import AUTO, family_named, family_names
from megatron_port.ext.families.family import HARMLESS, Family, Fields, known_fields
from megatron_port.ext.families.settings import rotates_attention, windows, windows_of
from megatron_port.run.same_model import FREE, sizes_of_all, unread, without_mup

CONFIG = "config.json"
_MAX_BYTES = 1 << 24
_TRAINING = FREE - {"init_std"}
"""Fields of a model that do not change what it computes outside training."""
_ROPE = frozenset(
    name for name in ModelConfig.__dataclass_fields__ if name.startswith(("rope_", "rotary_", "window_rope_"))
)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` as a dictionary. Raises CheckpointError."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; such a file has at most {_MAX_BYTES}")
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; a Hugging Face folder has a config.json") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise CheckpointError(f"{path}: not an object")
    return body


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family that ``model_type`` names. Raises CheckpointError for one that is not registered."""
    found = config.get("model_type")
    if found not in family_names() and isinstance(found, str):
        _load_installed()
    if found not in family_names():
        raise CheckpointError(
            f"{where}: model_type {found!r:.80}; only {', '.join(family_names())} can be imported, and what a plugin "
            "registers (--plugin, or `plugins` of a run file)"
        )
    return family_named(str(found))


def _load_installed() -> None:
    """Import the plugins of installed packages: one of them may have the family."""
    problems = installed_problems()
    if problems:
        raise CheckpointError("; ".join(problems))


def _exported_as(family: Family) -> str:
    """Return ``model.family`` of an imported model. Most own families differ in what they compute, so the model itself
    says which it is; a twin, or a plugin's, may compute what another does."""
    return family.name if family.twin or family.name in FAMILIES.added else AUTO


def model_from_hf(config: Mapping[str, Any], where: str, notes: list[str] | None = None) -> ModelConfig:
    """The model that a ``config.json`` describes, derived sizes filled in.

    ``seq_length`` is its longest context; under rope a run may train with any. ``notes`` gets a sentence for each thing
    that is left out, or read otherwise than it is written.

    Raises:
        CheckpointError: it asks for something that our model does not have, or has a field that is not known here.
    """
    family = family_of(config, where)
    fields = Fields(config, where, known=known_fields(family.name), notes=notes)
    fields.refuse("is_encoder_decoder", False, "an encoder and a decoder")
    _refuse_quantized(fields)
    values = family.read(fields)
    if code := config.get("auto_map"):
        fields.notes.append(
            f"{where}: auto_map names Python of the folder ({code!r:.120}); it is not run: this is transformers' own "
            f"{family.name}"
        )
    fields.refuse_unknown(config, HARMLESS | family.harmless)
    name = config.get("_name_or_path") or family.name
    try:
        model = ModelConfig(name=Path(str(name)).name or family.name, family=_exported_as(family), **values)
    except TypeError as error:
        raise fields.fault(str(error)) from None
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length", "kv_heads", "ffn_size")
    for size in sizes:
        if getattr(model, size) < 1:
            raise fields.fault(f"{size} is {getattr(model, size)}")
    if model.num_attention_heads % model.kv_heads or (
        not model.head_dim and model.hidden_size % model.num_attention_heads
    ):
        raise fields.fault(
            f"hidden size {model.hidden_size}, {model.num_attention_heads} heads and {model.kv_heads} key/value heads "
            "do not divide"
        )
    return ModelConfig(**{
        **vars(model), "num_query_groups": model.kv_heads, "head_dim": model.head_size,
        "ffn_hidden_size": model.ffn_size,
    })


def _refuse_quantized(fields: Fields) -> None:
    """Raise CheckpointError where weights are stored in another form than numbers of a width."""
    table = fields.values.get("quantization_config")
    if table is not None:
        method = table.get("quant_method") if isinstance(table, Mapping) else table
        raise fields.fault(
            f"quantization_config: weights are stored as {method!r:.40}; write them as bfloat16 first (in transformers "
            "load the model dequantized, then save_pretrained)"
        )


def family_for(model: ModelConfig) -> str:
    """Return the family that a model is exported as: ``model.family``, or the first that computes what it does.

    The family's config.json, read back, gives the same model: a field that a family does not write is therefore never
    lost in silence.

    Raises:
        CheckpointError: there is none; says what each of them would need.
    """
    if added := [name for name in model.mixers if name not in MIXERS.builtin]:
        raise CheckpointError(f"model.mixer {added[0]!r} has no Hugging Face form: no family has a plugin's mixer")
    if model.family not in (AUTO, *family_names()):
        _load_installed()
    if model.family not in (AUTO, *family_names()):
        raise CheckpointError(
            f"model.family {model.family!r} is not registered here; name the plugin that has it (--plugin), or export "
            f"another: {', '.join(family_names())}"
        )
    asked = family_names() if model.family == AUTO else (model.family,)
    lacking = {}
    for name in asked:
        lacking[name] = _lacking(model, family_named(name))
        if not lacking[name]:
            return name
    raise CheckpointError(
        "no Hugging Face architecture known here computes what this model does: "
        + "; ".join(f"{name} needs {', '.join(missing)}" for name, missing in lacking.items())
    )


def another_family(model: ModelConfig) -> str:
    """Return in one sentence why a model is not of the family that ``model.family`` names; empty where it is, or where
    none is named. A vocabulary that the data are yet to give may have any size."""
    if model.family == AUTO:
        return ""
    try:
        family_for(replace(model, vocab_size=model.vocab_size or 1))
    except CheckpointError as error:
        return f"model.family = {model.family!r}, and checkpoints of this model cannot be exported as it: {error}"
    return ""


def _lacking(model: ModelConfig, family: Family) -> list[str]:
    """Return the settings that a model would need for ``family`` to compute it; empty: it does."""
    prefix, model = "read back", without_mup(model)
    try:
        there = model_from_hf(_config(model, family), prefix)
    except CheckpointError as error:
        return [str(error).removeprefix(f"{prefix}: ")]
    ours, theirs = _essential(model), _essential(there)
    if ours["position_embedding"] != theirs["position_embedding"]:
        theirs |= {name: ours[name] for name in _ROPE}
    if not (ours["moe.num_experts"] and theirs["moe.num_experts"]):  # what experts are like says nothing more
        ours = {name: v for name, v in ours.items() if not name.startswith("moe.") or name == "moe.num_experts"}
    if there.mixers == (ATTENTION,):  # the mixers themselves say enough
        ours = {name: v for name, v in ours.items() if not name.startswith("recurrent.")}
    ours = {name: v for name, v in ours.items() if name not in unread(there)}
    return [f"{name} = {_shown(theirs[name])}" for name, value in ours.items() if theirs[name] != value]


def _essential(model: ModelConfig) -> dict[str, Any]:
    """Fields that change what a model computes, derived sizes filled in, those without effect at their defaults."""
    values = {name: value for name, value in leaves(replace(model, **sizes_of_all(model))) if name not in _TRAINING}
    # Under rope a text may be longer than seq_length, and a window that is no shorter then counts.
    counts = model.sliding_window < model.seq_length or model.position_embedding == "rope"
    values |= windows_of(model) if counts else windows((), 0)
    unused = set() if model.position_embedding == "rope" else set(_ROPE)
    if not any(rotates_attention(model)):
        unused |= _ROPE - {"rope_pattern", "window_rope_theta"}
    if model.rope_scaling != "llama3":
        unused |= {"rope_low_freq_factor", "rope_high_freq_factor"}
    if model.rope_scaling != "yarn":
        unused |= {"rope_beta_fast", "rope_beta_slow", "rope_attention_factor", "rope_truncate"}
    if model.rope_scaling not in ("llama3", "yarn"):
        unused.add("rope_original_length")
    if model.rope_scaling == "none":
        unused.add("rope_factor")
    return values | {name: ModelConfig.__dataclass_fields__[name].default for name in unused}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def hf_config(model: ModelConfig, *, dtype: str, eos: int | None, bos: int | None = None) -> dict[str, Any]:
    """A ``config.json`` for :func:`family_for`'s architecture. ``dtype``: e.g. ``float32``. ``eos``, ``bos``: ids that
    end and begin a text; None: there is none."""
    return _config(without_mup(model), family_named(family_for(model))) | {
        "torch_dtype": dtype, "bos_token_id": bos, "eos_token_id": eos, "use_cache": True,
        "pad_token_id": None,  # absent, it is the family's, whatever the vocabulary
    }


def _config(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The fields that describe the model."""
    return {
        "architectures": [family.architecture], "model_type": family.name, "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings, "initializer_range": model.init_std, **family.write(model),
    }
