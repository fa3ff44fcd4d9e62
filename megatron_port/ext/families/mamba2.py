"""Mamba-2: layers of the recurrence alone, without a feed-forward block. Its names serve the hybrids that have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names

MIXER = "mamba2"
HARMLESS = frozenset({
    "time_step_rank", "time_step_floor", "time_step_min", "time_step_max", "rescale_prenorm_residual",
    "residual_in_fp32", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype",
})
"""Fields of initial values, of rounding in half precision, and of what a call returns."""
CHUNKS = ("chunk_size", "mamba_chunk_size")
"""Fields that change results by rounding alone, and have no part in a model."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model. What only attention and feed-forward blocks read is at values that change nothing."""
    f.silu()
    f.refuse("use_bias", False, "biases of projections")
    low, high = read_limit(f)
    f.asked.update(CHUNKS)
    hidden = f.get("hidden_size", 4096)
    recurrent = RecurrentConfig(
        heads=f.get("num_heads", 128), key_heads=f.get("n_groups", 8), key_size=f.get("state_size", 128),
        value_size=f.get("head_dim", 64), kernel=f.get("conv_kernel", 4),
        convolution_bias=f.get("use_conv_bias", True), step_min=low, step_max=high,
    )
    check_width(f, recurrent, hidden, f.get("expand", 2), "num_heads × head_dim")
    return {
        "num_layers": f.get("num_hidden_layers", 64), "hidden_size": hidden, "num_attention_heads": recurrent.heads,
        "head_dim": recurrent.value_size, "vocab_size": f.get("vocab_size", 32768),
        "mixer": MIXER, "mlp_pattern": ("none",), "position_embedding": "rope", "normalization": "rmsnorm",
        "norm_epsilon": f.get("layer_norm_epsilon", 1e-5), "tie_embeddings": f.get("tie_word_embeddings", False),
        "init_std": f.get("initializer_range", 0.1), "recurrent": recurrent,
    }


def read_limit(f: Fields) -> tuple[float, float]:
    """Return the least and the largest time step, 0 for any. transformers leaves them out where it reads one token
    at a time."""
    f.asked.add("time_step_limit")
    found = f.values.get("time_step_limit", [0.0, math.inf])
    numbers = [_number(x) for x in found] if isinstance(found, list | tuple) else []
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1] or numbers[1] == 0:
        raise f.fault(f"time_step_limit is {found!r:.80}; expected the least and the largest time step, from 0 on")
    return numbers[0], 0.0 if numbers[1] == math.inf else numbers[1]


def _number(found: Any) -> float:
    """Return a number, which transformers 5 writes as a table where JSON has none; NaN for anything else."""
    if isinstance(found, Mapping) and found.get("__float__") == "Infinity":
        return math.inf
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else math.nan


def check_width(f: Fields, recurrent: RecurrentConfig, hidden: int, expand: int, product: str) -> None:
    """Raise CheckpointError unless the heads are as wide as ``expand`` says; ``product``: their number and width."""
    inner = recurrent.heads * recurrent.value_size
    if inner != expand * hidden:
        raise f.fault(f"{product} is {recurrent.heads} × {recurrent.value_size}; expected expand × hidden_size, "
                      f"{expand} × {hidden}")
    check_groups(f, recurrent)


def check_groups(f: Fields, recurrent: RecurrentConfig) -> None:
    """Raise CheckpointError unless the groups divide the heads."""
    if recurrent.key_heads < 1 or recurrent.heads % recurrent.key_heads:
        raise f.fault(f"{recurrent.heads} heads do not divide by {recurrent.key_heads} groups")


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    r = model.recurrent
    return limit_there(r) | {
        "num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size, "num_heads": r.heads,
        "head_dim": r.value_size, "n_groups": r.key_heads, "state_size": r.key_size, "conv_kernel": r.kernel,
        "use_conv_bias": r.convolution_bias, "use_bias": False, "hidden_act": "silu",
        "expand": expansion(model), "layer_norm_epsilon": model.norm_epsilon,
    }


