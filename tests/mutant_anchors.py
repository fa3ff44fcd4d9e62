"""A place in a Python file by attribute and syntax, so that layout, comments and line numbers do not matter.

``at`` is a qualified name (``ParallelContext.over``, ``outer.inner``, a constant's name; "" is the whole file).
``old`` is an expression, a run of statements, neighbouring arguments or items, which end with a comma
(``decay=True,``), or the first line of a compound statement with ``...`` for its body (``def scale(x, by=1.0): ...``).
:func:`replaced` finds ``old`` inside ``at`` and puts ``new`` there; :func:`anchor` derives all of them from the text of
a file before and after.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
BODIES = ("body", "orelse", "handlers", "finalbody")
IGNORED = ("ctx", "kind", "type_comment", "type_ignores")


@dataclass(frozen=True)
class Anchor:
    """``old`` becomes ``new`` inside ``at``; ``nth`` counts the matches from 1, and 0 demands that there is one."""

    at: str
    old: str
    new: str
    nth: int = 0


@functools.lru_cache(8)
def parsed(text: str) -> ast.Module:
    """Syntax tree; a list of faults has many of a file one after another."""
    return ast.parse(text)


def same(a: object, b: object, without: Sequence[str] = ()) -> bool:
    """Equal trees, wherever they stand in a file and whether they are read or assigned to."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, ast.AST):
        return type(a) is type(b) and a == b
    return type(a) is type(b) and all(
        same(getattr(a, field, None), getattr(b, field, None)) for field in a._fields
        if field not in IGNORED and field not in without)


# ---------------------------------------------------------------- places


