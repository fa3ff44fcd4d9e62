"""The one reader of the package's own JSON: what a file holds has the types of a dataclass, or is rejected.

A run's folder outlives its writer: other versions, full disks, editors and other users leave anything there. So a file
is read by the dataclass that it is written from. Every value has its field's type, integers fit 64 bits, numbers are
finite, texts can be written again; fields of other versions are left out. Only regular files are read, of bounded size.

``read_typed`` reads a file that is one object; ``read_rows`` one of lines, where a bad line costs that line: it is
counted, and named by number and reason (``Rows.note``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from megatron_port.core.config.ranges import Range
from megatron_port.core.io.files import open_regular, read_regular

T = TypeVar("T")
LARGEST = 1 << 26
"""Bytes of a file that is one object."""
LINE_BYTES = 1 << 20
MOST_ROWS = 1_000_000
DEEPEST = 32
"""Levels of tables in a value of no stated type."""
NAMED = 3
"""Bad lines that a note names; of more it has the count."""

REQUIRED = types.MappingProxyType({"required": True})
"""``field(metadata=…)`` of a field that has a default, and that every file has."""
Seconds = Annotated[float, Range(lambda x: 0 <= x < 1e11, "seconds since 1970, before the year 5138")]
Natural = Annotated[int, Range(lambda x: x >= 0, "at least 0")]
Duration = Annotated[float, Range(lambda x: 0 <= x < 1e9, "a number of seconds, at least 0")]


class WrongContent(ValueError):
    """Content that no version of the package writes; the message is ``KEY is VALUE; expected …``."""


def parse_json(text: str | bytes) -> Any:
    """Return the JSON value in ``text``. WrongContent: it is none, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise WrongContent("it is nested without end") from None
    except ValueError as error:
        raise WrongContent(f"it is no JSON ({error!s:.200})") from None


def typed(cls: type[T], value: Any) -> T:
    """Return ``value``, a table of JSON, as the dataclass ``cls``.

    Fields that ``cls`` lacks are left out. Fields may be bool, int, float, str, Any, unions with None, Literal, tuples,
    lists, mappings with names as keys, dataclasses, and any of them Annotated with a ``config.ranges.Range``.

    Raises:
        WrongContent: naming the first field that is missing, or has a value that it cannot have.
    """
    made: T = _dataclass(typing.cast(Hashable, cls))(value, "")
    return made


def read_typed(path: Path, cls: type[T], *, most: int = LARGEST) -> T:
    """Return the content of a file as the dataclass ``cls``.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``most`` bytes.
        WrongContent: it holds something else.
    """
    return typed(cls, parse_json(read_regular(path, most)))


def read_optional(path: Path, cls: type[T], *, most: int = LARGEST) -> tuple[T | None, str]:
    """Return (content, "") of a file; (None, "") of one that is not there; (None, what is wrong) of any other."""
    try:
        return read_typed(path, cls, most=most), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, WrongContent) as error:
        return None, f"{path.name} left out: {(error.strerror if isinstance(error, OSError) else '') or error}"


