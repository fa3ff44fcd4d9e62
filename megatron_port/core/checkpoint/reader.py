"""Loading: any slice of any tensor, whatever layout wrote it, with nothing trusted unverified.

A read fetches only the byte ranges that overlap the slice, straight into where the caller wants them, and returns after
the blocks around them were verified (``storage.ranged``). What is damaged is named: the file, the block, and the
tensors in it.
"""

from __future__ import annotations

import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from megatron_port.core.checkpoint.format import DTYPES, FileEntry, Manifest, PieceEntry, read_manifest, step_of
from megatron_port.core.checkpoint.slices import Slice, strides
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint
from megatron_port.core.io.files import kind_of, open_regular
from megatron_port.core.io.logging import Advance, silent
from megatron_port.core.registry import PARTS

_OPEN_FILES = 32
_SPAN = 1 << 24
"""Bytes fetched at a time where a slice is not contiguous in the file."""


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a committed checkpoint directory: its manifest is checked, and the size of every file.

    Raises:
        CheckpointError: not a checkpoint, of another schema, incomplete or damaged.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; expected a checkpoint such as .../step-00000120")
    manifest = read_manifest(directory)
    named = step_of(directory.name)
    if named is not None and named != manifest.state.step:
        raise DamagedCheckpoint(
            f"{directory}: its manifest is of step {manifest.state.step}: files of two checkpoints were mixed"
        )
    checkpoint = Checkpoint(directory, manifest)
    for name, entry in manifest.files.items():
        fault = _file_fault(directory / name, entry.size)
        if fault:
            raise DamagedCheckpoint(f"{directory / name}: {fault}; it held {checkpoint.contents(name)}")
    return checkpoint


def _file_fault(path: Path, size: int) -> str:
    """Return why this cannot be the regular file of ``size`` bytes that was saved; empty: it may be."""
    try:
        found = path.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISREG(found.st_mode):
        return f"it is {kind_of(found.st_mode)}, not a regular file"
    return "" if found.st_size == size else f"{found.st_size} bytes, the manifest says {size}"


