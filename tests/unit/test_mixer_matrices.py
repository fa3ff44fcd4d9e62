"""Which rows of a mixer's projection are a matrix of their own to rules that take whole matrices (Muon)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.shapes import model_records
from megatron_port.ext.mixers.recurrent_spec import Norm, RecurrentSpec, Rows
from megatron_port.ext.rules.matrices import MUON, shapes_of

SIZES: dict[str, Any] = {"heads": 4, "key_size": 6, "value_size": 5}
DELTA = ({"queries"}, {"keys"}, {"values"}, {"result"}, {"rate"}, {"decay"})
GROUPED = ({"values", "result"}, {"keys"}, {"queries"}, {"result"}, {"values", "decay"})
CASES = {
    "gated_delta": ({"key_heads": 2}, DELTA), "mamba2": ({"key_heads": 2}, GROUPED),
    "kda": ({}, ({"queries"}, {"keys"}, {"values"}, {"rate"})), "short_conv": ({}, ({"result"},) * 3),
}
"""What changes with each part of a unit's rows, in turn."""
SHARED = {
    "mamba2": (GROUPED[:1] + GROUPED[3:], ({"keys"}, {"queries"})),
    "kda": (CASES["kda"][1], ({"decay"}, {"result"})),
}
"""The same of mixers whose units share rows, and of those."""


def _spec(mixer: str, **sizes: Any) -> RecurrentSpec:
    sizes = {name: value for name, value in {**SIZES, **sizes}.items() if mixer != "short_conv" or name == "heads"}
    if mixer == "kda":
        sizes.pop("key_heads", None)
    model = ModelConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=53, seq_length=8, mixer=mixer,
        recurrent=RecurrentConfig(**sizes),
    )
    spec = model_spec(model).layers[0].mixer
    assert isinstance(spec, RecurrentSpec)
    record = model_records(model)["layers.0.attention.packed.weight"]
    assert MUON.takes(record) and record.row_runs == spec.packed.row_runs
    assert sum(rows for rows, _ in shapes_of(record)) == spec.packed.outputs == spec.units * sum(record.row_runs)
    return spec


def _computed(spec: RecurrentSpec, packed: torch.Tensor, shared: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """What the recurrence takes and what becomes of a result, of rows that no convolution mixes."""
    convolved, plain = spec.inputs(packed.unflatten(-1, (spec.units, -1)), torch.float64)
    rows = Rows(convolved, plain, shared)
    own = {name: torch.full(p.shape, 0.3, dtype=torch.float64) for name, p in spec.own.items()}
    operands = spec.operands(rows, own)
    norm: Norm = lambda x, weight, over_ranks=False: x * weight  # noqa: E731
    mixed = None if operands is None else torch.ones(*packed.shape[:2], spec.heads, spec.value_size).double()
    found: dict[str, torch.Tensor | None] = {"result": spec.result(mixed, rows, own, norm)}
    return found if operands is None else {**found, **{
        name: getattr(operands, name) for name in ("queries", "keys", "values", "decay", "rate")
    }}


def _changed(spec: RecurrentSpec, part: int, shared: bool) -> set[str]:
    """The names of what changes with one part of the rows."""
    linear = spec.shared if shared else spec.packed
    assert linear is not None
    runs, generator = linear.row_runs, torch.Generator().manual_seed(part)
    sizes = spec.packed.outputs, spec.shared_rows
    given = [torch.rand(3, 2, rows, generator=generator).double() + 0.5 for rows in sizes]
    before = _computed(spec, *given)
    turns = given[shared].unflatten(-1, (-1, sum(runs)))
    turns[..., sum(runs[:part]) : sum(runs[: part + 1])] += 1.0
    after = _computed(spec, *given)
    return {name for name, x in after.items() if x is not None and not torch.equal(x, before[name])}  # type: ignore[arg-type]


@pytest.mark.parametrize("mixer", CASES)
def test_each_part_of_a_projection_is_a_matrix(mixer: str) -> None:
    sizes, parts = CASES[mixer]
    spec = _spec(mixer, **sizes)
    assert [_changed(spec, i, False) for i in range(len(spec.packed.row_runs))] == list(parts)


@pytest.mark.parametrize("mixer", SHARED)
def test_so_is_each_part_of_what_units_share(mixer: str) -> None:
    spec, (packed, shared) = _spec(mixer, key_heads=1), SHARED[mixer]
    assert spec.shared is not None
    assert [_changed(spec, i, False) for i in range(len(spec.packed.row_runs))] == list(packed)
    assert [_changed(spec, i, True) for i in range(len(spec.shared.row_runs))] == list(shared)
