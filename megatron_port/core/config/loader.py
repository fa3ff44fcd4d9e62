"""Reading a run: TOML files that extend one another, ``--set`` overrides, and where each value came from.

A file may start with ``extends = "file"`` or ``extends = ["a", "b"]``: those are read
first, later ones win, the file itself wins over all. A name is looked for beside the
file (with and without ``.toml``), then in the repository's ``configs/``, so
``extends = "models/gpt-22b"`` works from anywhere.
On the command line the folder of a run stands for the configuration that it trained
with, so ``train runs/lap`` resumes it. Types are strict: an integer is taken where a
float is wanted, nothing else is converted. In paths, ``~`` and variables are replaced.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_port.core.config.choices import plain_type, plugin_problems, with_sections
from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.config.ranges import IsPath, expanded, is_remote, path_mark
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.package import shipped_folder
from megatron_port.core.registry import PARTS

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

DEFAULT = "default"
RUN_CONFIG = "config.toml"
"""What a run writes of its configuration, in its folder."""
OF_FOLDER = "the run's folder "
"""Start of the origin of a value that a run's folder gives, and not the file in it."""
MOVED = {"layout.recompute": "activations.policy"}
"""Fields that have another name now; their old one is refused with it."""
WALL_TIMES = ("launch.time",)
"""Fields of type str that also take TOML's integers (minutes) and times."""
_FILE_BYTES = 1 << 20
_MOST_FILES = 256


@dataclass(frozen=True)
class Loaded:
    """A configuration and, for every leaf (dotted name), its origin: ``file:line``, ``--set`` or ``default``."""

    config: RunConfig
    origins: dict[str, str]
    files: tuple[str, ...] = ()
    """Files read, bases first."""


def load(
    paths: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = (), *, root: type = RunConfig,
    texts: Mapping[str, str] | None = None,
) -> Loaded:
    """Read ``paths`` (later files win; None: defaults), then apply ``a.b=value`` overrides in order.

    ``texts``: name of a file → its content, which somebody else has read.

    Raises:
        ConfigError: every problem found: files that are missing or not TOML, cycles of
            ``extends``, unknown keys, wrong types, plugins that cannot be imported; each with its file and line or
            flag.
    """
    names = [] if paths is None else [paths] if isinstance(paths, (str, Path)) else list(paths)
    reader = _Reader(root)
    for name in names:
        text = (texts or {}).get(str(name))
        folder = _run_folder(str(name)) if text is None else None
        if text is not None:
            reader.read_text(text, Path(name), chain=())
        elif folder is None:
            reader.read_file(str(name), beside=None, origin="the command line", chain=())
        else:
            reader.read_run(folder)
    for text in overrides:
        reader.read_override(text)
    unknown = [name for _, name, _, _ in reader.deferred]
    reader.problems += plugin_problems(reader.values, reader.origins.get("plugins", DEFAULT), unknown)
    if root is RunConfig and (unknown or reader.values.get("plugins")):
        reader.read_sections(with_sections(unknown))
    if reader.problems:
        raise ConfigError(reader.problems)
    config = _build(reader.root, reader.values)
    origins = {name: reader.origins.get(name, DEFAULT) for name, _ in leaves(config)}
    return Loaded(config=config, origins=origins, files=tuple(dict.fromkeys(reader.files)))


