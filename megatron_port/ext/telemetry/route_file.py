"""Routes of tokens on disk: which experts each token of each layer was sent to. docs/moe.md has the format.

A folder of routes holds ``routes.json``, which model and data they are of, and files of steps: each is what one rank
computed in some steps in a row, in the safetensors format, one tensor [layers, samples, positions, k] per step. Where
in the model and in the batch its rows belong is stated beside them, so that a reader under any layout finds its own.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_port.core.dist.rank import LeaseLost
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.io.files import atomic_file, open_regular, read_regular, write_text
from megatron_port.core.io.typed_json import LARGEST, Natural, parse_json, typed

FOLDER = "routes"
"""Name of the folder within a run's."""
IDENTITY = "routes.json"
SCHEMA = 1
HEADER_BYTES = 1 << 28
Experts = NDArray[Any]
"""Of the unsigned type that holds the number of experts."""
_NAME = re.compile(r"steps-(\d{8,})-(\d{8,})\.rank-(\d{5,})\.safetensors")
_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("<u1"), "U16": np.dtype("<u2"), "U32": np.dtype("<u4")}


@dataclass(frozen=True)
class RouteIdentity:
    """Model and data that routes belong to; a run replays those that agree in all of it."""

    num_experts: Natural
    top_k: Natural
    layers: tuple[int, ...]
    """Numbers of the layers with experts."""
    seq_length: Natural
    seed: int
    """Samples of a step follow from it."""
    drops: bool = False
    """Whether a token may lose an expert that it chose: that number on disk is higher by ``num_experts``."""
    corpora: tuple[tuple[str, int], ...] = ()
    """(hash or name, tokens) of each training corpus."""

    @property
    def numbers(self) -> int:
        """Numbers on disk are below this."""
        return self.num_experts * (2 if self.drops else 1)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the numbers of experts on disk."""
        return _DTYPES["U8" if self.numbers <= 1 << 8 else "U16" if self.numbers <= 1 << 16 else "U32"]


Runs = tuple[tuple[Natural, Natural], ...]
"""Positions, as (start, length), in the order of the rows."""


@dataclass(frozen=True)
class RankRoutes:
    """Routes of one step that one rank computed."""

    step: int
    """As in metrics.jsonl: 1 is the first."""
    samples: tuple[int, ...]
    """Their numbers, counted from the start of training."""
    experts: Experts
    """[layers, samples, positions, k]: as :class:`RouteIdentity` says."""
    runs: tuple[Runs, ...] = ()
    """The positions of each sample, where they are not its share's."""


@dataclass(frozen=True)
class Share:
    """Part of the model and of every sample that a rank computes routes of."""

    layers: tuple[int, ...]
    runs: Runs
    """Its positions."""

    @property
    def rows(self) -> int:
        """Number of positions."""
        return sum(length for _, length in self.runs)


