"""Our adapters beside PEFT's: which module has which rows and columns of ours, and its ``adapter_config.json``.

Where a family keeps a fused matrix that has several adapters here (GPT-2's ``c_attn``: three), PEFT has one module for
all. Its A is ours one below the other, its B has ours in the rows and columns of each, its rank and alpha are theirs
times their number: the same product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_port.core.config.fine_tuning import FineTuningConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families import family_named
from megatron_port.ext.weights.adapter_reader import adapters_by_weight
from megatron_port.ext.weights.adapter_spec import AdapterSpec, Part, parts_of, rows_of
from megatron_port.tools.interop.hf_names import Mapped, hf_mapping
from megatron_port.tools.interop.hf_runs import Run

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


@dataclass(frozen=True)
class RowRun:
    """``count`` rows of a part from ``ours`` on are the module's rows from ``theirs`` on, and the linear's from
    ``whole`` on."""

    part: Part
    ours: int
    theirs: int
    count: int
    whole: int


@dataclass(frozen=True)
class PeftModule:
    """One of PEFT's adapted modules."""

    name: str
    """In the model there, e.g. ``model.layers.0.self_attn.q_proj``."""
    inside: str
    """Its end that is the same in every layer, e.g. ``self_attn.q_proj``."""
    weight: str
    """Canonical name of our linear's weight."""
    layer: str
    spec: AdapterSpec
    rows: int
    runs: tuple[RowRun, ...]
    """Runs of all parts in it, with an adapter or without."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Adapted parts that are in it, in our order."""
        inside = {run.part for run in self.runs}
        return tuple(part for part in self.spec.adapted if part in inside)

    def name_of(self, part: Part, kind: str) -> str:
        """Return the canonical name of a part's matrix."""
        return f"{self.layer}.{self.spec.name_of(part, kind)}"


def peft_modules(model: ModelConfig, tuning: FineTuningConfig, family: str) -> Iterator[PeftModule]:
    """Yield PEFT's modules for the adapters of a model, in our order."""
    mapping, names = hf_mapping(model, family), family_named(family).names
    for weight, (layer, spec) in adapters_by_weight(model, tuning).items():
        before = names.prefix + names.layer.format(layer.removeprefix("layers."))
        for tensor, runs in _by_tensor(mapping[weight]).items():
            name = tensor.removesuffix(".weight")
            found = PeftModule(
                name, name.removeprefix(before), weight, layer, spec, sum(r.count for r in runs),
                tuple(_row_runs(spec, runs)),
            )
            if found.parts:
                yield found


def _by_tensor(mapped: Mapped) -> dict[str, list[Run]]:
    out: dict[str, list[Run]] = {}
    for run in mapped.runs:
        out.setdefault(run.tensor, []).append(run)
    return out


def _row_runs(spec: AdapterSpec, runs: list[Run]) -> Iterator[RowRun]:
    for run in runs:
        for part in parts_of(spec.linear):
            for whole, ours, count in rows_of(spec.linear, part):
                start, stop = max(run.ours, whole), min(run.ours + run.count, whole + count)
                if start < stop:
                    yield RowRun(part, ours + start - whole, run.theirs + start - run.ours, stop - start, start)


def alpha_of(tuning: FineTuningConfig, parts: int) -> float:
    """Return PEFT's alpha of a module with so many adapters of ours, whose rank is that many times ours."""
    return tuning.alpha * (math.sqrt(parts) if tuning.rslora else parts)


def peft_config(modules: list[PeftModule], model: ModelConfig, tuning: FineTuningConfig, family: str) -> dict[str, Any]:
    """Return the fields of ``adapter_config.json`` that say what the adapters are; PEFT has defaults for the others."""
    fused = {m.inside: len(m.parts) for m in modules if len(m.parts) > 1}
    transposed = family_named(family).names.transposed
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
        "r": tuning.rank, "lora_alpha": tuning.alpha, "lora_dropout": tuning.dropout, "bias": "none",
        "use_rslora": tuning.rslora, "use_dora": tuning.method == "dora", "fan_in_fan_out": bool(transposed),
        "target_modules": sorted({m.inside for m in modules}),
        "rank_pattern": {name: tuning.rank * parts for name, parts in fused.items()},
        "alpha_pattern": {name: alpha_of(tuning, parts) for name, parts in fused.items()},
    }