def shipped_names() -> list[str]:
    """Short names of the shipped files, e.g. ``models/gpt-22b``."""
    folder = shipped_folder("configs")
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.toml"))


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return ``; did you mean 'x'?`` or an empty string."""
    import difflib  # imported only when something is wrong

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not near and len(word) > 2:  # the beginning of a long name: tensr for tensor_parallel_size
        starts = {k[: len(word) + 1]: k for k in reversed(known)}
        near = [starts[s] for s in difflib.get_close_matches(word, list(starts), n=1, cutoff=0.75)]
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass
class _Reader:
    """Collects values, their origins and every problem, over all files and overrides."""

    root: type
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    read: int = 0
    deferred: list[tuple[int, str, Any, Any]] = field(default_factory=list)
    """Unknown tables: (number of problems found before, name, table, its origin). They are plugins' sections or
    mistakes, which can be told apart once the plugins have been imported."""
    complete: bool = False
    """Whether plugins have been imported: ``root`` then has their sections."""

    def read_sections(self, root: type) -> None:
        """Read the tables that were deferred, now that ``root`` has the plugins' sections."""
        self.root, self.complete = root, True
        found, moved = self.problems, 0
        for at, name, table, origin in self.deferred:
            self.problems = []
            self._walk(root, {name: table}, "", origin)
            found[at + moved : at + moved] = self.problems
            moved += len(self.problems)
        self.problems = found

    def read_file(self, name: str, *, beside: Path | None, origin: str, chain: tuple[Path, ...]) -> None:
        """Read one file after the files that it extends. ``chain``: the files that led here."""
        try:
            path = find_config(name, beside)
        except ConfigError as error:
            self.problems.append(f"{origin}: {error}")
            return
        if path is None:
            where = "" if beside is None and origin == "the command line" else f"{origin}: "
            if not where and os.path.isdir(name):
                self.problems.append(
                    f"{name!r} is a folder without {RUN_CONFIG}, so not that of a run; give a run file, or the folder "
                    f"of a run{_runs_near(Path(name))}"
                )
                return
            if is_remote(name):
                self.problems.append(f"{where}{name}: a run file in a store is not supported; copy it here first")
                return
            near = did_you_mean(name.removesuffix(".toml"), shipped_names())
            self.problems.append(f"{where}configuration file {name!r} was not found{near}")
            return
        key = path.resolve()
        if key in chain:
            loop = " -> ".join(p.name for p in (*chain[chain.index(key):], key))
            self.problems.append(f"{origin}: extends forms a cycle: {loop}")
            return
        self.read += 1
        if self.read > _MOST_FILES:  # files that name one another twice each double at every level
            if self.read == _MOST_FILES + 1:
                self.problems.append(f"{origin}: extends leads to more than {_MOST_FILES} files; name fewer")
            return
        try:
            if path.stat().st_size > _FILE_BYTES:
                self.problems.append(f"{path}: {path.stat().st_size} bytes; a run file has at most {_FILE_BYTES}")
                return
            text = path.read_bytes().decode("utf-8")
        except (OSError, ValueError) as e:
            self.problems.append(f"{path}: cannot be read as TOML: {e.strerror if isinstance(e, OSError) else e}")
            return
        self.read_text(text, path, chain=(*chain, key))

    def read_text(self, text: str, path: Path, *, chain: tuple[Path, ...]) -> None:
        """Read the content of a file after the files that it extends."""
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as e:
            self.problems.append(f"{path}: cannot be read as TOML: {str(e) or type(e).__name__}")
            return
        lines, shown = _key_lines(text), _shown_path(path)
        place = f"{shown}:{lines.get('extends', 1)}"
        for base in self._bases(data.pop("extends", []), place):
            self.read_file(base, beside=path.parent, origin=place, chain=chain)
        self.files.append(shown)
        self._walk(self.root, data, "", lambda dotted: f"{shown}:{lines[dotted]}" if dotted in lines else shown)

    def read_run(self, folder: Path) -> None:
        """Read the configuration of a run from its folder, so that the run resumes there.

        The folder may have been moved, or be seen from another directory, and its first start may have been told not to
        resume. So ``name``, ``output_dir`` and ``checkpoint.resume`` follow from the folder, not from the file in it.
        """
        self.read_file(str(folder / RUN_CONFIG), beside=None, origin="the command line", chain=())
        whole = Path(os.path.abspath(folder))
        parent = str(folder.parent) if folder.name == whole.name else str(whole.parent)
        now = {"name": whole.name, "output_dir": parent, "checkpoint.resume": "auto"}
        for name, value in now.items():
            if self.values.get(name) != value:
                self.values[name], self.origins[name] = value, f"{OF_FOLDER}{folder}"

    def _bases(self, value: Any, origin: str) -> list[str]:
        bases = [value] if isinstance(value, str) else value
        if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
            self.problems.append(f"{origin}: extends must be a file name or an array of them, not {_show(value)}")
            return []
        return bases

    def read_override(self, text: str) -> None:
        """Apply one ``a.b=value``; the value is TOML, or a bare string where it is not valid TOML."""
        name, equals, source = text.partition("=")
        name, source = name.strip(), source.strip()
        if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name):
            self.problems.append(f"--set {text}: write --set table.key=value, e.g. --set model.num_layers=4")
            return
        try:
            parsed = tomllib.loads(f"value = {source}")
            value = parsed["value"] if set(parsed) == {"value"} else source
            if isinstance(value, (datetime.date, datetime.time)):  # launch.time=02:00:00; no setting is a date
                value = source
        except (ValueError, RecursionError):
            value = source
        data: Any = value
        for key in reversed(name.split(".")):
            data = {key: data}
        self._walk(self.root, data, "", lambda dotted: "--set")

    def _walk(self, cls: type, data: dict[str, Any], prefix: str, origin: Any) -> None:
        """Take every value of one table into ``values``, or note what is wrong with it."""
        hints, marks = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
        for key, value in data.items():
            dotted = prefix + key
            if key not in hints and cls is RunConfig and isinstance(value, dict) and not self.complete:
                self.deferred.append((len(self.problems), key, value, origin))
                continue
            if key not in hints:
                moved = f"; it is {MOVED[dotted]} now" if dotted in MOVED else self._suggest(key, hints)
                refused = PARTS.function("name in another framework")(dotted, of="key")
                self.problems.append(f"{origin(dotted)}: {dotted!r}{refused}" if refused else
                                     f"{origin(dotted)}: unknown key {dotted!r}{moved}")
                continue
            kind = hints[key]
            if dataclasses.is_dataclass(kind):
                if isinstance(value, dict):
                    self._walk(typing.cast(type, kind), value, dotted + ".", origin)
                else:
                    self.problems.append(f"{origin(dotted)}: {dotted} is a table of settings, not {_show(value)}")
                continue
            try:
                value = _spelled(value) if dotted in WALL_TIMES else value
                self.values[dotted] = _expanded(path_mark(marks[key]), _convert(kind, value))
                self.origins[dotted] = origin(dotted)
            except (TypeError, ConfigError) as e:
                self.problems.append(f"{origin(dotted)}: {dotted} {e}")

    def _suggest(self, key: str, hints: dict[str, Any]) -> str:
        near = did_you_mean(key, list(hints))
        if near:
            return near
        everywhere = [name for name, _ in leaves(self.root())]
        same = [name for name in everywhere if name.rpartition(".")[2] == key]
        return f"; did you mean {same[0]!r}?" if same else ""


