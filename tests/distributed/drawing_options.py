"""Random options beside the optimizer's rule: groups, muP, clipping of values and by past norms, averaged weights; the
head in chunks."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from megatron_port.core.config.schema import ParameterGroup, RunConfig


def optioned(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with options that its engine and its offload serve: the average in one of three, each of the others in
    one of four."""
    native, free = config.engine == "native", config.offload.optimizer == "none"
    options: dict[str, Any] = {"ema_decay": r.choice((0.5, 0.9)) if r.random() < 1 / 3 and native and free else 0.0}
    model = config.model
    if not config.fine_tuning.enabled:
        if r.random() < 1 / 4 and native and free:
            options["clip_value"] = r.choice((0.001, 0.02))
        if r.random() < 1 / 4 and native:
            options |= {"clip_zscore": r.choice((0.1, 2.0)), "clip_decay": r.choice((0.02, 0.9)), "clip_warmup": 2}
        if r.random() < 1 / 4:
            options["groups"] = _groups(r, config)
        if r.random() < 1 / 4 and not (model.kv_lora_rank or model.head_bias):  # muP serves neither
            model = dataclasses.replace(model, mup_base_size=r.choice((8, 16)))
    options["ema_evaluate"] = bool(options["ema_decay"]) and r.random() >= 0.5
    if config.precision.dtype == "fp64":  # in fp32, with Adam's usual one, rounding noise takes full steps
        options["eps"] = r.choice((1e-5, 1e-6, 1e-8))
    optimizer = dataclasses.replace(config.optimizer, **options)
    return dataclasses.replace(config, optimizer=optimizer, model=model)


def headed(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with its head in chunks of tokens; one in three of those that can."""
    if config.engine != "native" or config.precision.dtype not in ("fp64", "fp32") or r.random() < 2 / 3:
        return config  # a product of few rows may sum in another order, which no process follows in half precision
    activations = dataclasses.replace(config.activations, head_chunk=r.choice((1, 3, 7, 16, 50)))
    return dataclasses.replace(config, activations=activations)


def _groups(r: random.Random, config: RunConfig) -> tuple[ParameterGroup, ...]:
    """One to three groups, each of parameters that the model has and that no group before it takes."""
    names = ["layers.0.mlp.*", "norm", "matrix", "embedding", *(["head"] if not config.model.tie_embeddings else [])]
    return tuple(
        ParameterGroup(match=name, lr_factor=r.choice((0.0, 0.5, 2.0)), weight_decay=r.choice((-1.0, 0.3)))
        for name in sorted(r.sample(names, r.randrange(1, 4)), key=names.index)
    )
