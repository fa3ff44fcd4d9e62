"""Which safetensors a Hugging Face folder has, and which tensor is in which of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_port.core.errors import CheckpointError, DamagedCheckpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
_MAX_INDEX = 1 << 28
_SLAB_BYTES = 1 << 26


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Shards:
    """The open safetensors of a folder.

    Raises:
        CheckpointError: there are none, a tensor has no dtype of ours, or two files have it with other values.
        DamagedCheckpoint: a file is cut, or the index contradicts the files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._open: dict[str, Any] = {}
        self.places: dict[str, StoredTensor] = self._scan()

    def slice_of(self, name: str) -> Any:
        """Return safetensors' view of a tensor."""
        return self._file(self.places[name].file).get_slice(name)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same shape and values, read a slab at a time."""
        one, two = self.places[name], self.places[other]
        return one.shape == two.shape and _equal(self.slice_of(name), self.slice_of(other), one.shape)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.path / name
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; {INDEX} names it") from None
            except (SafetensorError, OSError) as error:
                raise DamagedCheckpoint(f"{path}: not a whole safetensors file: {error}") from None
        return self._open[name]

    def _scan(self) -> dict[str, StoredTensor]:
        """Every tensor of every file. A file with all of them comes before an index, as in transformers; an index that
        is used must agree with its files."""
        listed: dict[str, str] = {}
        if (self.path / SINGLE).is_file():
            files = [SINGLE]
            if (self.path / INDEX).is_file():
                self.notes.append(
                    f"{self.path}: {SINGLE} is read, as in transformers; {INDEX} beside it and what it names are not"
                )
        elif (self.path / INDEX).is_file():
            listed = self._index()
            files = sorted(set(listed.values()))
        else:
            raise self._no_weights()
        found: dict[str, StoredTensor] = {}
        for file in files:
            handle = self._file(file)
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                place = self._place(handle, name, file)
                if name in found:
                    self._one_of(name, found[name], place)
                    place = found[name] if listed.get(name) == found[name].file else place
                found[name] = place
        for name, file in listed.items():
            if name not in found or found[name].file != file:
                raise DamagedCheckpoint(f"{self.path / INDEX}: {name} should be in {file}, and is not")
        return found

    def _place(self, handle: Any, name: str, file: str) -> StoredTensor:
        data = handle.get_slice(name)
        code = data.get_dtype()
        if code not in DTYPES:
            raise CheckpointError(
                f"{self.path / file}: {name} is {code}; only {', '.join(DTYPES)} can be imported: convert it"
            )
        return StoredTensor(file, DTYPES[code], tuple(data.get_shape()))

    def _one_of(self, name: str, one: StoredTensor, two: StoredTensor) -> None:
        """Raise CheckpointError where two files have a tensor, and not the same one."""
        a, b = (self._file(place.file).get_slice(name) for place in (one, two))
        if one.shape != two.shape or one.dtype != two.dtype or not _equal(a, b, one.shape):
            raise CheckpointError(
                f"{self.path}: {name} is in {one.file} and, with other values, in {two.file}; remove one of them"
            )

    def _index(self) -> dict[str, str]:
        path = self.path / INDEX
        try:
            if path.stat().st_size > _MAX_INDEX:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes; an index has at most {_MAX_INDEX}")
            table = json.loads(path.read_bytes())["weight_map"]
            if not isinstance(table, dict) or not table:
                raise ValueError("weight_map is not a table of names")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path}: damaged: {type(error).__name__}: {error}") from None
        for file in table.values():
            if not isinstance(file, str) or not _FILE.fullmatch(file):
                raise CheckpointError(f"{path}: file name {file!r:.120} is not allowed; expected NAME.safetensors")
        return table

    def _no_weights(self) -> CheckpointError:
        pickles = sorted(p.name for p in self.path.glob("*.bin"))
        if not pickles:
            return CheckpointError(f"{self.path}: no {SINGLE} and no {INDEX} in it; are the weights there?")
        return CheckpointError(
            f"{self.path}: its weights are pickles ({pickles[0]}), which can run any program when they are read. If "
            "you trust whoever made them, convert them once: python -c \"from transformers import "
            f"AutoModelForCausalLM as M; M.from_pretrained('{self.path}')"
            f".save_pretrained('{self.path}-safetensors')\""
        )


def _equal(one: Any, two: Any, shape: tuple[int, ...]) -> bool:
    """Whether two views of tensors of this shape have the same values."""
    if not shape or 0 in shape:
        return _same_values(one[...], two[...])
    width = 8
    for size in shape[1:]:
        width *= size
    step = max(1, _SLAB_BYTES // width)
    rows = (slice(row, row + step) for row in range(0, shape[0], step))
    return all(_same_values(one[box], two[box]) for box in rows)


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.double(), b.double())
