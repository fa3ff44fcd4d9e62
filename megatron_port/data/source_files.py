"""Which input files are read, and as what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_port.data.conversations import ChatFields
from megatron_port.errors import DataError

LARGEST_RECORD = 64 << 20
"""Default of ``largest_record``."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COLUMN_SUFFIXES = (".parquet", ".arrow")
PACKED_SUFFIXES = (".gz", ".zst")


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: Path
    kind: str
    """json | text | parquet | arrow"""
    packed: str = ""
    """.gz | .zst | nothing"""


@dataclass(frozen=True)
class ReadOptions:
    """Options on which the meaning of an input depends."""

    key: str = "text"
    """JSON key, or column, of the text."""
    blank_lines: int = 0
    """Plain text: n > 0 starts a document at n blank lines; 0: a file is a document."""
    split: str = "train"
    """Split of a ``datasets`` folder that has several."""
    suffixes: tuple[str, ...] = (".txt",)
    """Plain-text files that are looked for in folders."""
    largest_record: int = LARGEST_RECORD
    """Bytes of a JSON line or of a text in a column."""
    leave_out: bool = False
    """Leave out what is larger, instead of stopping."""
    fields: ChatFields | None = None
    """Records are JSON objects with conversations, where these say; None: they are texts."""


def classify(path: Path, suffixes: Sequence[str] = (".txt",)) -> Source | None:
    """Return what a file is by its name; None: not an input."""
    packed = path.suffix if path.suffix in PACKED_SUFFIXES else ""
    inner = Path(path.stem).suffix if packed else path.suffix
    if inner in JSON_SUFFIXES:
        return Source(path, "json", packed)
    if inner in COLUMN_SUFFIXES and not packed:
        return Source(path, inner[1:])
    return Source(path, "text", packed) if inner in suffixes else None


def find_sources(paths: Sequence[str | Path], options: ReadOptions | None = None) -> list[Source]:
    """Return the files to read, in order: files as given, and all known ones below a directory, sorted by path.

    A folder that ``datasets.save_to_disk`` wrote gives its Arrow files in its own order.

    Raises:
        DataError: a path does not exist or a directory holds no input.
    """
    options = options or ReadOptions()
    found: list[Source] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = _saved_dataset(path, options) or [
                source for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith(".")
                for source in [classify(p, options.suffixes)] if source and p.suffix != ".json"
            ]
            if not inside:
                known = ", ".join([*options.suffixes, ".jsonl", ".parquet", ".arrow"])
                raise DataError(f"{path}: no {known} file below this directory (nor packed as .gz or .zst)")
            found += inside
        elif path.is_file():
            found.append(classify(path, options.suffixes) or Source(path, "text"))
        else:
            raise DataError(f"{path}: no such file or directory")
    plain = [source for source in found if source.kind == "text"]
    if options.fields is not None and plain:
        raise DataError(f"{plain[0].path}: conversations are read from JSON lines, Parquet and Arrow; this is plain "
                        "text")
    return found


def _saved_dataset(path: Path, options: ReadOptions) -> list[Source]:
    """The Arrow files of a ``save_to_disk`` folder; empty where it is none."""
    try:
        if (path / "dataset_dict.json").is_file():
            splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            if options.split not in splits:
                raise DataError(f"{path}: no split {options.split!r}; it has {', '.join(map(str, splits))}: --split")
            path = path / options.split
        if not (path / "state.json").is_file():
            return []
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
        if state.get("_indices_files"):
            raise DataError(f"{path}: it keeps a selection of rows apart; save it again with datasets' save_to_disk "
                            "after flatten_indices()")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a readable `datasets` folder ({type(error).__name__}: {error})") from error
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise DataError(f"{path}/state.json names {name!r}, which is not a file in this folder")
    return [Source(path / name, "arrow") for name in names]
