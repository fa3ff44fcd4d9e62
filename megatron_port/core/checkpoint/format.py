"""Layout of a checkpoint on disk, and the strict parser of its manifest.

::

    step-00000120/
        manifest.json            what is in here; written last
        rank-00000.safetensors   1-D tensors, one file for each rank that saved something
        rank-00003.safetensors
    latest                       the name of the newest one: a hint, never trusted

A directory is a checkpoint if its manifest parses, the manifest's own hash is
right, the pieces tile every tensor, and every file has the size that is listed.
Each file is listed with the xxh3-128 of its content and of each of its blocks:
who reads a slice verifies the blocks it is in, and no others. Version 1 had no
block hashes; it is still read, and its files are verified whole.
Pieces are ranges of *logical* tensors: vocabulary padding and the layout are not
in the format. No pickle. Torch is not needed to read a manifest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from megatron_port.core.checkpoint.slices import FlatRange, cover_fault, stacked
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint
from megatron_port.core.io.files import open_regular
from megatron_port.core.registry import FORMER_NAMES

# What a manifest may hold beside its files and pieces: one table of fields and their types.
#
# A manifest's hash finds damage, not a writer with other ideas, so nothing is used before its type and range are known:
# a count is an integer that fits 63 bits, a number is finite, a text is short. Fields that the table does not know are
# left alone. To add one, add a line here; unless ``_REQUIRED`` names it, manifests without it are still read.

MAX_COUNT = 1 << 63
MAX_TEXT = 4096
MAX_DEPTH = 32
_LAST_SECOND = 1e11
"""Clock time in the year 5138, in seconds: still a date for every C library."""

_Type = tuple[Callable[[Any], bool], str]


def is_count(value: Any) -> bool:
    """An integer from 0 to 2^63 - 1 (``True`` is none)."""
    return type(value) is int and 0 <= value < MAX_COUNT


def is_number(value: Any) -> bool:
    """Finite, and convertible to a float."""
    return type(value) in (int, float) and abs(value) < 1e308


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _is_word(value: Any) -> bool:
    return _is_text(value) and value.isprintable()


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


COUNT: _Type = (is_count, "an integer from 0 to 2^63 - 1")
INTEGER: _Type = ((lambda x: type(x) is int and abs(x) < MAX_COUNT), "an integer of less than 64 bits")
NUMBER: _Type = (is_number, "a finite number")
POSITIVE: _Type = ((lambda x: is_number(x) and x > 0), "a finite number above 0")
SECONDS: _Type = ((lambda x: is_number(x) and 0 <= x < _LAST_SECOND), "seconds since 1970")
WORD: _Type = (_is_word, f"a text of at most {MAX_TEXT} printable characters")
NAME: _Type = (lambda x: _is_word(x) and len(x) <= 256, "a text of at most 256 printable characters")
TEXT: _Type = (_is_text, f"a text of at most {MAX_TEXT} characters")
TEXT_OR_NULL: _Type = (lambda x: x is None or _is_text(x), f"null or a text of at most {MAX_TEXT} characters")
TABLE: _Type = (lambda x: isinstance(x, dict), "an object")
TABLES: _Type = (_list_of(lambda x: isinstance(x, dict)), "a list of objects")
NUMBERS: _Type = (_list_of(is_number), "a list of finite numbers")
COUNTS: _Type = (_list_of(is_count), "a list of integers from 0 to 2^63 - 1")
WORDS: _Type = (_list_of(_is_word), f"a list of texts of at most {MAX_TEXT} printable characters")
SPANS: _Type = (
    _list_of(lambda x: isinstance(x, list) and len(x) == 2 and all(map(is_count, x))), "a list of [first, count]",
)

FIELDS: dict[str, _Type] = {
    "step": COUNT, "samples": COUNT, "tokens": COUNT, "saved_at": SECONDS,
    "versions": TABLE, "versions.*": TEXT,
    "layout": TABLE,
    "layout.tensor_parallel_size": COUNT, "layout.pipeline_parallel_size": COUNT,
    "layout.virtual_pipeline_size": COUNT, "layout.data_parallel_size": COUNT, "layout.zero_stage": COUNT,
    "config": TABLE,
    "config.model": TABLE, "config.layout": TABLE, "config.batch": TABLE, "config.precision": TABLE,
    "config.optimizer": TABLE, "config.data": TABLE, "config.engine": WORD, "config.precision.dtype": WORD,
    "scalars": TABLE, "scalars.*": NUMBER,
    "scalars.optimizer_steps": COUNT, "scalars.loss_scale": POSITIVE, "scalars.loss_scale_good_steps": COUNT,
    "scalars.loss_scale_hysteresis_left": INTEGER, "scalars.skipped_in_a_row": COUNT,
    "extra": TABLE,
    "extra.skipped_total": COUNT, "extra.tokenizer": TEXT_OR_NULL, "extra.imported_from": TEXT,
    "extra.compressed": TABLE,
    "extra.base": TABLE, "extra.base.fingerprint": WORD, "extra.base.path": TEXT,
    "extra.teacher": TABLE, "extra.teacher.fingerprint": WORD, "extra.teacher.path": TEXT,
    "extra.numerics": TABLE, "extra.numerics.losses": NUMBERS, "extra.numerics.grad_norms": NUMBERS,
    "extra.numerics.anomaly_steps": COUNTS, "extra.numerics.anomalies_total": COUNT,
    "extra.numerics.first_loss": NUMBER,
    "extra.numerics.left_out": SPANS,
    # Version 2.
    "rng": TABLE, "data": TABLE, "data.corpora": TABLES, "schedule": TABLE, "config_hash": WORD,
    "tokenizer": TABLE, "tokenizer.name": TEXT, "tokenizer.hash": TEXT, "tokenizer.eod_id": NUMBER,
    "kinds": TABLE, "kinds.*": WORDS,
    # Version 3, where there are any.
    "shapes": TABLE, "shapes.*": TABLE, "shapes.*.*": COUNTS,
    # Which run wrote it, and after which commit of that run.
    "lineage": TABLE, "lineage.run": NAME, "lineage.commit": COUNT, "lineage.epoch": COUNT, "lineage.attempt": NAME,
    "lineage.parent": TABLE, "lineage.parent.run": NAME, "lineage.parent.commit": COUNT, "lineage.parent.step": COUNT,
}
"""Dotted path → type. ``*`` stands for every key of an object."""

_REQUIRED = {
    1: ("step", "samples", "tokens", "saved_at", "layout", "config", "scalars", "extra", "versions"),
    2: ("rng", "data", "schedule", "config_hash", "tokenizer"),
}
"""Version → fields that it brought and that all its manifests have."""


def field_fault(body: Mapping[str, Any], version: int) -> str | None:
    """Return the fault of a manifest's fields other than ``files`` and ``pieces``, or None."""
    for since, names in _REQUIRED.items():
        for name in names:
            if since <= version and name not in body:
                return f"it has no {name}"
    for path, (test, expected) in FIELDS.items():
        for name, value in _at(body, path.split("."), ""):
            if not test(value):
                return f"{name} is {shown(value)}; expected {expected}"
    for name, value in body.items():
        if name not in ("files", "pieces"):
            fault = _value_fault(value, name, MAX_DEPTH)
            if fault:
                return fault
    return None


