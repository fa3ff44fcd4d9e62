"""Loading: any box of any tensor, whatever layout wrote it, with nothing trusted unverified.

A read touches only the byte ranges that overlap the box. A file is hashed whole
before the first read from it in a process; after that its mapping is trusted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_port.checkpoint.boxes import Box, strides
from megatron_port.checkpoint.format import DTYPES, Manifest, PieceEntry, hash_file, read_manifest, step_of
from megatron_port.errors import CheckpointError

_OPEN_FILES = 32


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a committed checkpoint directory: its manifest is checked, and the size of every file.

    Raises:
        CheckpointError: not a checkpoint, of another schema, incomplete or damaged.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; expected a checkpoint such as .../step-00000120")
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{directory / name}: {error.strerror or error}; the checkpoint is damaged") from None
        if size != entry.size:
            raise CheckpointError(
                f"{directory / name}: {size} bytes, the manifest says {entry.size}; the checkpoint is damaged"
            )
    return Checkpoint(directory, manifest)


def checkpoints_in(
    directory: Path | str, note: Callable[[str], None] | None = None
) -> list[tuple[Path, Manifest]]:
    """Whole checkpoints of a folder, newest commit first. Broken ones are passed over with a note.

    Manifests and file sizes are checked, contents are not (see :meth:`Checkpoint.verify`).
    """
    found: list[tuple[float, int, Path, Manifest]] = []
    folder = Path(directory)
    if not folder.is_dir():
        return []
    for path in folder.iterdir():
        step = step_of(path.name)
        if step is None or not path.is_dir():
            continue
        try:
            manifest = open_checkpoint(path).manifest
        except CheckpointError as error:
            if note is not None:
                note(f"passing over {path.name}: {error}")
            continue
        found.append((manifest.saved_at, step, path, manifest))
    found.sort(key=lambda f: (f[0], f[1]), reverse=True)
    return [(path, manifest) for _, _, path, manifest in found]


def find_latest(directory: Path | str, note: Callable[[str], None] | None = None) -> Path | None:
    """The checkpoint committed last that is whole, or None. ``latest`` is not read: it is only a hint for people."""
    found = checkpoints_in(directory, note)
    return found[0][0] if found else None


class Checkpoint:
    """An open checkpoint; made by :func:`open_checkpoint`. ``read`` is an engine's ``StateReader``."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._pieces: dict[tuple[str, str], list[PieceEntry]] = {}
        for piece in manifest.pieces:
            self._pieces.setdefault((piece.name, piece.kind), []).append(piece)
        self._verified: set[str] = set()
        self._open: OrderedDict[str, Any] = OrderedDict()

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.manifest.state.step

    @property
    def scalars(self) -> dict[str, float | int]:
        """The engine's scalar state."""
        return dict(self.manifest.state.scalars)

    @property
    def extra(self) -> dict[str, Any]:
        """The extra state given at the save."""
        return dict(self.manifest.state.extra)

    def names(self, kind: str = "weight") -> Iterator[str]:
        """Parameters that have this kind, in the order of the manifest."""
        return (name for name, k in self._pieces if k == kind)

    def kinds(self) -> tuple[str, ...]:
        """All kinds in the checkpoint, sorted."""
        return tuple(sorted({kind for _, kind in self._pieces}))

    def shape(self, name: str, kind: str = "weight") -> tuple[int, ...]:
        """Global logical shape. Raises CheckpointError if it is not in the checkpoint."""
        return self._find(name, kind)[0].global_shape

    def read(self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The box ``offset + shape`` of a tensor, on the CPU, of shape ``shape`` and the dtype that was saved.

        Raises:
            CheckpointError: no such tensor, the box does not fit its shape (both are named), or a file is damaged.
        """
        pieces = self._find(name, kind)
        whole = pieces[0].global_shape
        offset, shape = tuple(offset), tuple(shape)
        fits = len(offset) == len(shape) == len(whole) and all(
            min(o, n) >= 0 and o + n <= g for o, n, g in zip(offset, shape, whole)
        )
        if not fits:
            raise CheckpointError(
                f"{self.path}: {kind} of {name} has shape {whole}; the model asks for {shape} at {offset}: "
                "the checkpoint is of another model"
            )
        wanted = Box(offset, tuple(o + n for o, n in zip(offset, shape)))
        out = torch.empty(shape, dtype=getattr(torch, pieces[0].dtype))
        if out.numel():
            for piece in pieces:
                self._copy(piece, wanted, out)
        return out

    def verify(self) -> None:
        """Hash every file. Raises CheckpointError at the first that is damaged."""
        for name in self.manifest.files:
            self._verified.discard(name)
            self._check_hash(name)

    def close(self) -> None:
        """Unmap the files."""
        self._open.clear()

    def _find(self, name: str, kind: str) -> list[PieceEntry]:
        pieces = self._pieces.get((name, kind))
        if pieces is None:
            have = sorted(k for n, k in self._pieces if n == name)
            hint = f"it has {', '.join(have)} of that name" if have else "it has nothing of that name"
            raise CheckpointError(f"{self.path}: no {kind} of {name}: {hint}; the checkpoint is of another model")
        return pieces

    def _copy(self, piece: PieceEntry, wanted: Box, out: torch.Tensor) -> None:
        """Copy what ``piece`` has of ``wanted`` into ``out`` (of wanted's shape)."""
        steps = strides(piece.shape)
        for box in piece.flat_range().boxes():
            common = box.intersect(wanted)
            if common is None:
                continue
            # The common box's first and last elements, in the flattening of the piece's box.
            first = sum((lo - o) * s for lo, o, s in zip(common.low, piece.offset, steps))
            last = sum((hi - 1 - o) * s for hi, o, s in zip(common.high, piece.offset, steps))
            data = self._load(piece, first - piece.flat_start, last + 1 - piece.flat_start)
            target = out[tuple(slice(a - w, b - w) for a, b, w in zip(common.low, common.high, wanted.low))]
            target.copy_(data.as_strided(common.shape, steps))

    def _load(self, piece: PieceEntry, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of a piece's stored tensor."""
        try:
            part = self._handle(piece.file).get_slice(piece.key)
            if part.get_shape() != [piece.numel] or part.get_dtype() != DTYPES[piece.dtype][0]:
                raise CheckpointError(
                    f"{self.path / piece.file}: {piece.key} is {part.get_dtype()} {part.get_shape()}, the manifest "
                    f"says {DTYPES[piece.dtype][0]} [{piece.numel}]; the checkpoint is damaged"
                )
            data: torch.Tensor = part[start:stop]
            return data
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{self.path / piece.file}: cannot read {piece.key}: {error}") from error

    def _handle(self, name: str) -> Any:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        self._check_hash(name)
        handle = safe_open(self.path / name, framework="pt", device="cpu")
        self._open[name] = handle
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return handle

    def _check_hash(self, name: str) -> None:
        if name in self._verified:
            return
        path, entry = self.path / name, self.manifest.files[name]
        try:
            digest = hash_file(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        if digest != entry.hash:
            raise CheckpointError(
                f"{path}: its content does not match its hash ({digest}, expected {entry.hash}); "
                "the checkpoint is damaged: use another (`checkpoint ls` lists them)"
            )
        self._verified.add(name)
