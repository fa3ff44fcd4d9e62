"""Read foreign pickles through the child process (``unpickle_child``)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