def shown(value: Any) -> str:
    """A value of a manifest for a message: short, whatever it is."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):  # an integer of more digits than Python prints, or nested without end
        return f"a {type(value).__name__} too long to print"


def _at(table: Mapping[str, Any], path: list[str], before: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of what is at a path; nothing where it is absent."""
    first, *rest = path
    for key in table if first == "*" else (first,) if first in table else ():
        name, value = f"{before}{key}", table[key]
        if not rest:
            yield name, value
        elif isinstance(value, dict):
            yield from _at(value, rest, f"{name}.")


def _value_fault(value: Any, where: str, depth: int) -> str | None:
    """Numbers that are none, and nesting that nothing of ours has."""
    if isinstance(value, float) and not is_number(value):
        return f"{where} is {value}; expected a finite number"
    if isinstance(value, (dict, list)):
        if not depth:
            return f"{where[:200]} is nested more than {MAX_DEPTH} deep"
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            fault = _value_fault(inner, f"{where}.{key}"[:300], depth - 1)
            if fault:
                return fault
    return None


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: dataclasses and mappings become dicts, tuples lists.

    Raises:
        CheckpointError: something in it is not a JSON value; the message names where it is.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return _plain(value, "")


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value - value == 0.0:
        return float(value)
    raise CheckpointError(
        f"{where.lstrip('.') or 'value'} is {value!r:.80} ({type(value).__name__}); a manifest holds only finite "
        "numbers, strings, booleans, lists and dicts: convert it before saving"
    )