def _run_folder(name: str) -> Path | None:
    """The folder of a run that a name of the command line stands for; a file of that name wins, shipped ones too."""
    try:
        folder = Path(expanded(name))
        return folder if (folder / RUN_CONFIG).is_file() and find_config(name) is None else None
    except (OSError, ValueError, ConfigError):  # what is wrong with the name is said where it is read as a file
        return None


def _runs_near(folder: Path) -> str:
    """Return ``, e.g. runs/lap``: a run's folder in this one or around it; empty: none."""
    found = [folder, *folder.parents][:3] + sorted(p for p in folder.iterdir() if p.is_dir())[:_MOST_FILES]
    return next((f", e.g. {p}" for p in found if (p / RUN_CONFIG).is_file()), "")


def find_config(name: str, beside: Path | None = None) -> Path | None:
    """The file a name stands for: beside the naming file (or the working directory), then the shipped configs.

    Raises:
        ConfigError: it holds a variable that is not set.
    """
    name = expanded(name)
    for folder in (beside or Path(), shipped_folder("configs")):
        for candidate in (folder / name, folder / f"{name}.toml"):
            try:
                if candidate.is_file():
                    return candidate
            except (OSError, ValueError):  # a name too long, or with a null byte
                continue
    return None


def _shown_path(path: Path) -> str:
    """The path relative to the working directory if it is inside it; otherwise unchanged."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _key_lines(text: str) -> dict[str, int]:
    """Line of each ``table.key``. A scan, not a parser: it is only used to name places of keys that were parsed."""
    out: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if entries := re.match(r"\s*\[\[\s*([\w.\-]+)\s*\]\]", line):
            table = entries.group(1) + "[]."
            out.setdefault(entries.group(1), number)
        elif header := re.match(r"\s*\[\s*([\w.\-]+)\s*\]", line):
            table = header.group(1) + "."
            out.setdefault(header.group(1), number)
        elif entry := re.match(r"\s*([\w.\-]+)\s*=", line):
            out.setdefault(table + entry.group(1), number)
    return out


def _spelled(value: Any) -> Any:
    """Return a wall time as SLURM spells it: TOML reads ``3`` as an integer and ``02:00:00`` as a time of the day."""
    if type(value) is int and 0 <= value < 10**6:
        return str(value)
    return value.isoformat() if type(value) is datetime.time and not value.microsecond else value


def _convert(kind: Any, value: Any) -> Any:
    """Return ``value`` as ``kind``. Raises TypeError with the end of a sentence that starts with the key.

    A ``Literal`` takes any value of its values' type here: ``config.checks`` refuses the unknown ones, all at once.
    """
    kind = plain_type(kind)
    if dataclasses.is_dataclass(kind):
        return _converted_table(typing.cast(type, kind), value)
    if typing.get_origin(kind) is tuple:
        item = plain_type(typing.get_args(kind)[0])
        if not isinstance(value, list):
            hint = f"; write [{toml_value(value)}]" if isinstance(value, item) and not isinstance(value, bool) else ""
            raise TypeError(f"must be an array of {_name(item)}s, not {_show(value)}{hint}")
        return tuple(_convert(item, v) for v in value)
    if kind is float and type(value) is int and abs(value) < 2**63:  # TOML promises no larger integers
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"must be {_article(kind)}, not {_show(value)}")
    if kind is int and abs(value) >= 2**63:
        raise TypeError(f"must fit in 64 bits, not {_show(value)}")
    if kind is float and not math.isfinite(value):
        raise TypeError(f"must be a finite number, not {value}")
    return value


def _expanded(mark: IsPath | None, value: Any) -> Any:
    """A path, or an array of paths, as a shell would give it; any other value as it is. Raises ConfigError."""
    if mark is None:
        return value
    return tuple(map(mark.expand, value)) if isinstance(value, tuple) else mark.expand(value)


def _converted_table(cls: type, value: Any) -> Any:
    """An entry of an array of tables. Raises TypeError as :func:`_convert` does."""
    if not isinstance(value, dict):
        raise TypeError(f"must be an array of tables, not with {_show(value)} in it")
    hints, given = typing.get_type_hints(cls), {}
    for key, found in value.items():
        if key not in hints:
            raise TypeError(f"has a table with the unknown key {key!r}{did_you_mean(key, list(hints))}")
        try:
            given[key] = _convert(hints[key], found)
        except TypeError as error:
            raise TypeError(f"has a table whose {key} {error}") from None
    lacking = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in given]
    if lacking:
        raise TypeError(f"has a table without {lacking[0]}")
    return cls(**given)


def _name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "table"
    return {int: "integer", float: "number", str: "string", bool: "boolean"}.get(kind, getattr(kind, "__name__", "?"))


def _article(kind: Any) -> str:
    return {int: "an integer", bool: "true or false"}.get(kind, f"a {_name(kind)}")


def _show(value: Any) -> str:
    """A value as a message shows it: its type and its source, cut short."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    kind = "date or time" if type(value).__name__ in ("date", "datetime", "time") else _name(type(value))
    return f"the {kind} {text if len(text) <= 60 else text[:57] + '...'}"


def _build(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        kind, dotted = hints[f.name], prefix + f.name
        if dataclasses.is_dataclass(kind):
            given[f.name] = _build(typing.cast(type, kind), values, dotted + ".")
        elif dotted in values:
            given[f.name] = values[dotted]
    return cls(**given)
