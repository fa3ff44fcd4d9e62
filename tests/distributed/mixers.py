"""Mixers with a state beside attention, in random combinations on random layouts, each against one process; resumable.

``python tests/distributed/mixers.py --seeds 0-299 --out benchmarks/results/mixers.jsonl`` runs what the file lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from dataclasses import dataclass
from typing import Any

import drawing
from drawing import Draw
from fuzz import record, record_parser

from megatron_port.core.config.checks import problems
from megatron_port.core.config.model import ATTENTION, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import MIXERS
from megatron_port.ext.mixers.recurrent_spec import RecurrentKind
from megatron_port.ext.mixers.settings import ATTENTION_SETTINGS
from megatron_port.run.build import check_parameter_groups

HALF = 2000
"""Draws from this seed on are in half precision, and judged as the fuzz judges those."""
NAMES = ("gated_delta", "kda", "mamba2", "short_conv")
"""Mixers that are drawn, in an order that the draws of a seed depend on."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "convolution_bias": (False, True), "chunk": (2, 3, 5, 64), "segment": (4, 6, 2048), "step_min": (0.0, 0.7),
    "step_max": (0.0, 1.0), "gated_norm": ("group", "all", "none"), "norm_before_gate": (False, True),
}
"""Values of further settings of ``model.recurrent``."""
LATER: dict[str, tuple[Any, ...]] = {"norm_epsilon": (0.0, 1e-3), "negative_eigenvalues": (False, True)}
"""Those that came later, each from numbers of its own, so that the others stay as they were drawn."""
BESIDE, WITH_BESIDE = "attention_mamba2", range(1000, HALF)
"""A mixer, and the seeds that draw it, with its factors."""


@dataclass(frozen=True)
class MixerDraw(Draw):
    """A combination with mixers beside attention."""

    def describe(self) -> dict[str, object]:
        """For the results file."""
        m = self.config.model
        return {**super().describe(), "cp": self.topology.cp, "mixers": m.mixer_pattern or m.mixer,
                "recurrent": dataclasses.asdict(m.recurrent)}


def draw(seed: int) -> MixerDraw:
    """A run of the fuzz whose layers have other mixers, or some of them."""
    r, dtypes = random.Random(f"mixers-{seed}"), ("bf16", "fp16") if seed >= HALF else ("fp64",)
    beside = seed in WITH_BESIDE
    while True:
        one = drawing.draw(r.randrange(10_000_000))
        config, t = one.config, one.topology
        # In fp32 what is made of length 1 has few digits of its gradient at these sizes, on one process as well. Lion
        # and CAME divide gradients by their own size: those of documents of one token are 0 but for rounding.
        if config.precision.dtype not in dtypes or config.optimizer.name in ("lion", "came"):
            continue
        if config.fine_tuning.enabled:
            continue
        keys = t.tp * r.choice((1, 1, 2))
        sizes: dict[str, Any] = {
            "heads": keys * r.choice((1, 2, 3)), "key_heads": keys, "key_size": r.choice((4, 5, 8)),
            "value_size": r.choice((4, 6, 7)), "kernel": r.choice((1, 2, 4)),
        }
        sizes |= {name: r.choice(values) for name, values in CHOICES.items()}
        sizes |= {name: random.Random(f"{name}-{seed}").choice(values) for name, values in LATER.items()}
        if r.random() < 0.3:
            sizes["key_heads"] = 1
        if beside:
            sizes |= {"multipliers": r.choice(((), (0.5, 0.75, 1.5, 1.25, 0.875))), "attention_multiplier": 0.75,
                      "result_multiplier": r.choice((1.0, 0.625))}
        # The first in turn, so that few seeds have each.
        first = BESIDE if beside else NAMES[seed % len(NAMES)]
        pattern = [first, *r.choices((ATTENTION, *NAMES), k=r.randint(0, 2))]
        r.shuffle(pattern)
        read = {setting for name in {*pattern} - {ATTENTION} for setting in MIXERS.get(name, RecurrentKind).reads}
        recurrent = RecurrentConfig(**{setting: value for setting, value in sizes.items() if setting in read})
        model = dataclasses.replace(config.model, recurrent=recurrent)
        alone = random.Random(f"alone-{seed}")
        if not model.parallel_residual and alone.random() < 0.3:
            blocks: Any = alone.choice((("none",), ("mlp", "none"), ("none", "mlp")))
            model = dataclasses.replace(model, mlp_pattern=blocks)
        if len(pattern) == 1:
            model = dataclasses.replace(model, mixer=pattern[0])
        else:
            model = dataclasses.replace(model, mixer_pattern=tuple(pattern))
        if ATTENTION not in model.mixers:
            plain = ModelConfig()
            kept = {s for name in model.mixers for s in MIXERS.get(name, RecurrentKind).settings}
            unread = (name for name in ATTENTION_SETTINGS if name not in kept)
            model = dataclasses.replace(model, **{name: getattr(plain, name) for name in unread})
        config = dataclasses.replace(config, model=model)
        data = dataclasses.replace(config.data, synthetic=not config.data.train)
        checkpoint = dataclasses.replace(config.checkpoint, initial_weights="frozen")
        legal = dataclasses.replace(config, data=data, checkpoint=checkpoint)
        if first not in model.mixers or problems(legal, world_size=t.world_size):
            continue
        scaled = dataclasses.replace(model, mlp_multipliers=(0.75, 1.25))  # where a gated block without biases is
        if beside and seed % 2 and not problems(dataclasses.replace(legal, model=scaled), world_size=t.world_size):
            config = dataclasses.replace(config, model=scaled)
        with contextlib.suppress(ConfigError):  # a group of the parameters of a block that a layer does without
            check_parameter_groups(config)
            return MixerDraw(seed, config, t)


def main() -> int:
    """Run what a file lacks."""
    args = record_parser(main.__doc__).parse_args()
    return record([draw(seed) for seed in args.seeds], args, "mixers", lambda c: str(c.model.mixers))


if __name__ == "__main__":
    sys.exit(main())
