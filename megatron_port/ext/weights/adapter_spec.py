"""Low-rank adapters of a layer's linears, stated as the model's other parts are (``model.spec``). Without torch.

PEFT gives each of transformers' modules an adapter of its own, so a fused matrix here has one for each matrix that lies
in it (:func:`parts_of`), whatever family the model is exported as: A [r, in], B [out, r], under DoRA the lengths [out].
Where the linear's outputs are divided, so are B and the lengths, and A is whole on every rank; where its inputs are, A
is divided. A rank has its part's share of the gradient of what is whole, with sequence parallelism and without. Beside
a linear that is not divided everything is whole, and the gradient that of the rank's tokens. Experts, which are no
linears of every token, have none; the block beside them has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import LayerSpec, LinearSpec, ParameterSpec, Split
from megatron_port.ext.weights.settings import TARGETS

A, B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
"""Last parts of the names of an adapter's parameters."""


@dataclass(frozen=True)
class Part:
    """One matrix that is in a linear's weight."""

    name: str
    """A name from ``config.features.TARGETS``."""
    rows: int
    kv_heads: int = 0
    """The rows are of so many key/value heads; 0: of something that every tensor-parallel rank has its own of."""


def parts_of(linear: LinearSpec) -> tuple[Part, ...]:
    """Return the matrices of a linear in the order of their rows (of one group's rows where it has groups)."""
    g = linear.groups
    if g is not None:
        each = g.groups * g.head_size
        return Part("query", g.heads * g.head_size), Part("key", each, g.groups), Part("value", each, g.groups)
    if linear.packed == 2:
        return Part("gate", linear.outputs), Part("up", linear.outputs)
    return (Part(linear.name.rpartition(".")[2], linear.outputs),)


def rows_of(linear: LinearSpec, part: Part) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of a part as runs (first in the linear's weight with leading dimensions flattened, first in the
    part, how many)."""
    parts = parts_of(linear)
    runs = linear.groups.groups if linear.groups is not None else 1
    each, before = part.rows // runs, sum(p.rows for p in parts[: parts.index(part)]) // runs
    whole = sum(p.rows for p in parts) // runs
    for run in range(runs):
        yield run * whole + before, run * each, each


@dataclass(frozen=True)
class AdapterSpec:
    """The adapters of one linear: those of its parts that are ``adapted``."""

    linear: LinearSpec
    adapted: tuple[Part, ...]
    rank: int
    with_magnitude: bool

    def name_of(self, part: Part, kind: str) -> str:
        """Return the name, relative to the layer, of a part's ``A``, ``B`` or ``MAGNITUDE``."""
        middle = f".{part.name}" if len(parts_of(self.linear)) > 1 else ""
        return f"{self.linear.name}{middle}.{kind}"

    def parameters_of(self, part: Part) -> tuple[ParameterSpec, ...]:
        """A as PEFT draws it (uniform, variance 1 / 3 in), B zero, and the lengths of the rows."""
        column, inputs = self.linear.parallel == "column", self.linear.inputs
        if self.linear.parallel == "none":
            return tuple(replace(p, split=None, gradient="tokens") for p in self._parameters(part, True, inputs))
        return self._parameters(part, column, inputs)

    def _parameters(self, part: Part, column: bool, inputs: int) -> tuple[ParameterSpec, ...]:
        rows = Split(0, kv_heads=part.kv_heads) if column else None
        a = ParameterSpec(
            name=self.name_of(part, A), shape=(self.rank, inputs), init="uniform", std=1 / math.sqrt(3 * inputs),
            decay=True, split=None if column else Split(1), gradient="heads" if column else "whole",
        )
        b = ParameterSpec(
            name=self.name_of(part, B), shape=(part.rows, self.rank), init="zeros", decay=True, split=rows,
            gradient="whole" if column else "heads",
        )
        lengths = replace(b, name=self.name_of(part, MAGNITUDE), shape=(part.rows,), init="row norms", decay=False)
        return (a, b, lengths) if self.with_magnitude else (a, b)

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules."""
        return tuple(p for part in self.adapted for p in self.parameters_of(part))


def adapter_spec(linear: LinearSpec, tuning: FineTuningConfig) -> AdapterSpec | None:
    """Return the adapters of a linear; None: it has none, as routers and the gates of shared blocks."""
    if not tuning.enabled:
        return None
    adapted = tuple(p for p in parts_of(linear) if p.name in (tuning.targets or TARGETS))
    return AdapterSpec(linear, adapted, tuning.rank, tuning.method == "dora") if adapted else None


def layer_adapters(layer: LayerSpec, tuning: FineTuningConfig) -> tuple[AdapterSpec, ...]:
    """Return the adapters of a layer, in the order of its linears."""
    found = (adapter_spec(linear, tuning) for linear in layer.linears)
    return tuple(spec for spec in found if spec is not None)


def adapter_parameters(model: ModelConfig, tuning: FineTuningConfig) -> dict[str, ParameterSpec]:
    """Return the specs of all adapters' parameters by canonical name, in model order."""
    return {
        f"layers.{index}.{p.name}": replace(p, name=f"layers.{index}.{p.name}")
        for index, layer in enumerate(model_spec(model).layers)
        for spec in layer_adapters(layer, tuning) for p in spec.parameters
    }
