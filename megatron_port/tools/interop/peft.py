"""Our adapters beside PEFT's: which module has which rows and columns of ours, and its ``adapter_config.json``.

Where a family keeps a fused matrix that has several adapters here (GPT-2's ``c_attn``: three), PEFT has one module for
all. Its A is ours one below the other, its B has ours in the rows and columns of each, its rank and alpha are theirs
times their number: the same product.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.checkpoint.shard import write_text
from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import WEIGHT, StateReader
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.files import read_regular
from megatron_port.core.io.typed_json import LARGEST, parse_json
from megatron_port.ext.families import family_named
from megatron_port.ext.weights.adapter_spec import MAGNITUDE, A, AdapterSpec, B, Part, parts_of, rows_of
from megatron_port.ext.weights.adapters import adapters_by_weight, lengths_of, read_rows
from megatron_port.run.saved_model import model_of, tuning_of
from megatron_port.tools.interop.dcp import building
from megatron_port.tools.interop.hf_config import family_for
from megatron_port.tools.interop.hf_names import Mapped, Run, hf_mapping, layer_there

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
        before = layer_there(model, names, weight)
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


# A PEFT folder as a reader of our adapters, from which a run may start.

_READ = frozenset({"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"})
_INERT = frozenset({
    # Of which modules the adapters are: the tensors show it.
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying",
    # What the file is, how it was trained, how weights are stored.
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "merge_weights", "runtime_config", "megatron_core", "qalora_group_size",
    # Settings of initial values that are known by init_lora_weights.
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",
})
"""Fields that do not change what the adapters of a file compute."""
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the frozen weights as they are."""
_DEFAULT = 8
"""PEFT's rank and alpha."""
_MERGE = (
    "PEFT changes the frozen weights beside such adapters or trains a part of them only, so they are not continued as "
    "W + s B A. Merge them once (PeftModel.from_pretrained(model, FOLDER).merge_and_unload().save_pretrained(OUT)) and "
    "begin from OUT; or save them in PEFT with path_initial_model_for_weight_conversion"
)


