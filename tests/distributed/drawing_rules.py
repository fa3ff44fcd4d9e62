"""Random optimizer rules and their options."""

from __future__ import annotations

import dataclasses
import random

from contradictions import contradictions

from megatron_port.core.config.optimizer import (
    AdafactorOptions,
    AdagradOptions,
    CAMEOptions,
    LAMBOptions,
    MuonOptions,
    SGDOptions,
)
from megatron_port.core.config.schema import RunConfig
from megatron_port.ext.kernels.settings import NARROW_STATE, STATE_BLOCK

RATES = {"sgd": 30.0, "adagrad": 1.0, "lion": 0.1, "adafactor": 1.0, "came": 0.3, "sm3": 1.0, "lamb": 1.0, "muon": 1.0}
"""Learning rate of each rule, as a multiple of the tests' own: large, so that a wrong update shows."""
NARROW = ("adamw-bf16", "adamw-8bit")
"""AdamW with narrow moments, at AdamW's rate."""
HOSTED = ("lion", "sgd", "adagrad")
"""Of ``RATES`` those that an offload serves, as it serves ``NARROW``."""


def ruled(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with another optimizer rule: three in four of those of engine native in fp64, whose update is torch's,
    and one in three in half precision, offloaded or not, by own kernels or torch's ops.

    In fp32 a step that depends on a sign, or on the spectrum of a noisy matrix, makes rounding larger than the fixed
    bounds. In half precision the bound of what follows the first step is measured, of the rule's own steps.
    """
    dtype, backend = config.precision.dtype, config.backend
    half, offloaded = dtype in ("bf16", "fp16"), config.offload.optimizer != "none"
    free = half or (dtype == "fp64" and not offloaded and backend.optimizer in ("auto", "torch"))
    if config.engine != "native" or not free or r.random() < (2 / 3 if half else 0.25):
        return config
    # A query that sees one key has no gradient, nor has that key; most rules make full steps of its rounding noise.
    one_key = config.model.sliding_window == 1
    names = ("sgd", "adagrad") if one_key else tuple(HOSTED if offloaded else RATES)
    change, name = dataclasses.replace, r.choice(names)
    optimizer = change(
        config.optimizer, beta2=r.choice((0.9, 0.99)),
        sgd=SGDOptions(momentum=r.choice((0.0, 0.9)), nesterov=r.random() < 0.3, dampening=r.choice((0.0, 0.2))),
        lamb=LAMBOptions(adapts_vectors=r.random() < 0.5),
        muon=MuonOptions(
            nesterov=r.random() < 0.7, adjust_lr=r.choice(("original", "match_rms_adamw")),
            momentum=r.choice((0.9, 0.95)), ns_steps=r.choice((3, 5)), lr_factor=r.choice((0.5, 1.0)),
        ),
    )
    # Drawn last, so that the other rules of a seed stay what they were.
    if not one_key and r.random() < 1 / 3:
        name = r.choice(NARROW)
    optimizer = change(
        optimizer,
        adagrad=AdagradOptions(momentum=r.choice((0.0, 0.9)), initial_accumulator=r.choice((0.0, 0.1))),
        adafactor=AdafactorOptions(
            momentum=r.choice((0.0, 0.9)), relative=r.random() < 0.7, beta2_decay=r.choice((-0.8, -0.5)),
            eps_variance=r.choice((0.0, 1e-5)), eps_scale=r.choice((1e-3, 1e-2)), clip_update=r.choice((1.0, 2.0)),
        ),
        came=CAMEOptions(beta3=r.choice((0.9999, 0.9)), eps_square=r.choice((1e-30, 1e-12)),
                         eps_instability=r.choice((1e-16, 1e-10)), clip_update=r.choice((1.0, 0.5))),
    )
    config = change(config, optimizer=change(optimizer, name=name, lr=optimizer.lr * RATES.get(name, 1.0)))
    if name == "adamw-8bit":
        config = _with_whole_blocks(config)
    if name in ("lion", *NARROW) or backend.optimizer != "own":
        return config
    return change(config, backend=change(backend, optimizer="auto"))


def _with_whole_blocks(config: RunConfig) -> RunConfig:
    """The run with rows of 128 elements, whose moments are codes; with bf16 moments where a rank would cut a block."""
    change, model, tp = dataclasses.replace, config.model, config.layout.tensor_parallel_size
    wide = change(
        config, model=change(model, hidden_size=STATE_BLOCK, head_dim=model.head_dim or 8,
                             ffn_hidden_size=model.ffn_hidden_size or 16 * tp),
    )
    if not contradictions(NARROW_STATE, wide):
        return wide
    return change(config, optimizer=change(config.optimizer, name="adamw-bf16"))
