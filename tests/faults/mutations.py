"""Seeded damage to valid files: of bytes, of JSON values, of TOML text. Pure functions of a ``random.Random``."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

NUMBERS = (0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
           2**64 - 1)
INPUT_BYTES = 1 << 18
"""No damage makes a file longer than this beyond what it was."""


def damage_bytes(data: bytes, r: random.Random) -> bytes:
    """One to four of: flipped bits, a cut, appended, zeroed or doubled bytes, a hostile count."""
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 4))):
        out = r.choice(_BYTES)(out, r)
    return bytes(out)


def _flip(b: bytearray, r: random.Random) -> bytearray:
    for _ in range(r.choice((1, 1, 3, 20))):
        if b:
            bit = r.randrange(8 * (len(b) if r.random() < 0.5 else min(len(b), 128)))
            b[bit // 8] ^= 1 << bit % 8
    return b


def _cut(b: bytearray, r: random.Random) -> bytearray:
    return b[: r.randrange(len(b) + 1)]


def _grow(b: bytearray, r: random.Random) -> bytearray:
    return b + (r.randbytes(r.choice((1, 8, 100))) if r.random() < 0.9 else bytes(INPUT_BYTES))


def _zero(b: bytearray, r: random.Random) -> bytearray:
    at = r.randrange(len(b) + 1)
    end = min(len(b), at + r.choice((1, 4, 8, 64)))
    b[at:end] = bytes(end - at)
    return b


def _double(b: bytearray, r: random.Random) -> bytearray:
    at, size = r.randrange(len(b) + 1), r.choice((1, 8, 40, 1000))
    return b[: at + size] + b[at : at + size] + b[at + size :]


def _number(b: bytearray, r: random.Random) -> bytearray:
    width, code = r.choice(((4, "<I"), (8, "<Q"), (1, "<B")))
    at = r.randrange(max(1, min(len(b), r.choice((64, 64, 1 << 20)))))
    b[at : at + width] = struct.pack(code, r.choice(NUMBERS) % (1 << 8 * width))
    return b


_Damage = Callable[[bytearray, random.Random], bytearray]
_BYTES: tuple[_Damage, ...] = (_flip, _flip, _cut, _grow, _zero, _double, _number)


# ---------------------------------------------------------------- JSON


def hostile_value(r: random.Random) -> Any:
    """Something that no field expects; every number and type, nesting and length."""
    return r.choice((
        lambda: r.choice(NUMBERS), lambda: -r.choice(NUMBERS), lambda: 10 ** r.choice((30, 400, 4000)),
        lambda: r.choice((float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 0.5)),
        lambda: r.choice((None, True, False, "", "\0", "../x", "\ud800", "é" * 50, "9" * 5000, "x" * 20000)),
        lambda: nested(r.choice((3, 60, 500)), r), lambda: [r.choice(NUMBERS)] * r.choice((0, 1, 17, 5000)),
        dict, lambda: {str(i): i for i in range(r.choice((1, 300)))},
    ))()


def nested(depth: int, r: random.Random) -> Any:
    """A list or an object in a list in a list …"""
    value: Any = 0
    for _ in range(depth):
        value = [value] if r.random() < 0.5 else {"a": value}
    return value


def damage_json(value: Any, r: random.Random) -> Any:
    """One to three values of a JSON document replaced, removed, doubled, renamed or moved; a new document."""
    box = [copy.deepcopy(value)]
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        places = list(_places(box))
        holder, key = r.choice(places)
        kind = r.randrange(6)
        if kind <= 2:
            holder[key] = _near(holder[key], r) if kind else hostile_value(r)
        elif kind == 3 and holder is not box:
            del holder[key]
        elif kind == 4 and isinstance(holder, list) and holder is not box:
            holder += [copy.deepcopy(holder[key])] * r.choice((1, 2, 300))
        else:
            other, name = r.choice(places)
            holder[key] = copy.deepcopy(other[name])
    return box[0]


def _places(holder: Any) -> Any:
    """Every (container, key) below."""
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def _near(value: Any, r: random.Random) -> Any:
    """A value of the same type, only wrong: what a check of types lets pass."""
    if isinstance(value, bool) or value is None:
        return hostile_value(r)
    if isinstance(value, int):
        return r.choice((value + 1, value - 1, -value, value * 2, value + 2**32, r.choice(NUMBERS)))
    if isinstance(value, float):
        return -value
    if isinstance(value, str):
        return value[:-1] if r.random() < 0.5 else value + r.choice(("0", "\n", "/", value))
    return list(value)[::-1] if isinstance(value, list) else {}


def json_text(value: Any, r: random.Random) -> str:
    """``value`` as text; sometimes with a key given twice."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    if r.random() < 0.1 and isinstance(value, dict) and value:
        key = r.choice(sorted(value))
        text = f'{text[:-1]},{json.dumps(key)}:{json.dumps(hostile_value(r))}}}'
    return text


