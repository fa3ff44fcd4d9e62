"""Random options beside the optimizer's rule: groups, muP, clipping of values and by past norms, averaged weights."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from megatron_port.config.schema import ParameterGroup, RunConfig


def optioned(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with options that engine native has: the average in one of three, the others in fp64, where what they
    change of a step is no question of rounding."""
    if config.engine != "native" or config.offload.optimizer != "none":
        return config
    options: dict[str, Any] = {"ema_decay": r.choice((0.5, 0.9)) if r.random() < 1 / 3 else 0.0}
    model = config.model
    if config.precision.dtype == "fp64" and not config.fine_tuning.enabled:
        if r.random() < 1 / 4:
            options["clip_value"] = r.choice((0.001, 0.02))
        if r.random() < 1 / 4:
            options |= {"clip_zscore": r.choice((0.1, 2.0)), "clip_decay": r.choice((0.02, 0.9)), "clip_warmup": 2}
        if r.random() < 1 / 4:
            options["groups"] = _groups(r, config)
        if r.random() < 1 / 4 and not (model.kv_lora_rank or model.head_bias):  # muP serves neither
            model = dataclasses.replace(model, mup_base_size=r.choice((8, 16)))
    optimizer = dataclasses.replace(config.optimizer, **options)
    return dataclasses.replace(config, optimizer=optimizer, model=model)


def _groups(r: random.Random, config: RunConfig) -> tuple[ParameterGroup, ...]:
    """One to three groups, each of parameters that the model has."""
    names = ["layers.0.mlp.*", "norm", "matrix", "embedding", *(["head"] if not config.model.tie_embeddings else [])]
    return tuple(
        ParameterGroup(match=name, lr_factor=r.choice((0.0, 0.5, 2.0)), weight_decay=r.choice((-1.0, 0.3)))
        for name in r.sample(names, r.randrange(1, 4))
    )
