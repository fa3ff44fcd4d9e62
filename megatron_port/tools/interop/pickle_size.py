"""How much a pickle would make, told from its opcodes alone: nothing is made, and shared parts count every time.

A hundred bytes can describe a list of 2^60 elements (each level holds the one below it twice), or a tuple nested so
deep that hashing it overflows the stack. Whatever walks, hashes or prints such a value never ends or dies without a
message, so it is measured first.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MAX_VALUES = 10_000_000
MAX_DEPTH = 500
MAX_PICKLE = 1 << 28
"""Bytes of the pickle in a zip file, unpacked."""
_LEGACY_PICKLES = 5
"""Magic number, protocol, system, object, storage keys: before zip files, torch wrote them one after the other."""
_ONTO_THE_FIRST = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}


class _Node:
    """A value and those in it."""

    __slots__ = ("children", "depth", "values")

    def __init__(self, children: list[_Node]) -> None:
        self.children = children
        self.values = self.depth = 0  # known when they are above 0; -1 while they are summed


def check_size(stream: bytes | IO[bytes], *, values: int = MAX_VALUES) -> None:
    """Read one pickle's opcodes, to its end. Raises ValueError where it is none, or would make too much."""
    root = _graph(stream)
    _measure(root)
    if root.depth > MAX_DEPTH:
        raise ValueError(f"values nested {root.depth} deep; at most {MAX_DEPTH} are read")
    if root.values > values:
        raise ValueError(f"{root.values:.3g} values, shared ones counted each time; at most {values} are read")


def check_torch_file(file: Path | str | IO[bytes]) -> None:
    """Run :func:`check_size` on every pickle of a ``torch.save`` file; an open file is left at its start."""
    if isinstance(file, (Path, str)):
        with open(file, "rb") as stream:
            check_torch_file(stream)
        return
    zipped = file.read(4) == b"PK\x03\x04"  # as torch tells them apart
    file.seek(0)
    if zipped:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.filename.endswith(".pkl"):
                    if info.file_size > MAX_PICKLE:
                        raise ValueError(f"{info.filename} has {info.file_size} bytes; at most {MAX_PICKLE} are read")
                    check_size(archive.read(info))
    else:
        for _ in range(_LEGACY_PICKLES):
            check_size(file)
            if not file.read(1):
                break
            file.seek(-1, 1)
    file.seek(0)


def first_line(error: Exception) -> str:
    """Return an error of torch's readers as one line: its kind, and where its text begins."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _graph(stream: bytes | IO[bytes]) -> _Node:
    """Return the pickle's result, as nodes."""
    stack: list[_Node | None] = []  # None: a mark
    memo: dict[int, _Node] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "MARK":
            stack.append(None)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = _top(stack)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            index = int(argument or 0)
            if index not in memo:
                raise ValueError(f"memo {index} is not there")
            stack.append(memo[index])
        elif name == "DUP":
            stack.append(_top(stack))
        elif name == "STOP":
            return _top(stack)
        else:
            taken = list(_taken(stack, opcode))
            if name in _ONTO_THE_FIRST:
                taken[0].children.extend(taken[1:])
                stack.append(taken[0])
            elif opcode.stack_after:
                stack.append(_Node(taken))
    raise ValueError("it ends too early")


def _top(stack: list[_Node | None]) -> _Node:
    if not stack or stack[-1] is None:
        raise ValueError("nothing is on the stack")
    return stack[-1]


def _taken(stack: list[_Node | None], opcode: pickletools.OpcodeInfo) -> Iterator[_Node]:
    """Pop what an opcode takes, lowest first."""
    count = len(opcode.stack_before)
    if pickletools.markobject in opcode.stack_before:
        count = opcode.stack_before.index(pickletools.markobject)
        mark = len(stack) - 1
        while mark >= 0 and stack[mark] is not None:
            mark -= 1
        if mark < 0:
            raise ValueError("no mark")
        count += len(stack) - mark
    if count > len(stack):
        raise ValueError("the stack is too short")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    yield from (node for node in taken if node is not None)


def _measure(root: _Node) -> None:
    """Set ``values`` and ``depth`` of a node and all in it, without recursion."""
    todo = [root]
    while todo:
        node = todo[-1]
        if not node.values:
            node.values = -1
            for child in node.children:
                if child.values < 0:
                    raise ValueError("a value that contains itself")
                if not child.values:
                    todo.append(child)
            continue
        todo.pop()
        if node.values < 0:
            node.values = 1 + sum(child.values for child in node.children)
            node.depth = 1 + max((child.depth for child in node.children), default=0)
