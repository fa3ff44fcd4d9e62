"""The child process that reads foreign ``torch.save`` files: tensors out as safetensors, the rest as JSON.

torch's restricted unpickler does the reading (``weights_only=True``). It refuses
what it does not know, so every other global that a file names is first replaced
by a class of ours that keeps its arguments and does nothing: nothing that a file
names is imported or called, and Megatron need not be installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_port.tools.interop.sandbox import forbid_network_and_programs, limit
from megatron_port.tools.interop.unpickle import check_torch_file

_MAX_DEPTH = 64


class Stub:
    """Stands for an object whose class is not ours to run."""

    stands_for = ""

    def __new__(cls, *args: Any, **_: Any) -> Stub:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args = args  # type: ignore[attr-defined]
        made.state = None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is done."""

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes."""
        self.state = state


class Writer:
    """One source file's tensors, by number, and its skeleton."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.storages: set[int] = set()

    def encode(self, value: Any, depth: int = 0) -> Any:
        """JSON for ``value``; a tensor becomes ``{"$tensor": number}``, a stub ``{"$class": …}``."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} deep")
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if value - value == 0.0 else {"$text": repr(value)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._tensor(value)}
        if isinstance(value, dict):
            return {"$dict": [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in value.items()]}
        if isinstance(value, (list, tuple, set)):
            return [self.encode(v, depth + 1) for v in value]
        if isinstance(value, Stub):
            args = [self.encode(a, depth + 1) for a in value.args]  # type: ignore[attr-defined]
            return {"$class": value.stands_for, "args": args, "state": self.encode(value.state, depth + 1)}
        return {"$text": repr(value)[:200]}

    def _tensor(self, tensor: torch.Tensor) -> str:
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in self.storages:  # the format keeps no sharing
            tensor = tensor.clone()
        self.storages.add(storage)
        key = str(len(self.tensors))
        self.tensors[key] = tensor
        return key


def read_file(path: str) -> Any:
    """The file's content, its objects as :class:`Stub`."""
    check_torch_file(path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    stubs = [(type("Stub", (Stub,), {"stands_for": name}), name) for name in names]
    with torch.serialization.safe_globals(stubs):  # type: ignore[arg-type]
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def explain(error: Exception) -> str:
    """One line; torch's advice to switch its check off is left out."""
    text = str(error).partition("WeightsUnpickler error:")
    lines = (text[2] or text[0]).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].strip()[:300]}"


def convert(source: str, stem: str) -> None:
    """Write ``stem.safetensors`` and ``stem.json`` from ``source``."""
    writer = Writer()
    skeleton = writer.encode(read_file(source))
    save_file(writer.tensors, stem + ".safetensors")
    Path(stem + ".json").write_text(json.dumps(skeleton))


def main() -> None:
    """Requests come as JSON on stdin; one line of JSON on stdout answers each."""
    request = json.load(sys.stdin)
    torch.zeros(1)  # whatever torch loads lazily, it loads before the limits
    limit(memory=request["memory"], file_bytes=request["file_bytes"], seconds=request["seconds"])
    open_doors = forbid_network_and_programs()
    print(json.dumps({"unrestricted": open_doors}), flush=True)
    for source, stem in request["files"]:
        try:
            convert(source, stem)
            answer = {"done": source}
        except Exception as error:  # one message, whatever the library raised
            answer = {"failed": source, "why": explain(error)}
        print(json.dumps(answer), flush=True)
        if "failed" in answer:
            return


if __name__ == "__main__":
    main()