def write_identity(folder: Path, identity: RouteIdentity) -> None:
    """Write ``routes.json``. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / IDENTITY, json.dumps({"schema": SCHEMA, **asdict(identity)}, indent=1) + "\n")


def remove_steps_after(folder: Path, step: int) -> None:
    """Remove the files of later steps, which will be run again. Files end where a run saves, so that none holds both
    earlier and later ones than a step that a run resumes from. Raises OSError."""
    for first, _, path in _files(folder):
        if first > step:
            path.unlink(missing_ok=True)


def write_steps(
    folder: Path, rank: int, steps: Sequence[RankRoutes], share: Share, guard: Callable[[], None] | None = None
) -> Path:
    """Write a rank's routes of steps in a row as one file, whole or not at all. Raises OSError, and what guard does."""
    header: dict[str, Any] = {"__metadata__": {"layers": json.dumps(share.layers), "runs": json.dumps(share.runs)}}
    offset = 0
    for one in steps:
        size, key = one.experts.nbytes, str(one.step)
        header["__metadata__"][f"samples.{key}"] = json.dumps(one.samples)
        if one.runs:
            header["__metadata__"][f"runs.{key}"] = json.dumps(one.runs)
        header["__metadata__"][f"crc32.{key}"] = str(zlib.crc32(np.ascontiguousarray(one.experts).data))
        name = next(n for n, dtype in _DTYPES.items() if dtype == one.experts.dtype)
        header[key] = {"dtype": name, "shape": list(one.experts.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = folder / f"steps-{steps[0].step:08d}-{steps[-1].step:08d}.rank-{rank:05d}.safetensors"
    with atomic_file(path, guard=guard) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for one in steps:
            stream.write(np.ascontiguousarray(one.experts).data)
    return path


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (first step, last step, path) of each file of steps."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(m[1]), int(m[2]), path) for m, path in found if m)


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


@dataclass(frozen=True)
class _Metadata:
    __metadata__: dict[str, str]


@dataclass(frozen=True)
class _Samples:
    samples: tuple[int, ...]


@dataclass(frozen=True)
class _Spans:
    spans: tuple[Runs, ...]


@dataclass
class _Header:
    """What a file of steps says of itself."""

    share: Share
    start: int
    """Bytes before the data."""
    tensors: Mapping[str, _Tensor]
    metadata: Mapping[str, str]
    checked: set[int] = field(default_factory=set)
    """Steps whose checksum was right."""

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the numbers of a step's samples. ValueError, KeyError: it has none."""
        return typed(_Samples, {"samples": parse_json(self.metadata[f"samples.{step}"])}).samples

    def shares(self, step: int) -> list[Share]:
        """Return the share of each sample of a step; none where it is that of the file."""
        own = typed(_Spans, {"spans": parse_json(self.metadata.get(f"runs.{step}", "[]"))}).spans
        return [replace(self.share, runs=runs) for runs in own]


class RouteFolder:
    """Reads a folder of routes, whatever layout wrote it.

    Raises:
        ConfigError: there is none, or it is of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            values = parse_json(read_regular(folder / IDENTITY, LARGEST))
            if values.pop("schema") != SCHEMA:
                raise ValueError("another version of the format")
            self.identity = typed(RouteIdentity, values)
            self._files = _files(folder)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"moe.replay {folder}: not a folder of routes ({type(error).__name__}: {error}); give the folder "
                f'"{FOLDER}" of a run with moe.routes = "log"'
            ) from error
        self._headers: dict[Path, _Header] = {}

    def check(self, mine: RouteIdentity, first: int, last: int) -> None:
        """Check that these are routes of this model and data, and of the steps from ``first`` to ``last``.

        Raises:
            ConfigError: names all that differs.
        """
        theirs = self.identity
        differs = [f"{f.name} {getattr(theirs, f.name)} there, {getattr(mine, f.name)} here" for f in fields(mine)
                   if getattr(theirs, f.name) != getattr(mine, f.name)]
        at = first
        for begin, end, _ in self._files:
            if begin <= at <= end:
                at = end + 1
        if at <= last:
            held = f"{self._files[0][0]} to {max(end for _, end, _ in self._files)}" if self._files else "none"
            differs.append(f"step {at} is missing: this run takes steps {first} to {last}, the folder holds {held}")
        if differs:
            raise ConfigError(
                f"moe.replay {self.folder} does not fit this run: {'; '.join(differs)}. Replay the routes of a run "
                "of the same model, data and seed, or leave moe.replay empty"
            )

    def read(self, step: int, samples: Sequence[int], share: Share) -> Experts:
        """Return the routes of a step: [layers, samples, positions, k] of ``share``.

        Raises:
            DataError: some are missing (the first is named), or a file is damaged.
        """
        k = self.identity.top_k
        out = np.zeros((len(share.layers), len(samples), share.rows, k), self.identity.dtype)
        filled = np.zeros(out.shape[:3], bool)
        for first, last, path in self._files:
            if first <= step <= last:
                self._fill(out, filled, path, step, samples, share)
        if not filled.all():
            layer, sample, row = (int(n) for n in np.argwhere(~filled)[0])
            positions = [start + i for start, length in share.runs for i in range(length)]
            raise DataError(
                f"{self.folder} has no route of step {step}, sample {samples[sample]}, layer {share.layers[layer]}, "
                f"position {positions[row]} ({int((~filled).sum())} of {filled.size} are missing): a file is gone, or "
                "the run that wrote it drew other samples; leave moe.replay empty to route anew"
            )
        return out

    def _fill(
        self, out: Experts, filled: NDArray[np.bool_], path: Path, step: int, samples: Sequence[int], share: Share
    ) -> None:
        """Copy what the file has of the routes that are wanted."""
        header = self._header(path)
        try:
            theirs = {sample: i for i, sample in enumerate(header.samples(step))}
            shares = header.shares(step)
            if shares and len(shares) != len(theirs):
                raise ValueError(f"{len(shares)} shares of {len(theirs)} samples in step {step}")
        except (ValueError, KeyError) as error:
            raise _damaged(path, error) from error
        layers = [(i, header.share.layers.index(n)) for i, n in enumerate(share.layers) if n in header.share.layers]
        wanted = [(i, theirs[n]) for i, n in enumerate(samples) if n in theirs]
        alike = dict[Share, list[tuple[int, int]]]()
        for pair in wanted:
            alike.setdefault(header.share if not shares else shares[pair[1]], []).append(pair)
        for held, pairs in alike.items():
            rows = _common_rows(share, held)
            if not (layers and rows):
                continue
            data = self._tensor(path, header, step)
            to_sample, from_sample = ([pair[i] for pair in pairs] for i in (0, 1))
            for to_layer, from_layer in layers:
                for to_row, from_row, count in rows:
                    part = data[from_layer, from_sample, from_row:from_row + count]
                    out[to_layer, to_sample, to_row:to_row + count] = part
                    filled[to_layer, to_sample, to_row:to_row + count] = True

    def _header(self, path: Path) -> _Header:
        if path not in self._headers:
            try:
                with open(open_regular(path, follow=True), "rb") as stream:
                    size = int.from_bytes(stream.read(8), "little")
                    values = parse_json(stream.read(min(size, HEADER_BYTES)))
                metadata = typed(_Metadata, values).__metadata__
                share = typed(Share, {name: parse_json(metadata[name]) for name in ("layers", "runs")})
                tensors = {k: typed(_Tensor, v) for k, v in values.items() if k != "__metadata__"}
                self._headers[path] = _Header(share, 8 + size, tensors, metadata)
            except (OSError, ValueError, KeyError) as error:
                raise _damaged(path, error) from error
        return self._headers[path]

    def _tensor(self, path: Path, header: _Header, step: int) -> Experts:
        """Return a step's tensor, mapped; its checksum is verified once. Raises DataError."""
        try:
            entry = header.tensors[str(step)]
            shape, (begin, _) = entry.shape, entry.data_offsets
            want = (len(header.share.layers), len(header.samples(step)), header.share.rows, self.identity.top_k)
            if shape != want or _DTYPES[entry.dtype] != self.identity.dtype:
                raise ValueError(f"shape {shape} where {want} is expected")
            data: Experts = np.memmap(path, self.identity.dtype, "r", header.start + begin, shape)
            if step not in header.checked and zlib.crc32(data.data) != int(header.metadata[f"crc32.{step}"]):
                raise ValueError(f"the checksum of step {step} differs")
            if data.size and int(data.max()) >= self.identity.numbers:
                raise ValueError(f"number {int(data.max())} with {self.identity.num_experts} experts in step {step}")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _damaged(path, error) from error
        header.checked.add(step)
        return data


def _common_rows(mine: Share, theirs: Share) -> list[tuple[int, int, int]]:
    """Return the positions that both have, as (row of mine, row of theirs, count)."""
    out, row = [], 0
    for start, length in mine.runs:
        other = 0
        for begin, count in theirs.runs:
            low, high = max(start, begin), min(start + length, begin + count)
            if low < high:
                out.append((row + low - start, other + low - begin, high - low))
            other += count
        row += length
    return out


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged ({type(error).__name__}: {error}); log the routes again, or leave moe.replay "
                     "empty")


# Writes a rank's routes in the background: a step costs the training loop an append.

FILE_BYTES = 1 << 26
"""A file ends with the step in which it gets so large, and where the run saves."""
WAITING = 8
"""Steps that wait for the writer at most; then training waits for it."""
FLUSH_S = 120.0


@dataclass(frozen=True)
class _Flush:
    """Asks for all that came before it to be on disk; ``done`` is set then."""

    done: threading.Event


class RouteWriter:
    """Takes steps in order. What the disk refuses is lost, with a warning, and training continues.

    Args:
        share: of this rank.
        guard: called before a file gets its name; LeaseLost: nothing is written any more.
        warn: takes a line.
    """

    def __init__(
        self, folder: Path, rank: int, share: Share, *, guard: Callable[[], None], warn: Callable[[str], None]
    ) -> None:
        self._folder, self._rank, self._share, self._guard, self._warn = folder, rank, share, guard, warn
        self._items: queue.Queue[Callable[[], RankRoutes] | _Flush | None] = queue.Queue(WAITING)
        self._held: list[RankRoutes] = []
        self._off = False
        self._thread = threading.Thread(target=self._run, name="routes", daemon=True)
        self._thread.start()

    def put(self, step: Callable[[], RankRoutes]) -> None:
        """Take a step; ``step`` gives its routes, on the writer's thread, once the device has delivered them."""
        self._items.put(step)

    def flush(self) -> None:
        """Wait until all steps so far are on disk, or are given up."""
        done = threading.Event()
        self._items.put(_Flush(done))
        if not done.wait(FLUSH_S):
            self._warn(f"{self._folder}: the routes of the last steps were not written within {FLUSH_S:g} s")

    def close(self) -> None:
        """Flush and end; a second call does nothing."""
        if self._thread.is_alive():
            self.flush()
            self._items.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, _Flush):
                self._write()
                item.done.set()
            elif not self._off:
                self._held.append(item())
                if sum(one.experts.nbytes for one in self._held) >= FILE_BYTES:
                    self._write()

    def _write(self) -> None:
        steps, self._held = self._held, []
        if not steps or self._off:
            return
        try:
            write_steps(self._folder, self._rank, steps, self._share, self._guard)
        except LeaseLost:
            self._off = True  # the loop says why, and ends
        except Exception as error:  # no log is worth a run
            self._warn(f"{self._folder}: {error}; the routes of steps {steps[0].step} to {steps[-1].step} are lost, "
                       "training continues")
