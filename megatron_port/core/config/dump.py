"""Writing a configuration: plain dictionaries, TOML, and the hash of what determines training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_port.core.config.schema import RunConfig, TrainingConfig
from megatron_port.core.config.sections import added_sections


def as_dict(config: Any) -> dict[str, Any]:
    """Nested plain dictionaries; tuples become lists."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            value = as_dict(value)
        elif isinstance(value, tuple):
            value = [as_dict(entry) if dataclasses.is_dataclass(entry) else entry for entry in value]
        out[f.name] = value
    return out


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted name, value)`` of every leaf, in the order of the schema."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def toml_value(value: Any) -> str:
    """One value as TOML source. Floats keep every bit (repr), strings are escaped as TOML 1.0 asks."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escape(c) for c in value) + '"'
    if isinstance(value, (int, float)):
        return repr(value)
    if dataclasses.is_dataclass(value):
        return "{ " + ", ".join(f"{key} = {toml_value(v)}" for key, v in leaves(value)) + " }"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    raise ValueError(f"no TOML form for a {type(value).__name__}")


def _escape(char: str) -> str:
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if char in short:
        return short[char]
    if ord(char) < 32 or ord(char) == 127:
        return f"\\u{ord(char):04x}"
    return char


def to_toml(config: Any, comments: Mapping[str, str] | None = None) -> str:
    """The whole configuration as TOML, loadable again to an equal object.

    ``comments``: a trailing comment for each dotted leaf name (``Loaded.origins``, or help texts).
    """
    comments = comments or {}
    groups: dict[str, list[tuple[str, str]]] = {"": []}
    for name, value in leaves(config):
        table, _, key = name.rpartition(".")
        groups.setdefault(table, []).append((f"{key} = {toml_value(value)}", comments.get(name, "")))
    blocks = []
    for table, rows in groups.items():
        lines = [f"[{table}]"] if table else []
        width = max((len(text) for text, note in rows if note and len(text) <= 48), default=0)
        for text, note in rows:
            lines.append(f"{text:<{width}}  # {' '.join(note.split())}" if note else text)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


_FIRST_MODEL = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "head_dim", "ffn_hidden_size", "vocab_size",
    "seq_length", "position_embedding", "rope_theta", "normalization", "norm_epsilon", "activation", "add_bias",
    "tie_embeddings", "hidden_dropout", "attention_dropout", "init_std",
)
_FIRST_OPTIMIZER = (
    "name", "lr", "min_lr", "beta1", "beta2", "eps", "weight_decay", "clip_grad", "decay", "warmup_steps",
    "decay_steps",
)
_FIRST_DATA = ("train", "weights", "split", "synthetic", "tokenizer", "order", "index_cache", "pinned", "mask_eod_loss")
"""Fields that the first checkpoints had. All others came later: at their defaults they leave the hash as it was."""


def _hashed(table: Any, first: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a table that count: the ``first``, and of the others those that are not at their default."""
    plain = type(table)()
    return {name: value for name, value in as_dict(table).items()
            if name in first or getattr(table, name) != getattr(plain, name)}


def config_hash(config: RunConfig) -> str:
    """16 hex digits of the SHA-256 of what determines training.

    In: the model (defaults applied, name and family left out), the loss, seed, global batch and
    ramp-up, number format, optimizer (decay_steps applied), data. Out: layout, engine,
    micro-batch, device, cluster, telemetry, checkpoints, evaluation, names. Corpora
    count by base name, so that a copy on a faster disk is the same run.
    """
    model = _hashed(config.model, _FIRST_MODEL)
    model.pop("name", None)
    model.pop("family", None)
    model.update(
        num_query_groups=config.model.kv_heads, head_dim=config.model.head_size, ffn_hidden_size=config.model.ffn_size
    )
    batch = as_dict(config.batch)
    del batch["micro_batch_size"]
    optimizer = _hashed(config.optimizer, _FIRST_OPTIMIZER)
    optimizer.pop("ema_evaluate", None)
    optimizer["decay_steps"] = config.optimizer.decay_steps or config.training.steps
    data = _hashed(config.data, _FIRST_DATA)
    for name in ("remote_cache", "remote_cache_gb", "document_length"):  # where copies lie, and a planner's guess
        data.pop(name, None)
    data["train"] = [prefix.replace("\\", "/").rstrip("/").rpartition("/")[2] for prefix in config.data.train]
    parts = {
        "seed": config.seed, "model": model, "batch": batch, "optimizer": optimizer,
        "data": data, "precision": as_dict(config.precision),
    }
    if config.training.loss != TrainingConfig.loss:  # it came after the first checkpoints
        parts["loss"] = config.training.loss
    if config.training.z_loss:
        parts["z_loss"] = config.training.z_loss
    if config.training.on_pairs:
        parts["dpo_beta"] = config.training.dpo_beta
    if config.fine_tuning.enabled:
        parts["fine_tuning"] = {k: v for k, v in as_dict(config.fine_tuning).items() if k != "adapters"}
    if config.quantisation.enabled:
        parts["quantisation"] = as_dict(config.quantisation)
    if config.sparsity.enabled:
        parts["sparsity"] = as_dict(config.sparsity)
    if config.distillation.enabled:  # the teacher by its values, which the checkpoint records, not by its path
        places = ("teacher", "logits")
        parts["distillation"] = {k: v for k, v in as_dict(config.distillation).items() if k not in places}
    parts.update({name: as_dict(section) for name, section in added_sections(config).items()})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