# Which run a checkpoint is of, and its place in the order of a folder's commits.

@dataclass(frozen=True, kw_only=True)
class Parent:
    """Checkpoint that a checkpoint's training had begun at, or last saved."""

    run: str = ""
    commit: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Origin of a checkpoint. All is empty in those of versions that did not record it."""

    run: str = ""
    """Id of the run."""
    commit: int = 0
    """Its place in the order of the folder's commits, from 1; 0: unknown."""
    epoch: int = 0
    """Epoch of the attempt's lease; of two commits with the same number the later epoch is the newer."""
    attempt: str = ""
    parent: Parent | None = None

    def body(self) -> dict[str, Any]:
        """Return the lineage as the manifest has it."""
        out: dict[str, Any] = {
            "run": self.run, "commit": self.commit, "epoch": self.epoch, "attempt": self.attempt,
        }
        return out | ({"parent": dict(vars(self.parent))} if self.parent is not None else {})


def parse_lineage(body: Mapping[str, Any]) -> Lineage:
    """Return the ``lineage`` of a manifest whose fields were checked (``schema``); older ones have none of them."""
    def known(cls: type[Lineage] | type[Parent], values: Mapping[str, Any]) -> dict[str, Any]:
        return {f.name: values[f.name] for f in fields(cls) if f.name in values}

    found = known(Lineage, body)
    if "parent" in found:
        found["parent"] = Parent(**known(Parent, found["parent"]))
    return Lineage(**found)


def order(lineage: Lineage, step: int) -> tuple[int, int, int]:
    """Return a sort key: what was committed later is larger. Those without a number come before all others, by step."""
    return lineage.commit, lineage.epoch, step


SCHEMA = "megatron_port.core.checkpoint"
VERSION = 2
"""Version of a manifest whose tensors are floating-point and have their parameters' shapes."""
SHAPED_VERSION = 3
"""Version of one with other shapes, listed in ``shapes``, or with integer tensors."""
READABLE = (1, 2, 3)
MAX_BLOCK = 1 << 26
MANIFEST = "manifest.json"
LATEST = "latest"
REPLACED = ".old"
DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "uint8": ("U8", 1),
    "int8": ("I8", 1),
}
"""Name in the manifest → (safetensors code, bytes per element)."""

MAX_HEADER = 100_000_000
"""Bytes of a data file's header; the safetensors library has the same limit."""

_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")
_STEP = re.compile(r"step-([0-9]{8,18})(?:\.old)?")
_HASH = re.compile(r"[0-9a-f]{32}")
_MAX_MANIFEST = 1 << 31
_MAX_DIMS = 8


@dataclass(frozen=True)
class PieceEntry(FlatRange):
    """Where one piece of one tensor lies: element range ``flat_start + numel`` of a box, under ``key`` in ``file``."""

    name: str
    kind: str
    global_shape: tuple[int, ...]
    dtype: str
    file: str
    key: str
    hash: str = ""
    """xxh3-128 of its bytes if they are fewer than a block, to tell tensors of a damaged block apart; else empty."""

    @property
    def label(self) -> str:
        """The file."""
        return self.file


