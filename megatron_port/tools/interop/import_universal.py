"""Import of DeepSpeed Universal checkpoints: ours, and those that ``ds_to_universal`` made of Megatron-DeepSpeed's.

Files are read with ``weights_only=True`` and as memory maps; nothing is unpickled
but tensors and plain values.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.state import BUFFER, StatePiece
from megatron_port.core.errors import CheckpointError
from megatron_port.core.model.shapes import buffer_shapes, parameter_shapes
from megatron_port.tools.interop.commit import Imported, whole
from megatron_port.tools.interop.export_universal import KINDS
from megatron_port.tools.interop.folder import tagged_folder
from megatron_port.tools.interop.names import Foreign, canonical_names, megatron_names
from megatron_port.tools.interop.pickle_size import check_torch_file, first_line
from megatron_port.tools.interop.sidecar import model_of, read_sidecar


def universal_folder(source: Path) -> Path | None:
    """The folder with ``zero/`` in it: ``source`` or what its ``latest_universal`` names; None if there is none."""
    return tagged_folder(source, "latest_universal", lambda folder: (folder / "zero").is_dir())


def read_universal(folder: Path, model: ModelConfig | None = None) -> Imported:
    """Read ``folder/zero/NAME/*.pt``, named as Megatron-DeepSpeed or as we name parameters.

    Raises:
        CheckpointError: files are missing, damaged or hold more than tensors, or tensors do not fit the model.
    """
    sidecar = read_sidecar(folder)
    model = model or model_of(sidecar.config if sidecar else {}, str(folder))
    present = {p.name for p in (folder / "zero").iterdir() if p.is_dir()}
    canonical = sidecar.names == "canonical" if sidecar else set(parameter_shapes(model)) <= present
    table, buffers = canonical_names(model) if canonical else megatron_names(model), buffer_shapes(model)
    extra = sorted(present - {foreign.name for foreign in table.values()})
    if extra:
        raise CheckpointError(f"{folder / 'zero' / extra[0]}: no parameter of the model; give its --model FILE.toml")
    pieces: list[StatePiece] = []
    steps: set[int] = set()
    for ours, foreign in table.items():
        place = folder / "zero" / foreign.name
        if not place.is_dir():
            raise CheckpointError(f"{place} is missing: {ours} of the model has no tensors; give its --model FILE.toml")
        for kind, file in ({BUFFER: "fp32"} if ours in buffers else KINDS).items():
            path = place / f"{file}.pt"
            if path.is_file():
                pieces.append(whole(ours, kind, foreign.record.shape, _tensor(path, foreign)))
        if (place / "step.pt").is_file():
            steps.add(_integer(load_plain(place / "step.pt"), place / "step.pt"))
    if len(steps) > 1:
        raise CheckpointError(f"{folder}: parameters have taken different numbers of steps: {sorted(steps)[:5]}")
    if sidecar is not None:
        return Imported(
            model=model, pieces=pieces, step=sidecar.step, samples=sidecar.samples, tokens=sidecar.tokens,
            scalars=sidecar.scalars, config=sidecar.config, extra=sidecar.extra,
        )
    step, samples = _counters(folder)
    return Imported(model=model, pieces=pieces, step=step, samples=samples,
                    optimizer_steps=steps.pop() if steps else None)


def load_plain(path: Path) -> Any:
    """A ``torch.save`` file of tensors and plain values, mapped. Raises CheckpointError if it is not one."""
    try:
        check_torch_file(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # torch's readers raise many kinds
        why = f"damaged, or it holds objects and not only tensors: {first_line(error)}"
        raise CheckpointError(f"{path}: {why}") from None


def _tensor(path: Path, foreign: Foreign) -> torch.Tensor:
    """The parameter's tensor, row-major as ours, the vocabulary's padding cut off."""
    entry = load_plain(path)
    tensor = entry.get("param") if isinstance(entry, dict) else None
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path}: no tensor called \"param\" in it")
    shape = tuple(tensor.shape)
    if foreign.vocabulary and len(shape) == 2 and shape[0] > foreign.shape[0] and shape[1] == foreign.shape[1]:
        tensor = tensor[: foreign.shape[0]]
        shape = tuple(tensor.shape)
    if shape != foreign.shape and not (len(shape) == 1 and shape[0] == prod(foreign.shape)):
        raise CheckpointError(
            f"{path}: shape {shape}; {foreign.record.name} of the model needs {foreign.shape}; check --model FILE.toml"
        )
    return tensor


def _integer(value: Any, path: Path) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)) or int(value) != value or value < 0:
        raise CheckpointError(f"{path}: {value!r:.80} is no number of steps")
    return int(value)


def _counters(folder: Path) -> tuple[int, int]:
    """Steps and samples from the first ``mp_rank_*`` file that can be read as plain values; (0, 0) without one."""
    for path in sorted(folder.glob("mp_rank_*_model_states.pt")):
        try:
            state = load_plain(path)
        except CheckpointError:
            continue
        if isinstance(state, dict):
            return int(state.get("global_steps") or 0), int(state.get("global_samples") or 0)
    return 0, 0