# ---------------------------------------------------------------- TOML


def damage_toml(text: str, r: random.Random) -> bytes:
    """Values replaced, keys doubled or made up, nesting, endless names; sometimes raw bytes on top."""
    lines = text.splitlines()
    for _ in range(r.choice((1, 1, 2, 4))):
        at = r.randrange(len(lines))
        kind = r.randrange(7)
        if kind <= 2 and "=" in lines[at]:
            lines[at] = f"{lines[at].partition('=')[0]}= {_toml_value(r)}"
        elif kind == 3:
            lines.insert(r.randrange(len(lines)), lines[at])
        elif kind == 4:
            lines.insert(at, f"{_toml_key(r)} = {_toml_value(r)}")
        elif kind == 5:
            lines.insert(at, r.choice(("[", "[[") * 2) + _toml_key(r) + r.choice(("]", "]]")))
        else:
            lines[at] = lines[at][: r.randrange(len(lines[at]) + 1)]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return damage_bytes(data, r) if r.random() < 0.3 else data


def damage_numbers(text: str, r: random.Random) -> str:
    """One to three of the numbers in a TOML text replaced by others of their kind, mostly small."""
    numbers = list(re.finditer(r"(?<== )-?\d[\d_]*(\.\d+)?(e-?\d+)?$", text, re.M))
    for found in sorted(r.sample(numbers, min(len(numbers), r.choice((1, 1, 2, 3)))), key=lambda m: -m.start()):
        whole = r.choice((0, 1, 2, 3, 4, 6, 8, 64, 1000, 2**31, 2**62, -1))
        real = found.group(1) is not None or found.group(2) is not None
        new = str(r.choice((0.0, 0.5, -1.0, 1e300, whole)) if real else whole)
        text = text[: found.start()] + new + text[found.end() :]
    return text


def _toml_key(r: random.Random) -> str:
    return r.choice((
        lambda: "model.num_layers", lambda: ".".join(["a"] * r.choice((2, 90, 3000))),
        lambda: "k" * r.choice((3, 40000)),
        lambda: r.choice(("extends", "layout", "\"\"", "'x y'", "name", "tensor_parallel_sise", "model", "é")),
        lambda: "\n".join(f"u{i} = {i}" for i in range(r.choice((5, 400)))) + "\nlast",
    ))()


def _toml_value(r: random.Random) -> str:
    return r.choice((
        lambda: str(r.choice(NUMBERS)), lambda: str(-r.choice(NUMBERS)), lambda: str(r.randrange(1, 9)),
        lambda: r.choice(("nan", "inf", "-inf", "1e400", "0.0", "-1.5", "1e-320", "true", "1979-05-27", "''",
                          "\"\\u0000\"")),
        lambda: "9" * r.choice((20, 4000, 5000)), lambda: "[" * (n := r.choice((2, 80, 20000))) + "]" * n,
        lambda: "{a=" * (n := r.choice((2, 60, 3000))) + "1" + "}" * n, lambda: "[" + "1," * r.choice((3, 20000)) + "]",
        lambda: json.dumps(r.choice(("x" * 30000, "../../etc/passwd", "/dev/zero", "native", "fp16", "rope"))),
        lambda: "[" + "'models/gpt-22b'," * r.choice((1, 40)) + "]",
    ))()