@dataclass(frozen=True)
class FileEntry:
    """A data file: bytes, and xxh3-128 (32 hex digits) of its whole content and of each block of ``block_bytes``.

    Block i is the bytes from ``i * block_bytes``. Version 1: no blocks, ``block_bytes`` is 0.
    """

    size: int
    hash: str
    block_bytes: int = 0
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """Everything of a checkpoint that is not a tensor; equal on all ranks, rank 0's copy is written.

    All but the counters hold JSON values (dataclasses and tuples are converted). Version 1 had nothing after ``extra``.
    """

    step: int
    """Optimizer steps done."""
    samples: int
    """Samples consumed in training."""
    tokens: int
    """Tokens consumed in training."""
    layout: Any
    config: Any
    scalars: Mapping[str, float | int]
    extra: Mapping[str, Any]
    rng: Mapping[str, Any] = field(default_factory=dict)
    """Seed and counters that key all random draws; no generator has hidden state."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Where the next sample comes from: corpora, order, index of the next sample."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Batch size and learning rate of the next step, and the horizon of the decay."""
    config_hash: str = ""
    """Hash of what determines training (``run.config_hash``)."""
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """Name, vocabulary size and hash of the tokenizer that made the ids; empty for synthetic ones."""
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Canonical name → kinds of its tensors, where they differ from name to name; empty: all names have the same."""
    shapes: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    """Canonical name → kind → logical shape of the tensors that have another shape than their parameter."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The parsed ``manifest.json``."""

    state: SavedState
    saved_at: float
    """Seconds since 1970 at the commit, by the clock of rank 0's node; for people."""
    versions: Mapping[str, str]
    files: Mapping[str, FileEntry]
    pieces: tuple[PieceEntry, ...]
    lineage: Lineage = field(default_factory=Lineage)
    """The run, and the place in the order of commits."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: larger is newer."""
        return order(self.lineage, self.state.step)


def directory_name(step: int) -> str:
    """``step-00000120``."""
    return f"step-{step:08d}"


def shard_name(rank: int) -> str:
    """``rank-00003.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def step_of(name: str) -> int | None:
    """The step of a committed directory's name; None if it is not one."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def encode_manifest(manifest: Manifest) -> str:
    """The text of ``manifest.json``; :func:`decode_manifest` reads it back."""
    state = manifest.state
    integers = any(piece.dtype in ("uint8", "int8") for piece in manifest.pieces)
    body = {
        "schema": SCHEMA,
        "version": SHAPED_VERSION if state.shapes or integers else VERSION,
        "step": state.step,
        "samples": state.samples,
        "tokens": state.tokens,
        "saved_at": manifest.saved_at,
        "lineage": manifest.lineage.body(),
        "layout": plain(state.layout),
        "config": plain(state.config),
        "scalars": plain(state.scalars),
        "extra": plain(state.extra),
        "rng": plain(state.rng),
        "data": plain(state.data),
        "schedule": plain(state.schedule),
        "config_hash": state.config_hash,
        "tokenizer": plain(state.tokenizer),
        "versions": dict(manifest.versions),
        "files": {name: vars(entry) for name, entry in manifest.files.items()},
        # vars, not asdict: that copies deeply and takes ten times as long; there may be 10^5 pieces.
        "pieces": [vars(piece) for piece in manifest.pieces],
    }
    if state.kinds:  # absent otherwise: manifests of one set of kinds are as they were before there were several
        body["kinds"] = plain(state.kinds)
    if state.shapes:
        body["shapes"] = plain(state.shapes)
    text = _canonical(body)
    return f'{{"hash":"{xxhash.xxh3_128_hexdigest(text.encode())}",\n"manifest":{text}}}\n'