def limit_there(r: RecurrentConfig) -> dict[str, Any]:
    """``time_step_limit``, where there is one; infinity as transformers 5 writes it, for JSON has none."""
    most = r.step_max or {"__float__": "Infinity"}
    return {"time_step_limit": [r.step_min, most]} if r.step_min or r.step_max else {}


def expansion(model: ModelConfig) -> int:
    """Return how many times as wide as the residual stream the heads are, rounded down."""
    return model.recurrent.heads * model.recurrent.value_size // model.hidden_size


# Names of the recurrence. There, the projection has all gates, then x of all heads, then B, C of all groups, then all
# time steps; the convolution goes over x, B and C. Ours has one unit after another, and what one group's heads share
# apart from them.

Rows = Callable[[ModelConfig], Iterator[tuple[str, int, int]]]


def _convolved(r: RecurrentConfig, unit: int, units: int) -> Iterator[tuple[int, int]]:
    """Channels of a unit: (first, how many) of x, and of B and of C where it has its own."""
    each, inner, keys = r.heads // units * r.value_size, r.heads * r.value_size, r.key_heads * r.key_size
    yield unit * each, each
    if r.key_heads > 1:
        yield inner + unit * r.key_size, r.key_size
        yield inner + keys + unit * r.key_size, r.key_size


def _units(r: RecurrentConfig) -> int:
    return r.key_heads if r.key_heads > 1 else r.heads


def projected(of: str) -> Rows:
    """Return the rows of the units."""
    def rows(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
        r, name = model.recurrent, f"{of}.in_proj.weight"
        units, inner = _units(r), r.heads * r.value_size
        each = r.heads // units
        for unit in range(units):
            for first, count in _convolved(r, unit, units):
                yield name, inner + first, count
            yield name, unit * each * r.value_size, each * r.value_size
            yield name, 2 * inner + 2 * r.key_heads * r.key_size + unit * each, each

    return rows


def convolved(of: str, kind: str) -> Rows:
    """Return the channels of the units; ``kind``: weight or bias."""
    def rows(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
        units = _units(model.recurrent)
        for unit in range(units):
            for first, count in _convolved(model.recurrent, unit, units):
                yield f"{of}.conv1d.{kind}", first, count

    return rows


def shared(tensor: str, places: int) -> Rows:
    """Return the rows of B and C that all heads share, behind so many parts as wide as all heads."""
    def rows(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
        r = model.recurrent
        yield tensor, places * r.heads * r.value_size, 2 * r.key_size

    return rows


def by_head(tensor: str) -> Rows:
    """Return the numbers of all heads."""
    return lambda model: iter([(tensor, 0, model.recurrent.heads)])


def rows_of(of: str) -> dict[str, Rows]:
    """Return the rows of a recurrence's parameters; ``of``: the module that has it."""
    return {
        "attention.packed.weight": projected(of), "attention.shared.weight": shared(f"{of}.in_proj.weight", 2),
        **{f"attention.convolution.{kind}": convolved(of, kind) for kind in ("weight", "bias")},
        **{f"attention.shared_convolution.{kind}": shared(f"{of}.conv1d.{kind}", 1) for kind in ("weight", "bias")},
        "attention.decay": by_head(f"{of}.A_log"), "attention.skip": by_head(f"{of}.D"),
        "attention.step_bias": by_head(f"{of}.dt_bias"),
    }


def modules_of(of: str) -> dict[str, dict[str, str | tuple[str, ...]]]:
    """Return the modules of a recurrence whose rows are in our order."""
    return {MIXER: {"attention.output": f"{of}.out_proj", "attention.norm": f"{of}.norm"}}


CONVOLUTIONS = ("conv1d.weight",)
NAMES = Names(
    prefix="backbone.", outside={"embedding.word": "embeddings", "final_norm": "norm_f"}, head="lm_head.weight",
    layer="layers.{}.", inside={"norm1": "norm"}, mixers=modules_of("mixer"), rows=rows_of("mixer"),
    convolutions=CONVOLUTIONS,
)


FAMILY = Family(
    name="mamba2", architecture="Mamba2ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
