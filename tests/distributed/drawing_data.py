"""Random options of the data and of the learning rate: corpora, blends, packing, orders, splits, schedules, z-loss."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from corpora import KINDS, corpus_folder, corpus_prefix

from megatron_port.core.config.schema import RunConfig

SPLITS = ((0.98, 0.01, 0.01), (1.0, 0.0, 0.0), (0.5, 0.3, 0.2))


def fed(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with corpora on a disk, half of all: one, or a blend of two or three. An eighth has synthetic tokens, and
    the others have samples that are functions of their ids (cases.sample_tokens)."""
    data, model, chance = config.data, config.model, r.random()
    if chance >= 5 / 8:
        return config
    if chance >= 1 / 2:
        return dataclasses.replace(config, data=dataclasses.replace(data, synthetic=True))
    kinds = r.sample(sorted(KINDS), r.choice((1, 2, 2, 3)))
    packed = data.attention_documents == "within" and r.random() < 0.6
    data = dataclasses.replace(
        data, train=tuple(corpus_prefix(kind, model.vocab_size) for kind in kinds),
        weights=tuple(r.choice((0.2, 1.0, 3.0)) for _ in kinds) if r.random() < 0.5 else (),
        packing="first_fit" if packed else "none", split=r.choice(SPLITS),
        order="stateless" if packed or r.random() < 0.5 else "megatron", index_cache=str(corpus_folder() / "index"),
    )
    return dataclasses.replace(config, data=data)


def scheduled(r: random.Random, config: RunConfig, steps: int) -> RunConfig:
    """The run with a learning rate that changes from step to step, half of all, and a z-loss, a quarter."""
    config = dataclasses.replace(config, training=dataclasses.replace(
        config.training, steps=steps, z_loss=r.choice((1e-3, 0.02)) if r.random() < 0.25 else 0.0
    ))
    if r.random() < 0.5:
        return config
    decay: Any = r.choice(("cosine", "linear", "constant", "wsd", "inverse_sqrt"))
    end = r.choice((0, 2, steps, steps + 2))
    warmup = r.randrange(min(end or steps, steps))
    optimizer = dataclasses.replace(
        config.optimizer, decay=decay, decay_steps=end, warmup_steps=warmup,
        min_lr=config.optimizer.lr * r.choice((0.0, 0.1, 1.0)),
    )
    if decay == "wsd":
        fall = r.randrange((end or steps) - warmup + 1)
        optimizer = dataclasses.replace(optimizer, wsd_steps=fall, wsd_shape=r.choice(("linear", "sqrt", "cosine")))
    return dataclasses.replace(config, optimizer=optimizer)