class PeftFolder:
    """The adapters of a folder, which must be those that ``tuning`` asks for.

    ``adapters`` has them by canonical name. A fused module's one A is the A of each of the parts that are in it.

    Raises:
        CheckpointError: files are missing or damaged, or the adapters are of another kind, size or set of modules.
    """

    def __init__(self, path: Path | str, model: ModelConfig, tuning: FineTuningConfig) -> None:
        self.path, self._tuning = Path(path), tuning
        try:
            self._config: Mapping[str, Any] = parse_json(read_regular(self.path / CONFIG, LARGEST))
            if not isinstance(self._config, dict):
                raise ValueError("no table of fields")
            self._tensors = load_file(self.path / FILE)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} is no PEFT folder ({CONFIG}, {FILE}): {error}") from None
        self._check_kind()
        self.adapters: dict[str, torch.Tensor] = {}
        for module in peft_modules(model, tuning, family_for(model)):
            self._take(module)
        if self._tensors:
            raise CheckpointError(
                f"{self.path / FILE}: {sorted(self._tensors)[0]} belongs to no adapter of this run "
                f"({len(self._tensors)} such); fine_tuning.targets says which there are"
            )

    def read(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a slice of an adapter's matrix; its optimizer state is zero (``dist.record.StateReader``)."""
        if kind != "weight":
            return torch.zeros(shape)
        return self.adapters[name][tuple(slice(o, o + n) for o, n in zip(offset, shape))]

    def _check_kind(self) -> None:
        config, tuning, where = self._config, self._tuning, self.path / CONFIG
        method = "dora" if config.get("use_dora") else "lora"
        initial, kind = config.get("init_lora_weights"), config.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(f"{where}: peft_type {kind!r:.60} cannot be continued here; only LORA can")
        if initial is not None and initial not in _INITIAL:
            raise CheckpointError(f"{where}: init_lora_weights is {initial!r:.60}. {_MERGE}")
        known = {*_READ, *_INERT, "init_lora_weights"}
        more = {k: v for k, v in sorted(config.items()) if k not in known and v and (k, v) != ("bias", "none")}
        if more:
            found = ", ".join(f"{key} {value!r:.60}" for key, value in more.items())
            raise CheckpointError(
                f"{where}: {found} cannot be continued here: it may make something else than W + s B A of the adapters"
            )
        if method != tuning.method:
            raise CheckpointError(f'{self.path} holds adapters of method "{method}"; set fine_tuning.method to that')

    def _setting(self, module: PeftModule, pattern: str, otherwise: str) -> float:
        """Return a module's own rank or alpha, or that of all, by default PEFT's."""
        table = self._config.get(pattern) or {}
        try:
            own = [value for key, value in table.items() if re.fullmatch(rf"(.*\.)?({key})", module.name)]
            return float(own[0] if own else self._config.get(otherwise, _DEFAULT))
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise CheckpointError(f"{self.path / CONFIG}: {pattern} or {otherwise} is no rule: {error}") from None

    def _take(self, module: PeftModule) -> None:
        tuning, parts = self._tuning, module.parts
        rank = int(self._setting(module, "rank_pattern", "r"))
        alpha = self._setting(module, "alpha_pattern", "lora_alpha")
        apart = len(parts) > 1 and rank == tuning.rank * len(parts)
        wanted = alpha_of(tuning, len(parts)) if apart else tuning.alpha
        if (rank != tuning.rank and not apart) or bool(self._config.get("use_rslora")) != tuning.rslora:
            raise CheckpointError(
                f"{self.path}: {module.name} has rank {rank} (use_rslora {bool(self._config.get('use_rslora'))}), and "
                f"fine_tuning.rank is {tuning.rank}, rslora {tuning.rslora}; set them to the folder's"
            )
        if alpha != wanted:
            raise CheckpointError(
                f"{self.path}: {module.name} has alpha {alpha:g}, and fine_tuning.alpha asks for {wanted:g}; set it to "
                "what is there"
            )
        a = self._tensor(module, "lora_A.weight", rank, module.spec.linear.inputs)
        b = self._tensor(module, "lora_B.weight", module.rows, rank)
        lengths = self._tensor(module, "lora_magnitude_vector", module.rows) if module.spec.with_magnitude else None
        for number, part in enumerate(parts):
            columns = slice(number * tuning.rank, (number + 1) * tuning.rank) if apart else slice(None)
            ours = {A: a[columns], B: torch.zeros(part.rows, tuning.rank), MAGNITUDE: torch.zeros(part.rows)}
            for run in module.runs:
                there, here = slice(run.theirs, run.theirs + run.count), slice(run.ours, run.ours + run.count)
                if run.part == part:
                    ours[B][here] = b[there, columns].float()
                    if lengths is not None:
                        ours[MAGNITUDE][here] = lengths[there].float()
                elif apart and bool(b[there, columns].any()):
                    raise CheckpointError(
                        f"{self.path}: {module.name} has rank {rank}, and its B is not that of {len(parts)} adapters "
                        f"of rank {tuning.rank}; it can be continued with fine_tuning.rank = {rank}"
                    )
            kinds = (A, B, MAGNITUDE) if lengths is not None else (A, B)
            self.adapters |= {module.name_of(part, kind): ours[kind] for kind in kinds}

    def _tensor(self, module: PeftModule, name: str, *shape: int) -> torch.Tensor:
        found = self._tensors.pop(f"{PREFIX}{module.name}.{name}", None)
        if found is None:
            raise CheckpointError(
                f"{self.path / FILE} has no {PREFIX}{module.name}.{name}; fine_tuning.targets asks for it"
            )
        if tuple(found.shape) != shape:
            raise CheckpointError(
                f"{self.path / FILE}: {module.name}.{name} has shape {tuple(found.shape)}; {CONFIG} and the model make "
                f"it {shape}"
            )
        return found


# Export of a checkpoint's adapters as a folder that PEFT loads.

def export_peft(checkpoint: Checkpoint, out: Path, base: Callable[[], StateReader]) -> str:
    """Write the adapters of ``checkpoint`` to the new folder ``out``; return the family that their names are of.

    ``base``: opens the frozen weights, whose row lengths DoRA needs where a fused matrix has rows without adapter.

    Raises:
        CheckpointError: it holds no adapters, no architecture computes the model, or ``out`` exists.
    """
    config, where = checkpoint.manifest.state.config, str(checkpoint.path)
    model, tuning = model_of(config, where), tuning_of(config, where)
    if not tuning.enabled:
        raise CheckpointError(f"{where} holds a whole model and no adapters; export it --to hf")
    family = family_for(model)
    modules = list(peft_modules(model, tuning, family))
    tensors = {
        f"{PREFIX}{module.name}.{name}": tensor
        for module in modules for name, tensor in _tensors(module, checkpoint.read, base).items()
    }
    with building(out, sum(t.nbytes for t in tensors.values())) as part:
        save_file(tensors, part / FILE, metadata={"format": "pt"})
        write_text(part / CONFIG, json.dumps(peft_config(modules, model, tuning, family), indent=2) + "\n")
    return family


def _tensors(module: PeftModule, read: StateReader, base: Callable[[], StateReader]) -> dict[str, torch.Tensor]:
    """Return a module's tensors by their last names."""
    spec, rank = module.spec, module.spec.rank
    a = [read(module.name_of(part, A), WEIGHT, (0, 0), (rank, spec.linear.inputs)) for part in module.parts]
    b = torch.zeros(module.rows, rank * len(module.parts), dtype=a[0].dtype)
    lengths = torch.zeros(module.rows, dtype=a[0].dtype)
    for run in module.runs:
        there = slice(run.theirs, run.theirs + run.count)
        if run.part in module.parts:
            column = module.parts.index(run.part) * rank
            b[there, column : column + rank] = read(
                module.name_of(run.part, B), WEIGHT, (run.ours, 0), (run.count, rank)
            )
        if spec.with_magnitude and run.part in module.parts:
            lengths[there] = read(module.name_of(run.part, MAGNITUDE), WEIGHT, (run.ours,), (run.count,))
        elif spec.with_magnitude:
            lengths[there] = lengths_of(read_rows(base(), module.weight, spec, run.whole, run.count)).float()
    out = {"lora_A.weight": torch.cat(a), "lora_B.weight": b}
    return out | {"lora_magnitude_vector": lengths} if spec.with_magnitude else out