class Text:
    """A file's text with places in it; ast counts columns in bytes."""

    def __init__(self, text: str) -> None:
        self.bytes = text.encode()
        self._lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: Any) -> int:
        """First byte, decorators included."""
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: (n.lineno, n.col_offset))
        at_sign = first is not node
        place = self._lines[first.lineno - 1] + first.col_offset
        return self.bytes.rindex(b"@", 0, place) if at_sign else place

    def end(self, node: Any) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def header(self, node: Any) -> tuple[int, int]:
        """From the keyword of a compound statement to its colon, decorators excluded."""
        start = self._lines[node.lineno - 1] + node.col_offset
        parts = [child for field, value in ast.iter_fields(node) if field not in (*BODIES, "decorator_list")
                 for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        ends = [self.end(n) for part in parts for n in ast.walk(part) if hasattr(n, "end_lineno")]
        return start, self.bytes.index(b":", max([start, *ends])) + 1

    def indent(self, place: int) -> str:
        line = self.bytes[self.bytes.rfind(b"\n", 0, place) + 1 : place].decode()
        return line[: len(line) - len(line.lstrip())]


def scopes(tree: ast.Module, at: str) -> list[ast.AST]:
    """What ``at`` names: definitions, or assignments to a name of a module or a class. A name can be defined twice."""
    found: list[ast.AST] = [tree]
    for name in filter(None, at.split(".")):
        found = [node for scope in found for known, node in members(scope) if known == name]
    return found


def members(scope: ast.AST, local: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """Names and nodes of what a scope defines, under ``if`` and ``with`` too; local variables are none of it."""
    local = local or isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef))
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, DEFINITIONS):
            yield child.name, child
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((t.id, child) for t in targets if isinstance(t, ast.Name) and not local)
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from members(child, local)


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """All expressions below a node, but none inside an f-string: before Python 3.12 those have no place."""
    if isinstance(node, ast.expr):
        yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from expressions(child)


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements below a node, and the node itself if it is a statement."""
    if isinstance(node, ast.stmt):
        yield [node]
    yield from _blocks_below(node)


def _blocks_below(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in BODIES:
        block = getattr(node, field, None)
        if isinstance(block, list):
            if field != "handlers":
                yield block
            for child in block:
                yield from _blocks_below(child)


# ---------------------------------------------------------------- patterns


def expression(text: str) -> ast.expr | None:
    """The text as one expression, else None."""
    try:
        return ast.parse(f"({text}\n)", mode="eval").body if text.strip() else None
    except SyntaxError:
        return None


def arguments(text: str) -> Sequence[ast.AST]:
    """Positional or named arguments, or items of a list or a set.

    Raises:
        ValueError: other text, or both kinds at once.
    """
    call = expression(f"f({text}\n)")
    if not isinstance(call, ast.Call) or (call.args and call.keywords):
        raise ValueError(f"{text!r} is neither a program nor arguments of one kind")
    return call.args or call.keywords


def _items(node: ast.expr) -> list[Sequence[ast.AST]]:
    return [node.args, node.keywords] if isinstance(node, ast.Call) else [getattr(node, "elts", [])]


def _is_header(statements: list[ast.stmt]) -> bool:
    """One compound statement whose body is ``...``."""
    body = getattr(statements[0], "body", None) if len(statements) == 1 else None
    return isinstance(body, list) and same(body, ast.parse("...").body)


def _places(text: Text, tree: ast.Module, a: Anchor) -> list[tuple[int, int]]:
    """Bytes of ``old``, once a match, in the order of the file."""
    found = scopes(tree, a.at)
    if a.old.endswith(","):
        run = arguments(a.old)
        return sorted({(text.start(items[i]), text.end(items[i + len(run) - 1])) for scope in found
                       for n in expressions(scope) for items in _items(n) for i in range(len(items) - len(run) + 1)
                       if same(items[i : i + len(run)], run)})
    wanted = expression(a.old)
    if wanted is not None and expression(a.new) is not None:
        nodes = {n for scope in found for n in expressions(scope) if same(n, wanted)}
        return sorted((text.start(n), text.end(n)) for n in nodes)
    run = ast.parse(a.old).body
    if _is_header(run):
        fields = (*BODIES, *(() if getattr(run[0], "decorator_list", ()) else ("decorator_list",)))
        return sorted({text.header(n) for scope in found for block in blocks(scope) for n in block
                       if same(n, run[0], fields)})
    return sorted({(text.start(block[i]), text.end(block[i + len(run) - 1]))
                   for scope in found for block in blocks(scope) for i in range(len(block) - len(run) + 1)
                   if same(block[i : i + len(run)], run)})


def _inserted(text: Text, a: Anchor, start: int) -> str:
    """``new`` as it must stand at a byte."""
    if a.old.endswith(","):
        return a.new.removesuffix(",")
    if expression(a.old) is not None and expression(a.new) is not None:
        return f"({a.new})"
    if _is_header(ast.parse(a.old).body):
        return ("el" if text.bytes.startswith(b"elif", start) else "") + a.new[: a.new.rindex(":") + 1]
    return textwrap.indent(a.new.strip("\n"), text.indent(start)).lstrip()


def replaced(text: str, a: Anchor) -> str:
    """The text with ``new`` for ``old``. Raises ValueError unless there is exactly one place for it."""
    source = Text(text)
    tree = parsed(text)
    if not scopes(tree, a.at):
        raise ValueError(f"there is no {a.at!r}")
    places = _places(source, tree, a)
    if len(places) != 1 if a.nth == 0 else len(places) < a.nth:
        raise ValueError(f"{a.old!r} is {len(places)} times in {a.at or 'the file'!r}")
    start, end = places[max(a.nth - 1, 0)]
    with_fault = (source.bytes[:start] + _inserted(source, a, start).encode() + source.bytes[end:]).decode()
    if a.new.strip() or _parses(with_fault):
        return with_fault
    return replaced(text, replace(a, new="pass"))  # nothing else stands in the block


def _parses(text: str) -> bool:
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


# ---------------------------------------------------------------- from a change of the text


@dataclass(frozen=True)
class _Change:
    """Syntax that holds all of a change: ``old`` and ``new`` as an entry states them."""

    nodes: tuple[ast.AST, ...]
    old: str
    new: str


def anchor(before: str, after: str) -> Anchor:
    """What states the change from one text to the other: the smallest syntax that is there once and says something.

    Raises:
        ValueError: no entry can state it.
    """
    a, b = ast.parse(before), ast.parse(after)
    tried = [Anchor(_qualified(a, c.nodes), c.old, c.new) for c in _changes(Text(before), Text(after), a, b)][::-1]
    for characters, lines, numbers in ((12, 3, 1), (6, 3, 1), (6, 8, 1), (6, 3, 10), (0, 1000, 10)):
        for place in tried:
            if len(place.old) < characters or place.old.count("\n") >= lines:
                continue
            for nth in range(numbers):
                if _states(numbered := replace(place, nth=nth), before, b):
                    return numbered
    raise ValueError(f"no syntax states the change: {tried}")


def _states(a: Anchor, before: str, wanted: ast.Module) -> bool:
    try:
        return same(ast.parse(replaced(before, a)), wanted)
    except (SyntaxError, ValueError):
        return False


def _qualified(scope: ast.AST, nodes: Sequence[ast.AST]) -> str:
    """The innermost attribute that holds all of the nodes."""
    for name, member in members(scope):
        inside = set(map(id, ast.walk(member)))
        if all(id(n) in inside for n in nodes):
            return f"{name}.{_qualified(member, nodes)}".rstrip(".")
    return ""


def _changes(s: Text, t: Text, a: ast.AST, b: ast.AST) -> Iterator[_Change]:
    """From the largest syntax to the smallest."""
    if isinstance(a, ast.expr) and isinstance(b, ast.expr):
        yield _Change((a,), _said(s, s.start(a), s.end(a)), _said(t, t.start(b), t.end(b)))
    if type(a) is not type(b):
        return
    differing = [f for f in a._fields if f not in IGNORED and not same(getattr(a, f), getattr(b, f))]
    if isinstance(a, ast.stmt) and hasattr(a, "body") and not set(differing) & {*BODIES, "decorator_list"}:
        yield _Change((a,), *(_said(x, *x.header(n)) + " ..." for x, n in ((s, a), (t, b))))
    if len(differing) != 1 or isinstance(a, ast.JoinedStr):
        return
    old, new = getattr(a, differing[0]), getattr(b, differing[0])
    if isinstance(old, list) and isinstance(new, list):
        if differing[0] in BODIES and old and isinstance(old[0], ast.stmt):
            yield from _block_changes(s, t, old, new)
            return
        pairs = [(x, y) for x, y in zip(old, new) if not same(x, y)]
        if len(old) == len(new) and len(pairs) == 1:
            yield from _changes(s, t, *pairs[0])
    elif isinstance(old, ast.AST) and isinstance(new, ast.AST):
        yield from _changes(s, t, old, new)


def _block_changes(s: Text, t: Text, old: list[ast.stmt], new: list[ast.stmt]) -> Iterator[_Change]:
    first = next((i for i, (x, y) in enumerate(zip(old, new)) if not same(x, y)), min(len(old), len(new)))
    last = next((i for i, (x, y) in enumerate(zip(old[first:][::-1], new[first:][::-1])) if not same(x, y)),
                min(len(old), len(new)) - first)
    if first + last == len(old):  # only new statements: the neighbour says where
        first, last = (first - 1, last) if first else (first, last - 1)
    for before, behind in ((0, 1), (1, 0), (0, 0)):  # with a neighbour, which may tell it from its likes
        run, becomes = old[first - before : len(old) - last + behind], new[first - before : len(new) - last + behind]
        if first >= before and last >= behind:
            yield _Change(tuple(run), _said(s, s.start(run[0]), s.end(run[-1])),
                          _said(t, t.start(becomes[0]), t.end(becomes[-1])) if becomes else "")
    if len(run) == len(becomes) == 1:
        yield from _changes(s, t, run[0], becomes[0])


def _said(text: Text, start: int, end: int) -> str:
    """The text of a place on one line if it fits, else without its indentation."""
    said = text.bytes[start:end].decode()
    lines = textwrap.dedent(text.indent(start) + said).splitlines() if "\n" in said else [said]
    joined = " ".join(line.strip() for line in lines)
    for opened, closed in ("()", "[]", "{}"):
        joined = joined.replace(f"{opened} ", opened).replace(f", {closed}", closed).replace(f" {closed}", closed)
    if len(lines) > 1 and len(joined) <= 110 and "#" not in joined:
        for parse in (expression, ast.parse):
            try:
                if same(parse(joined), parse("\n".join(lines))) and parse(joined) is not None:
                    return joined
            except SyntaxError:
                continue
    return "\n".join(lines)
