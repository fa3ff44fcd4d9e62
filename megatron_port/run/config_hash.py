"""The hash of what determines training: two runs of one hash learn the same, however they are split."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from megatron_port.core.config.choices import added_sections
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import RunConfig, TrainingConfig

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
    if config.training.loss == "dpo":
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