def read_manifest(directory: Path) -> Manifest:
    """Parse and check ``directory/manifest.json`` (not the data files).

    Raises:
        CheckpointError: missing, damaged, of another schema, or its pieces do not tile the tensors.
    """
    path = directory / MANIFEST
    try:
        with open(open_regular(path), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > _MAX_MANIFEST:
                raise DamagedCheckpoint(f"{path}: {size} bytes; a manifest has at most {_MAX_MANIFEST}")
            raw = stream.read(4096)
            if raw.lstrip()[:1] != b"{":  # before gigabytes of anything are read
                raise DamagedCheckpoint(f"{path}: damaged: not JSON; use another checkpoint")
            raw += stream.read(size)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{directory} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read: {error.strerror or error}") from error
    return decode_manifest(raw, str(path))


def decode_manifest(raw: bytes, where: str = MANIFEST) -> Manifest:
    """Parse the bytes of a manifest; ``where`` names it in messages. Raises CheckpointError."""
    try:
        outer = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: damaged: not JSON ({error}); use another checkpoint") from None
    if not isinstance(outer, dict) or not isinstance(outer.get("manifest"), dict):
        raise DamagedCheckpoint(f"{where}: damaged or not a manifest: no object called \"manifest\"")
    body, digest = outer["manifest"], outer.get("hash")
    try:
        # As it was written, the text is its own canonical form; one that was laid out anew is brought into it.
        as_written = raw.startswith(f'{{"hash":"{digest}",\n"manifest":{{'.encode()) and raw.endswith(b"}}\n")
        text = raw[raw.index(b"\n") + len('\n"manifest":') : -2] if as_written else b""
        if xxhash.xxh3_128_hexdigest(text) != digest:
            text = _canonical(body).encode()
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: damaged: {error}") from None
    if xxhash.xxh3_128_hexdigest(text) != digest:
        raise DamagedCheckpoint(f"{where}: damaged: its content does not match its hash; use another checkpoint")
    version = body.get("version")
    if body.get("schema") != SCHEMA or isinstance(version, bool) or version not in READABLE:
        raise CheckpointError(
            f"{where}: schema {body.get('schema')!r:.60} version {version!r:.60}; "
            f"this program reads {SCHEMA!r} versions {', '.join(map(str, READABLE))}"
        )
    return _Parser(where, version).manifest(body)


def check_cover(pieces: tuple[PieceEntry, ...], where: str) -> None:
    """Each (name, kind) is tiled exactly once, with one global shape and dtype. Raises DamagedCheckpoint."""
    groups: dict[tuple[str, str], list[PieceEntry]] = {}
    for piece in pieces:
        groups.setdefault((piece.name, piece.kind), []).append(piece)
    for (name, kind), members in groups.items():
        first = members[0]
        for other in members:
            if (other.global_shape, other.dtype) != (first.global_shape, first.dtype):
                raise DamagedCheckpoint(
                    f"{where}: {kind} of {name} is {first.dtype} {first.global_shape} in {first.file} "
                    f"but {other.dtype} {other.global_shape} in {other.file}"
                )
        if stacked(members, first.global_shape):
            continue
        fault = cover_fault(members, first.global_shape)
        if fault:
            raise DamagedCheckpoint(f"{where}: {kind} of {name} {first.global_shape}: {fault}")


class _Parser:
    """Takes nothing on trust: every field's type and range is checked before use."""

    def __init__(self, where: str, version: int = VERSION) -> None:
        self.where, self.version = where, version

    def fail(self, what: str) -> CheckpointError:
        return DamagedCheckpoint(f"{self.where}: {what}")

    # ``what`` and ``of`` are joined in the message only: there may be 10^5 pieces.
    def count(self, value: Any, what: str, of: str = "") -> int:
        if not is_count(value):
            raise self.fail(f"{what}{of} is {shown(value)}; expected an integer from 0 to 2^63 - 1")
        return int(value)

    def text(self, value: Any, what: str, of: str = "") -> str:
        if not isinstance(value, str) or not value or len(value) > MAX_TEXT or not value.isprintable():
            raise self.fail(f"{what}{of} is {shown(value)}; expected a name of printable characters")
        return value

    def mapping(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(f"{what} is {shown(value)}; expected an object")
        return value

    def dims(self, value: Any, what: str, of: str) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > _MAX_DIMS:
            raise self.fail(f"{what}{of} is {shown(value)}; expected a list of at most {_MAX_DIMS} sizes")
        for v in value:
            if type(v) is not int or not 0 <= v < MAX_COUNT:
                self.count(v, what, of)  # says what is wrong; called for none that is right
        return tuple(value)

    def file_name(self, value: Any) -> str:
        # Nothing but a shard's own name: no path can lead out of the directory.
        if not isinstance(value, str) or not _FILE.fullmatch(value):
            raise self.fail(f"file name {value!r:.120} is not allowed; expected rank-NNNNN.safetensors")
        return value

    def file_entry(self, name: str, value: Any) -> FileEntry:
        entry = self.mapping(value, f"file {name}")
        size = self.count(entry.get("size"), f"size of {name}")
        digest = self.digest(entry.get("hash"), f"hash of {name}")
        if self.version == 1:
            return FileEntry(size, digest)
        width = self.count(entry.get("block_bytes"), f"block_bytes of {name}")
        if not 1 <= width <= MAX_BLOCK:
            raise self.fail(f"block_bytes of {name} is {width}; expected 1 to {MAX_BLOCK}")
        blocks = entry.get("blocks")
        if not isinstance(blocks, list) or len(blocks) != -(-size // width):
            raise self.fail(f"{name} has {size} bytes, which are {-(-size // width)} blocks; not as many are listed")
        of = f" of {name}"
        return FileEntry(size, digest, width, tuple([self.digest(b, "a block's hash", of) for b in blocks]))

    def digest(self, value: Any, what: str, of: str = "") -> str:
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            raise self.fail(f"{what}{of} is {shown(value)}; expected 32 hex digits")
        return value

    def piece(self, value: Any, files: Mapping[str, FileEntry]) -> PieceEntry:
        entry = self.mapping(value, "a piece")
        name = self.text(entry.get("name"), "a piece's name")
        of = f" of {name}"
        file = entry.get("file")
        if not isinstance(file, str) or file not in files:
            raise self.fail(f"{name} lies in {self.file_name(file)}, which is not among the files")
        piece = PieceEntry(
            name=name,
            kind=self.text(entry.get("kind"), "kind", of),
            global_shape=self.dims(entry.get("global_shape"), "global_shape", of),
            dtype=self.text(entry.get("dtype"), "dtype", of),
            offset=self.dims(entry.get("offset"), "offset", of),
            shape=self.dims(entry.get("shape"), "shape", of),
            flat_start=self.count(entry.get("flat_start"), "flat_start", of),
            numel=self.count(entry.get("numel"), "numel", of),
            file=file,
            key=self.text(entry.get("key"), "key", of),
            hash=self.digest(entry["hash"], "hash", of) if entry.get("hash") else "",
        )
        if piece.dtype not in DTYPES:
            raise self.fail(f"dtype of {name} is {piece.dtype!r}; expected one of {', '.join(DTYPES)}")
        nbytes = piece.numel * DTYPES[piece.dtype][1]
        if nbytes > files[file].size:
            raise self.fail(f"{name} needs {nbytes} bytes of {file}, which has {files[file].size}")
        if prod(piece.global_shape) >= MAX_COUNT:
            raise self.fail(f"{name} has {prod(piece.global_shape)} elements, more than 2^63 - 1")
        return piece

    def manifest(self, body: dict[str, Any]) -> Manifest:
        fault = field_fault(body, self.version)
        if fault:
            raise self.fail(fault)
        files = {
            self.file_name(name): self.file_entry(name, value)
            for name, value in self.mapping(body.get("files"), "files").items()
        }
        listed = body.get("pieces")
        if not isinstance(listed, list):
            raise self.fail("pieces is not a list")
        pieces = tuple([self.piece(value, files) for value in listed])
        self.check_files(files, pieces)
        check_cover(pieces, self.where)
        kinds: dict[str, list[str]] = body.get("kinds", {})
        shapes = {name: {k: tuple(s) for k, s in each.items()} for name, each in body.get("shapes", {}).items()}
        self.check_kinds(pieces, kinds, shapes)
        names = ("step", "samples", "tokens", "layout", "config", "scalars", "extra")
        later = ("rng", "data", "schedule", "config_hash", "tokenizer")
        state = SavedState(
            kinds=kinds, shapes=shapes, **{name: body[name] for name in (*names, *(later if self.version > 1 else ()))}
        )
        return with_present_names(Manifest(
            state=state, saved_at=float(body["saved_at"]), versions=body["versions"], files=files, pieces=pieces,
            lineage=parse_lineage(body.get("lineage", {})),
        ))

    def check_files(self, files: Mapping[str, FileEntry], pieces: tuple[PieceEntry, ...]) -> None:
        """A file is its header and its pieces, without holes: so no size is believed that the pieces do not explain."""
        held = dict.fromkeys(files, 0)
        keys = set()
        for piece in pieces:
            held[piece.file] += piece.numel * DTYPES[piece.dtype][1]
            keys.add((piece.file, piece.key))
        if len(keys) != len(pieces):
            raise self.fail(f"{len(pieces)} pieces share {len(keys)} stored tensors")
        for name, entry in files.items():
            if not 8 <= entry.size - held[name] <= 8 + MAX_HEADER:
                raise self.fail(f"{name} has {entry.size} bytes, its tensors {held[name]}: the rest is no header")

    def check_kinds(
        self, pieces: tuple[PieceEntry, ...], declared: Mapping[str, Sequence[str]],
        reshaped: Mapping[str, Mapping[str, tuple[int, ...]]],
    ) -> None:
        """Every name has the kinds that it should, of one shape but for what says otherwise: optimizer state is not
        lost for some."""
        fault = kinds_fault(pieces, declared)
        if fault:
            raise self.fail(fault)
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in pieces:
            said = reshaped.get(piece.name, {}).get(piece.kind)
            expected = shapes.setdefault(piece.name, piece.global_shape) if said is None else said
            if expected != piece.global_shape:
                both = f"{expected} and {piece.global_shape}"
                raise self.fail(f"the shapes of {piece.name} differ from kind to kind: {both}"[:500])


def with_present_names(manifest: Manifest) -> Manifest:
    """Return the manifest with parameters' present names, where a feature's former ones differ (``FORMER_NAMES``)."""
    config, prefixes = manifest.state.config, dict[str, str]()
    for setting in FORMER_NAMES.names:
        table, _, key = setting.partition(".")
        section = config.get(table) if isinstance(config, dict) else None
        if isinstance(section, dict) and section.get(key):
            prefixes |= FORMER_NAMES.function(setting)(config)
    if not prefixes:
        return manifest

    def now(name: str) -> str:
        return next((new + name[len(old):] for old, new in prefixes.items() if name.startswith(old)), name)

    state = replace(
        manifest.state, kinds={now(name): kinds for name, kinds in manifest.state.kinds.items()},
        shapes={now(name): shapes for name, shapes in manifest.state.shapes.items()},
    )
    return replace(manifest, state=state, pieces=tuple(replace(p, name=now(p.name)) for p in manifest.pieces))


def kinds_fault(pieces: Iterable[PieceEntry], declared: Mapping[str, Sequence[str]]) -> str | None:
    """Return which tensor is missing or not expected, or None.

    Args:
        declared: ``SavedState.kinds``; empty: every name has the kinds that the others have.
    """
    found: dict[str, set[str]] = {}
    for piece in pieces:
        found.setdefault(piece.name, set()).add(piece.kind)
    if not declared:
        every = set().union(*found.values())
        for name, have in found.items():
            if have != every:
                return f"{name} lacks {', '.join(sorted(every - have))}, which others have"
        return None
    for name in (*declared, *found):
        have, want = found.get(name, set()), set(declared.get(name, ()))
        if have != want:
            parts = [("lacks", want - have), ("has, and should not,", have - want)]
            return f"{name} " + " and ".join(f"{verb} {', '.join(sorted(kinds))}" for verb, kinds in parts if kinds)
    return None