def checkpoints_in(
    directory: Path | str, note: Callable[[str], None] | None = None
) -> list[tuple[Path, Manifest]]:
    """Return a folder's complete checkpoints, newest first (``Manifest.order``). Broken ones are noted and skipped.

    Manifests and file sizes are checked, contents are not (see :meth:`Checkpoint.verify`).
    """
    found: list[tuple[Path, Manifest]] = []
    folder = Path(directory)
    if not folder.is_dir():
        return []
    try:
        paths = list(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from error
    for path in paths:
        if step_of(path.name) is None or not path.is_dir():
            continue
        try:
            manifest = open_checkpoint(path).manifest
        except CheckpointError as error:
            if note is not None:
                note(f"passing over {path.name}: {error}")
            continue
        found.append((path, manifest))
    return sorted(found, key=lambda f: f[1].order, reverse=True)


def find_latest(directory: Path | str, note: Callable[[str], None] | None = None) -> Path | None:
    """Return the complete checkpoint committed last, or None. ``latest`` is not read: it is only a hint for people."""
    found = checkpoints_in(directory, note)
    return found[0][0] if found else None


def some_of(names: list[str], shown: int = 4) -> str:
    """Return the first few of a list, and how many more."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more if names else "no tensor"


class VerifiedFile(Protocol):
    """A data file of a checkpoint, of which every byte that is used was hashed."""

    def place(self, key: str) -> tuple[str, int, int] | None:
        """Return (dtype code, first byte, last byte + 1) of a stored tensor, from the file's header; None: absent."""

    def read_into(self, start: int, out: memoryview, /) -> None:
        """Fill ``out`` with the bytes from ``start``. Raises DamagedCheckpoint."""

    def faults(self, advance: Advance = silent) -> Iterator[str]:
        """Read and hash everything anew; yield what is wrong. ``advance``: bytes read, all."""

    def close(self) -> None:
        """Close the file descriptor."""


class Checkpoint:
    """An open checkpoint; made by :func:`open_checkpoint`. ``read`` is an engine's ``StateReader``."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._pieces: dict[tuple[str, str], list[PieceEntry]] = {}
        for piece in manifest.pieces:
            self._pieces.setdefault((piece.name, piece.kind), []).append(piece)
        self._by_file: dict[str, list[PieceEntry]] = {}
        for piece in manifest.pieces:
            self._by_file.setdefault(piece.file, []).append(piece)
        self._files: dict[str, VerifiedFile] = {}
        self._open: OrderedDict[str, None] = OrderedDict()

    @cached_property
    def _verified(self) -> Callable[[Path, FileEntry, Callable[[int, int], str]], VerifiedFile]:
        """Opener of the checkpoint's files, which hashes what it reads."""
        made: Callable[[Path, FileEntry, Callable[[int, int], str]], VerifiedFile]
        made = PARTS.function("verified files")()
        return made

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
        """Yield the parameters that have this kind, in the order of the manifest."""
        return (name for name, k in self._pieces if k == kind)

    def kinds(self) -> tuple[str, ...]:
        """Return all kinds in the checkpoint, sorted."""
        return tuple(sorted({kind for _, kind in self._pieces}))

    def shape(self, name: str, kind: str = "weight") -> tuple[int, ...]:
        """Return the global logical shape. Raises CheckpointError if it is not in the checkpoint."""
        return self._find(name, kind)[0].global_shape

    def dtype(self, name: str, kind: str = "weight") -> torch.dtype:
        """Return the dtype that was saved. Raises CheckpointError if it is not in the checkpoint."""
        found: torch.dtype = getattr(torch, self._find(name, kind)[0].dtype)
        return found

    def read(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the slice ``offset + shape`` of a tensor, on the CPU, of shape ``shape`` and the dtype that was saved.

        ``out``: a contiguous CPU tensor of that shape and dtype is filled and returned, without a copy in between;
        any other is left alone. After an error its content is undefined: some of it may be what was damaged.

        Raises:
            DamagedCheckpoint: a file is damaged or cannot be read; file, block and tensors are named.
            CheckpointError: no such tensor, or the slice does not fit its shape (both are named).
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
        wanted = Slice(offset, tuple(o + n for o, n in zip(offset, shape)))
        dtype = self.dtype(name, kind)
        if out is None or not (
            out.device.type == "cpu" and out.dtype == dtype and tuple(out.shape) == shape and out.is_contiguous()
        ):
            out = torch.empty(shape, dtype=dtype)
        if out.numel():
            place = out.detach()
            low, high = (wanted.low[0], wanted.high[0]) if shape else (0, 1)
            try:
                for piece in pieces:
                    # Most of a tensor's pieces, where it has many, are far off along its first dimension.
                    if not shape or (piece.offset[0] < high and piece.offset[0] + piece.shape[0] > low):
                        self._copy(piece, wanted, place)
            except DamagedCheckpoint as error:
                raise DamagedCheckpoint(f"{error}; found while reading {kind} of {name}") from error
        return out

    def faults(self, advance: Advance = silent) -> Iterator[str]:
        """Read every byte of every file; yield a text for each block that is not what was saved.

        ``advance`` is called with the bytes that were read.
        """
        total, before = sum(entry.size for entry in self.manifest.files.values()), 0
        for name, entry in self.manifest.files.items():
            file = self._file(name)
            clean = True
            for fault in file.faults(lambda done, _, before=before: advance(before + done, total)):  # type: ignore[misc]
                clean = False
                yield fault
            before += entry.size
            advance(before, total)
            try:
                for piece in self._by_file.get(name, ()) if clean else ():
                    self._place(piece)
            except DamagedCheckpoint as error:
                yield str(error)

    def verify(self) -> None:
        """Read every byte of every file. Raises DamagedCheckpoint at the first fault."""
        for fault in self.faults():
            raise DamagedCheckpoint(fault)

    def close(self) -> None:
        """Close the files."""
        for name in self._open:
            self._files[name].close()
        self._open.clear()

    def contents(self, file: str, start: int = 0, stop: int | None = None) -> str:
        """Return the tensors in a byte range of a file, for messages: the first few, and how many more."""
        return some_of([name for name, _, _, _ in self._layout(file, start, stop)])

    def suspects(self, file: str, start: int, stop: int) -> str:
        """Return which tensors of a damaged byte range are damaged, as far as can be told; for messages."""
        inside = self._layout(file, start, stop)
        found = []
        try:
            with open(open_regular(self.path / file), "rb") as stream:
                for name, a, z, digest in inside:
                    if digest:
                        stream.seek(a)
                        if xxhash.xxh3_128_hexdigest(stream.read(z - a)) != digest:
                            found.append(name)
        except OSError:
            found = []
        # Small tensors are known by their own hash. If they are right, it is a large one, or the header.
        return some_of(found or [name for name, _, _, digest in inside if not digest])

    def _layout(self, file: str, start: int = 0, stop: int | None = None) -> list[tuple[str, int, int, str]]:
        """Return (name, first byte, last byte + 1, hash) of the header and pieces in a byte range, by the manifest."""
        mine = self._by_file.get(file, [])
        # The writer's order without holes; after the header, whose length is what remains.
        at = max(self.manifest.files[file].size - sum(p.numel * DTYPES[p.dtype][1] for p in mine), 0)
        out = [("the header (all tensors)", 0, at, "")]
        for piece in mine:
            end = at + piece.numel * DTYPES[piece.dtype][1]
            out.append((f"{piece.kind} of {piece.name}", at, end, piece.hash))
            at = end
        return [o for o in out if o[2] > start and (stop is None or o[1] < stop)]

    def _find(self, name: str, kind: str) -> list[PieceEntry]:
        pieces = self._pieces.get((name, kind))
        if pieces is None:
            have = sorted(k for n, k in self._pieces if n == name)
            hint = f"it has {', '.join(have)} of that name" if have else "it has nothing of that name"
            raise CheckpointError(f"{self.path}: no {kind} of {name}: {hint}; the checkpoint is of another model")
        return pieces

    def _copy(self, piece: PieceEntry, wanted: Slice, out: torch.Tensor) -> None:
        """Copy what ``piece`` has of ``wanted`` into ``out`` (of wanted's shape)."""
        if not all(o < z and a < o + n for o, n, a, z in zip(piece.offset, piece.shape, wanted.low, wanted.high)):
            return
        steps = strides(piece.shape)
        for part in piece.slices():
            common = part.intersect(wanted)
            if common is not None:
                target = out[tuple(slice(a - w, b - w) for a, b, w in zip(common.low, common.high, wanted.low))]
                first = sum((lo - o) * s for lo, o, s in zip(common.low, piece.offset, steps))
                self._fill(piece, first - piece.flat_start, steps, target)

    def _fill(self, piece: PieceEntry, first: int, steps: tuple[int, ...], target: torch.Tensor) -> None:
        """Fill ``target`` from a stored tensor's elements at ``first + i · steps``, in parts of bounded size."""
        extent = tuple(target.shape)
        span = 1 + sum((n - 1) * s for n, s in zip(extent, steps))
        if span == target.numel() and target.is_contiguous():
            self._fetch(piece, first, target)
            return
        d = next((d for d, n in enumerate(extent) if n > 1), 0)
        rows = max(1, _SPAN // (steps[d] * target.element_size()))
        if rows >= extent[d] or span * target.element_size() <= _SPAN:
            data = torch.empty(span, dtype=target.dtype)
            self._fetch(piece, first, data)
            target.copy_(data.as_strided(extent, steps))
            return
        for row in range(0, extent[d], rows):
            self._fill(piece, first + row * steps[d], steps, target.narrow(d, row, min(rows, extent[d] - row)))

    def _fetch(self, piece: PieceEntry, first: int, target: torch.Tensor) -> None:
        """Read elements of a stored tensor from ``first`` on into a contiguous ``target``."""
        start = self._place(piece) + first * target.element_size()
        view = target.view(-1).as_strided((target.numel(),), (1,)).view(torch.uint8)
        self._file(piece.file).read_into(start, view.numpy().data)

    def _place(self, piece: PieceEntry) -> int:
        """Return the first byte of a piece, from the file's header, which must agree with the manifest."""
        place = self._file(piece.file).place(piece.key)
        code, width = DTYPES[piece.dtype]
        if place is None or place[0] != code or place[2] - place[1] != piece.numel * width:
            found = "is not in it" if place is None else f"is {place[2] - place[1]} bytes of {place[0]} in it"
            raise DamagedCheckpoint(
                f"{self.path / piece.file}: {piece.key} {found}, the manifest says {piece.numel * width} of {code}"
            )
        return place[1]

    def _file(self, name: str) -> VerifiedFile:
        """Return the file, with at most _OPEN_FILES descriptors in use."""
        if name not in self._files:
            self._files[name] = self._verified(
                self.path / name, self.manifest.files[name], lambda start, stop: self.suspects(name, start, stop)
            )
        self._open[name] = None
        self._open.move_to_end(name)
        if len(self._open) > _OPEN_FILES:
            self._files[self._open.popitem(last=False)[0]].close()
        return self._files[name]
