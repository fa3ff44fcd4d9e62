"""Where a step makes the host wait for the device.

:func:`host_reads` works on any device: it sees every call that would have to bring a value to the host, and where it
stands. On a CPU a value that is there already (the step counter of torch's optimizers) counts too, so that none is a
proof and some are candidates. In backward passes it sees operations only, not ``Tensor.tolist``. :func:`device_syncs`
asks CUDA (torch's sync debug mode) and is exact.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
METHODS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"}
"""Of a tensor: the value comes to the host."""
OPS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim",
       "unique_consecutive", "bincount"}
"""Below Python: values, or sizes that depend on values."""


@dataclass(frozen=True)
class Wait:
    """One place in the code."""

    what: str
    where: str
    """FILE:LINE, relative to the checkout where it lies there."""
    calls: int


def place() -> str:
    """The innermost line on the stack that is neither torch's nor of this file."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path != Path(__file__) and "torch" not in path.parts and not frame.filename.startswith("<"):
            inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-2:])
            return f"{inside}:{frame.lineno}"
    return "?"


class _Below(TorchDispatchMode):
    def __init__(self, seen: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if name in OPS or by_mask:
            self.seen[name, place()] += 1
        return func(*args, **(kwargs or {}))


class _Above(TorchFunctionMode):
    def __init__(self, seen: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in METHODS and args and isinstance(args[0], torch.Tensor):
            self.seen[name, place()] += 1
            with _paused(self.seen):  # the op below is the same read
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _paused(seen: Counter[tuple[str, str]]) -> Iterator[None]:
    before = seen.copy()
    yield
    seen.clear()
    seen.update(before)


def host_reads(step: Callable[[], object]) -> list[Wait]:
    """Of one call of ``step``, most frequent first."""
    seen: Counter[tuple[str, str]] = Counter()
    with _Below(seen), _Above(seen):
        step()
    return [Wait(what, where, calls) for (what, where), calls in seen.most_common()]


def device_syncs(step: Callable[[], object]) -> list[Wait]:
    """What CUDA was made to wait for in one call of ``step``, by torch's sync debug mode; warmed up beforehand."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = Counter(
        f"{Path(w.filename).relative_to(ROOT) if Path(w.filename).is_relative_to(ROOT) else w.filename}:{w.lineno}"
        for w in caught if "called a synchronizing" in str(w.message)  # not that the mode is a prototype
    )
    return [Wait("sync", where, calls) for where, calls in found.most_common()]