def right_fields(cls: type, value: Any) -> dict[str, Any]:
    """Return those fields of the dataclass ``cls`` that ``value`` has, with the right types. Others are left out."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found: dict[str, Any] = {}
    for name, kind in hints.items():
        if isinstance(value, dict) and name in value:
            with contextlib.suppress(WrongContent):
                found[name] = _check_of(kind)(value[name], name)
    return found


@dataclass
class Rows(Generic[T]):
    """Rows of a file, and its lines that are not rows."""

    name: str
    """Name of the file."""
    rows: list[T] = field(default_factory=list)
    bad: int = 0
    """Lines that were left out."""
    reasons: list[str] = field(default_factory=list)
    """``line 3: step is null; expected an integer`` of the first ones."""

    def leave_out(self, number: int, reason: str) -> None:
        """Count a rejected line."""
        self.bad += 1
        if len(self.reasons) < NAMED:
            self.reasons.append(f"line {number}: {reason}")

    def note(self) -> str:
        """Return what was left out, as a line for the user; empty: nothing."""
        if not self.bad:
            return ""
        more = f"; and {self.bad - len(self.reasons)} more" if self.bad > len(self.reasons) else ""
        return f"{self.name}: {self.bad} line{'s' * (self.bad > 1)} left out ({'; '.join(self.reasons)}{more})"


def read_rows(path: Path, cls: type[T], *, skip: int = 0) -> Rows[T]:
    """Return the lines of a file as ``cls``; a file that is not there has none. Lines that are none are left out.

    ``skip``: lines at its head that are something else.
    """
    out = Rows[T](path.name)
    number = 0
    try:
        with open(open_regular(path, follow=True), "rb") as stream:
            while line := stream.readline(LINE_BYTES):
                number += 1
                if number > MOST_ROWS:
                    out.leave_out(number, f"lines from here on are not read, a file has at most {MOST_ROWS}")
                    break
                if number <= skip or not line.strip():
                    continue
                try:
                    out.rows.append(typed(cls, parse_json(line)))
                except WrongContent as error:
                    out.leave_out(number, str(error))
    except FileNotFoundError:
        pass
    except OSError as error:
        out.leave_out(number + 1, error.strerror or str(error))
    return out


# A check takes a value and where it stands, and returns it as the field holds it. It raises WrongContent.
_Check = Callable[[Any, str], Any]


def _fail(value: Any, where: str, expected: str) -> WrongContent:
    if isinstance(value, (dict, list)):
        shown = "a table" if isinstance(value, dict) else f"a list of {len(value)}"
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        shown = f"an integer of {value.bit_length()} bits"
    else:
        shown = ascii(json.dumps(value))[1:-1] if isinstance(value, str) else json.dumps(value)
    return WrongContent(f"{where or 'it'} is {shown:.60}; expected {expected}")


def _bool(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise _fail(value, where, "true or false")
    return value


def _int(value: Any, where: str) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise _fail(value, where, "an integer of less than 64 bits")
    return value


def _float(value: Any, where: str) -> float:
    if type(value) is int and abs(value) < 1 << 63:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise _fail(value, where, "a finite number")
    return value


def _str(value: Any, where: str) -> str:
    if type(value) is not str or "\0" in value or not (value.isascii() or _is_utf8(value)):
        raise _fail(value, where, "a text")
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a pair of surrogates
        return False
    return True


def _any(value: Any, where: str, depth: int = DEEPEST) -> Any:
    """A value of no stated type: what of it is not a table is checked."""
    if depth == 0:
        raise WrongContent(f"{where:.60} is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        inside = depth > 1  # most values are texts, for which no place need be written down
        return {
            _str(k, where): v if inside and type(v) is str and v.isascii() and "\0" not in v
            else _any(v, f"{where}.{k}", depth - 1) for k, v in value.items()
        }
    if isinstance(value, list):
        return [_any(v, f"{where}.{i}", depth - 1) for i, v in enumerate(value)]
    if value is None or type(value) is bool:
        return value
    plain: _Check = _PLAIN.get(type(value), _float)
    return plain(value, where)


_PLAIN: dict[Any, _Check] = {bool: _bool, int: _int, float: _float, str: _str, Any: _any}


@functools.cache
def _dataclass(cls: Hashable) -> _Check:
    made: Any = cls
    hints = typing.get_type_hints(made, include_extras=True)
    fields = {f.name: _check_of(hints[f.name]) for f in dataclasses.fields(made) if f.init}
    needed = [
        f.name for f in dataclasses.fields(made)
        if (f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING) or f.metadata == REQUIRED
    ]

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _fail(value, where, "a table")
        before = f"{where}." if where else ""
        lacking = [name for name in needed if name not in value]
        if lacking:
            raise WrongContent(f"{before}{lacking[0]} is missing")
        return made(**{name: one(value[name], before + name) for name, one in fields.items() if name in value})

    return check


@functools.cache
def _check_of(kind: Hashable) -> _Check:
    """Return the check of a field's type."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(Hashable, kind))
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _ranged(_check_of(of[0]), [note for note in of[1:] if isinstance(note, Range)])
    if origin is Literal:
        return _ranged(_PLAIN[type(of[0])], [Range(lambda x: x in of, " or ".join(map(str, of)))])
    if origin in (typing.Union, types.UnionType):
        inner = [_check_of(one) for one in of if one is not type(None)]
        if len(inner) == 1:
            return lambda value, where: None if value is None else inner[0](value, where)
    if origin is tuple and (len(of) != 2 or of[1] is not Ellipsis):
        return _fixed([_check_of(one) for one in of])
    if origin in (tuple, list):
        return _sequence(_check_of(of[0]), origin)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_check_of(of[1]))
    raise TypeError(f"a file of ours cannot hold a {kind}")


def _ranged(inner: _Check, ranges: list[Range]) -> _Check:
    def check(value: Any, where: str) -> Any:
        found = inner(value, where)
        for one in ranges:
            if not one.holds(found):
                raise _fail(value, where, one.words)
        return found

    return check


def _sequence(inner: _Check, make: Callable[[Any], Any]) -> _Check:
    def check(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _fail(value, where, "a list")
        return make(inner(v, f"{where}.{i}") for i, v in enumerate(value))

    return check


def _fixed(inner: list[_Check]) -> _Check:
    def check(value: Any, where: str) -> Any:
        if not isinstance(value, list) or len(value) != len(inner):
            raise _fail(value, where, f"a list of {len(inner)}")
        return tuple(one(v, f"{where}.{i}") for i, (one, v) in enumerate(zip(inner, value)))

    return check


def _mapping(inner: _Check) -> _Check:
    def check(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _fail(value, where, "a table")
        return {_str(k, where): inner(v, f"{where}.{k}") for k, v in value.items()}

    return check


def finite_or_text(number: float) -> float | str:
    """Return a finite number as it is, any other as the string that stands for it: JSON has no NaN."""
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
