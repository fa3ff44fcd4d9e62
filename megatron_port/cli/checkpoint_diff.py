"""``checkpoint diff``: the largest difference of each tensor between two checkpoints, and settings that differ."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import print_json
from megatron_port.core.config.urls import local_path
from megatron_port.core.errors import EXIT_OK, CheckpointError
from megatron_port.core.io.printable import one_line

if TYPE_CHECKING:
    from megatron_port.core.checkpoint.reader import Checkpoint

EXIT_DIFFER = 1
SUBFOLDER = "checkpoints"
_SLAB = 1 << 23
_ABSENT = object()


def newest_of(name: str) -> Path:
    """Return the checkpoint that ``name`` stands for: itself, or the newest whole one of a folder or a run.

    A folder without a whole checkpoint is returned itself: opening it says what is wrong.

    Raises:
        ConfigError: nothing of that name.
    """
    from megatron_port.core.checkpoint.reader import find_latest
    from megatron_port.core.config.run_names import run_folder_of

    path = local_path(name)
    folder = path if path.is_dir() else run_folder_of(name)
    found = (find_latest(place) for place in (folder, folder / SUBFOLDER) if place.is_dir())
    return next((one for one in found if one is not None), folder)


def _compare(a: Checkpoint, b: Checkpoint, name: str, kind: str) -> tuple[float, int]:
    """Return (largest difference, elements that differ); it is infinite where only one side is not a number."""
    from megatron_port.core.checkpoint.slices import slabs

    worst, count, infinite = 0.0, 0, float("inf")
    for offset, size in slabs(a.shape(name, kind), _SLAB):  # constant memory for any parameter
        x, y = (checkpoint.read(name, kind, offset, size).double() for checkpoint in (a, b))
        unequal = (x != y) & ~(x.isnan() & y.isnan())
        if unequal.any():
            delta = (x[unequal] - y[unequal]).abs().nan_to_num(nan=infinite, posinf=infinite)
            worst, count = max(worst, float(delta.max())), count + delta.numel()
    return worst, count


def diff(one: str, other: str, *, kind: str, tolerance: float, every: bool, as_json: bool = False) -> int:
    """Compare the newest checkpoints at two places; return 0 or 1. Raises CheckpointError."""
    from megatron_port.core.checkpoint.reader import open_checkpoint

    a, b = open_checkpoint(newest_of(one)), open_checkpoint(newest_of(other))
    if kind != "all" and kind not in {*a.kinds(), *b.kinds()}:
        raise CheckpointError(f"neither checkpoint has {kind!r}; they have {', '.join(a.kinds())}")
    settings = list(_settings(a, b))
    kinds = sorted({*a.kinds(), *b.kinds()}) if kind == "all" else [kind]
    verdicts = _verdicts(a, b, kinds, tolerance)
    if as_json:
        found = list(verdicts)
        differing = sum(differs for _, _, _, differs in found)
        print_json({
            "a": {"path": a.path, "step": a.step}, "b": {"path": b.path, "step": b.step}, "settings": settings,
            "compared": len(found), "differ": differing, "tolerance": tolerance,
            "tensors": [{"kind": k, "name": n, "verdict": text, "differs": differs} for k, n, text, differs in found
                        if differs or every],
        })
        return EXIT_DIFFER if differing else EXIT_OK
    print(f"A: {a.path} (step {a.step})\nB: {b.path} (step {b.step})")
    for line in settings:
        print(f"  setting    {line}")
    differing = compared = 0
    for k, name, text, differs in verdicts:
        compared, differing = compared + 1, differing + differs
        if differs or every:
            print(f"  {k:<10} {name:<48} {text}")
    print(f"{differing} of {compared} tensors differ" + (f" by more than {tolerance:g}" if tolerance else ""))
    return EXIT_DIFFER if differing else EXIT_OK


def _verdicts(
    a: Checkpoint, b: Checkpoint, kinds: list[str], tolerance: float
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (kind, name, verdict in words, whether it differs) of every tensor of either."""
    for k in kinds:
        in_a, in_b = dict.fromkeys(a.names(k)), dict.fromkeys(b.names(k))
        for name in in_a | in_b:
            yield k, name, *_verdict(a, b, name, k, tolerance, (name in in_a, name in in_b))


def _settings(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Yield the settings, engine scalars, tokenizer and versions that differ; no tensor differs by them."""
    for what in ("config", "layout", "scalars", "tokenizer"):
        if what == "layout" and isinstance(a.manifest.state.config, dict) and a.manifest.state.config:
            continue  # the configuration has it
        yield from _leaves(what, getattr(a.manifest.state, what), getattr(b.manifest.state, what))
    yield from _leaves("versions", dict(a.manifest.versions), dict(b.manifest.versions))


def _leaves(name: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            yield from _leaves(f"{name}.{key}", a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif a != b:
        yield f"{one_line(name):<48} {_shown(a)} in A, {_shown(b)} in B"


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else f"{value!r:.60}"


def _verdict(
    a: Checkpoint, b: Checkpoint, name: str, kind: str, tolerance: float, present: tuple[bool, bool]
) -> tuple[str, bool]:
    if not all(present):
        return f"only in {'A' if present[0] else 'B'}", True
    if a.shape(name, kind) != b.shape(name, kind):
        return f"shape {a.shape(name, kind)} in A, {b.shape(name, kind)} in B", True
    worst, count = _compare(a, b, name, kind)
    if not count:
        return "equal", False
    return f"max |a - b| {worst:.3e} ({count} of {prod(a.shape(name, kind))} elements)", worst > tolerance
