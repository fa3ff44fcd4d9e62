"""Measured times of attention's providers on GPUs: ``configs/kernels/attention.json``.

``benchmarks/attention_providers.py`` writes it from a measurement. A row serves the sequences from its own length up to
the next row's of the same GPU, dtype, head size, mask and dropout. Where no row serves, the chosen order is that of
``backend.attention``, and the table of providers names what was missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_port.core.errors import ConfigError
from megatron_port.core.io.typed_json import WrongContent, parse_json, typed
from megatron_port.core.package import shipped_folder

PROVIDERS = ("cudnn", "flash", "efficient", "flash_attn", "fa3")
"""cudnn, flash and efficient are kernels of torch's SDPA; flash_attn and fa3 packages of their own."""


@dataclass(frozen=True)
class AttentionShape:
    """Key of a row: the case that it was measured for."""

    arch: str
    """sm_90, gfx90a"""
    dtype: str
    """bf16 | fp16 | fp32"""
    head_dim: int
    seq: int
    causal: bool = True
    dropout: bool = False

    def __str__(self) -> str:
        parts = [self.arch, self.dtype, f"head size {self.head_dim}", f"{self.seq} tokens"]
        return ", ".join([*parts, *(["causal"] * self.causal), *(["dropout"] * self.dropout)])


@dataclass(frozen=True)
class _Table:
    rows: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class _Times:
    milliseconds: dict[str, float]
    source: str


@dataclass(frozen=True)
class AttentionTimes:
    """One measured row."""

    shape: AttentionShape
    milliseconds: dict[str, float]
    """Provider → forward and backward passes of one call."""
    source: str
    """The file of the measurement."""

    @property
    def order(self) -> list[str]:
        """Providers, fastest first."""
        return sorted(self.milliseconds, key=self.milliseconds.__getitem__)


def arch_of(device: torch.device) -> str:
    """Return the architecture of a GPU that torch can use: sm_90, gfx90a."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def parse(text: str, name: str) -> list[AttentionTimes]:
    """Return the rows of a table's text.

    Raises:
        ConfigError: a row lacks a field, has an unknown one, or names no provider of :data:`PROVIDERS`.
    """
    rows = []
    known = {*AttentionShape.__dataclass_fields__, "milliseconds", "source"}
    try:
        table = typed(_Table, parse_json(text)).rows
    except WrongContent as error:
        raise ConfigError(f"{name}: {error}") from None
    for number, row in enumerate(table):
        where = f"{name}: row {number}"
        try:
            times = typed(_Times, row)
            shape = typed(AttentionShape, row)
        except WrongContent as error:
            raise ConfigError(f"{where}: {error}; it takes AttentionShape's fields, milliseconds, source") from None
        more = sorted(row.keys() - known)
        if more:
            raise ConfigError(f"{where}: unknown {more[0]!r}; it takes AttentionShape's fields, milliseconds, source")
        unknown = sorted(set(times.milliseconds) - set(PROVIDERS))
        if unknown or not times.milliseconds:
            said = ", ".join(unknown) or "nothing"
            raise ConfigError(f"{where}: milliseconds of {said}; it takes {', '.join(PROVIDERS)}")
        rows.append(AttentionTimes(shape, dict(times.milliseconds), times.source))
    return rows


def shipped_table() -> list[AttentionTimes]:
    """Return the rows of the shipped table."""
    path = shipped_folder("configs") / "kernels" / "attention.json"
    return parse(path.read_text(), str(path.name))


def lookup(rows: list[AttentionTimes], wanted: AttentionShape) -> AttentionTimes | None:
    """Return the row that serves a shape: of its kind, the longest sequence that is not longer."""
    kind = [r for r in rows if _kind(r.shape) == _kind(wanted) and r.shape.seq <= wanted.seq]
    return max(kind, key=lambda r: r.shape.seq, default=None)


def _kind(shape: AttentionShape) -> tuple[object, ...]:
    return shape.arch, shape.dtype, shape.head_dim, shape.causal, shape.dropout
