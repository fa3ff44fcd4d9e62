"""Read foreign pickles through the child process (``unpickle_child``)."""

from __future__ import annotations

import json
import pickletools
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_port.core import package
from megatron_port.core.errors import CheckpointError

_START = "import sys; sys.path.insert(0, {root!r}); from megatron_port.tools.interop.unpickle_child import main; main()"
_MEMORY_FLOOR = 1 << 36
"""Address space, not memory: libraries of a GPU build of torch alone map tens of GiB."""
_MAX_JSON = 1 << 28
UNTRUSTED = (
    "{path} is a pickle: reading one can run any program that its author put in it, so --trust-pickle is needed, and "
    "only for files whose origin you know. (It is then read in a child process without network, by an unpickler that "
    "makes nothing but tensors and plain values.)"
)


@dataclass
class Stubbed:
    """An object of a foreign class: its name, arguments and attributes."""

    name: str
    args: list[Any]
    state: Any

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute, where they are a dict."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


def read_pickles(
    paths: Sequence[Path], folder: Path, *, trusted: bool, note: Callable[[str], None] = print
) -> dict[Path, Any]:
    """Convert ``paths`` into ``folder``; return the content of each, whose tensors are maps of the converted file.

    Raises:
        CheckpointError: not trusted, a file is missing or damaged, or the child met one of its limits.
    """
    if not trusted:
        raise CheckpointError(UNTRUSTED.format(path=paths[0]))
    sizes = []
    for path in paths:
        try:
            sizes.append(path.stat().st_size)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
    stems = {path: folder / f"file-{i:06d}" for i, path in enumerate(paths)}
    largest = max(sizes, default=0)
    request = {
        "files": [[str(p.absolute()), str(s.absolute())] for p, s in stems.items()],
        "memory": _MEMORY_FLOOR + 4 * largest, "file_bytes": 2 * largest + (1 << 26),
        "seconds": 600 + sum(sizes) // (1 << 26),
    }
    _converse(request, note)
    return {path: _map(stem, path) for path, stem in stems.items()}


def _converse(request: dict[str, Any], note: Callable[[str], None]) -> None:
    root = str(package.ROOT)
    child = subprocess.run(
        [sys.executable, "-c", _START.format(root=root)], input=json.dumps(request), capture_output=True, text=True,
        check=False,
    )
    answers = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    done = sum("done" in a for a in answers)
    for answer in answers:
        if answer.get("unrestricted"):
            note(f"the child that reads pickles could not be cut off from the network: {answer['unrestricted']}")
        if "failed" in answer:
            raise CheckpointError(f"{answer['failed']}: cannot be read: {answer['why']}")
    if child.returncode or done != len(request["files"]):
        current = request["files"][min(done, len(request["files"]) - 1)][0]
        end = f"exit code {child.returncode}"
        if child.returncode < 0:
            end = f"signal {signal.Signals(-child.returncode).name}"
        said = child.stderr.strip().splitlines()[-1:] or [""]
        raise CheckpointError(f"{current}: the process that read it ended with {end}. {said[0][:300]}")


def _map(stem: Path, source: Path) -> Any:
    path = stem.with_suffix(".json")
    try:
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{source}: {path.stat().st_size} bytes of values that are no tensors")
        tree = json.loads(path.read_bytes())
        with safe_open(stem.with_suffix(".safetensors"), framework="pt", device="cpu") as handle:
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{source}: cannot be read back after conversion: {error}") from None
    return _decode(tree, tensors)


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$dict" in value:
        return {_key(_decode(k, tensors)): _decode(v, tensors) for k, v in value["$dict"]}
    if "$class" in value:
        return Stubbed(value["$class"], _decode(value["args"], tensors), _decode(value["state"], tensors))
    return value.get("$text")


def _key(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_key, value))
    return value if isinstance(value, (str, int)) else str(value)


# How much a pickle would make, told from its opcodes alone: nothing is made, and shared parts count every time.
#
# A hundred bytes can describe a list of 2^60 elements (each level holds the one below it twice), or a tuple nested so
# deep that hashing it overflows the stack. Whatever walks, hashes or prints such a value never ends or dies without a
# message, so it is measured first.

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
