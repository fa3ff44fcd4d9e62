"""``checkpoint ls | verify | diff | push | pull``: look at and copy checkpoints without a model or a GPU."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.charts.numbers import quantity
from megatron_port.cli import checkpoint_convert
from megatron_port.config.urls import url_fault
from megatron_port.errors import EXIT_CHECKPOINT, EXIT_OK, CheckpointError
from megatron_port.runtime.printable import one_line

if TYPE_CHECKING:
    from megatron_port.checkpoint.format import Manifest
    from megatron_port.checkpoint.reader import Checkpoint

EXIT_DIFFER = 1
_SUBFOLDER = "checkpoints"
_SLAB = 1 << 23
_ABSENT = object()


def add_parser(subparsers: Any) -> None:
    """Add ``checkpoint`` and its actions to the program's parser."""
    parser = subparsers.add_parser("checkpoint", help="list, verify and compare checkpoints")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|verify|diff|export|import|push|pull")
    for name, text in (("ls", "checkpoints of a run, newest first"),
                       ("verify", "read and hash every block; exit 5 if one is damaged")):
        action = actions.add_parser(name, help=text)
        action.add_argument("directory", type=Path, help="a run's folder, a folder of checkpoints, or one checkpoint")
    diff = actions.add_parser(
        "diff", help="largest difference of each tensor, and settings that differ; exit 1 if tensors differ"
    )
    diff.add_argument("a", type=Path, help="a checkpoint, or a folder whose newest is taken")
    diff.add_argument("b", type=Path, help="the other")
    diff.add_argument("--kind", default="weight", help="weight, exp_avg, exp_avg_sq or all (default: weight)")
    diff.add_argument("--tolerance", type=float, default=0.0, help="differences up to this are equal (default: 0)")
    diff.add_argument("--all", action="store_true", help="also list the parameters that are equal")
    checkpoint_convert.add_actions(actions)
    copy = actions.add_parser("push", help="copy a checkpoint into a store, in parts, and read it back")
    copy.add_argument("directory", type=Path, help="the checkpoint")
    copy.add_argument("url", help="s3://bucket/folder")
    copy = actions.add_parser("pull", help="copy a checkpoint from a store; its hashes are compared")
    copy.add_argument("url", help="of one copy, or of what they were pushed to, whose newest is taken")
    copy.add_argument("directory", type=Path, help="folder that the checkpoint's is made in")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return its exit code. Raises CheckpointError where there is nothing to look at."""
    if args.action in ("export", "import"):
        return checkpoint_convert.run(args)
    if args.action in ("push", "pull"):
        return _copy(args.action, args.directory, args.url)
    if args.action == "ls":
        return _ls(args.directory)
    if args.action == "verify":
        return _verify(args.directory)
    return _diff(args.a, args.b, kind=args.kind, tolerance=args.tolerance, every=args.all)


def _copy(action: str, directory: Path, url: str) -> int:
    from megatron_port.checkpoint.mirror import pull, push

    if fault := url_fault(url, writable=True):
        raise CheckpointError(fault)
    if action == "push":
        print(f"copied {directory} to {push(directory, url)}, which reads back the same")
    else:
        print(pull(url, directory, print))
    return EXIT_OK


def _directories(directory: Path) -> list[Path]:
    """Return the checkpoint directories, complete or not, by name."""
    from megatron_port.checkpoint.format import MANIFEST, step_of

    if directory.is_dir() and ((directory / MANIFEST).exists() or step_of(directory.resolve().name) is not None):
        return [directory]
    for folder in (directory, directory / _SUBFOLDER):
        if folder.is_dir():
            found = [p for p in folder.iterdir() if step_of(p.name) is not None and p.is_dir()]
            if found:
                return sorted(found)
    raise CheckpointError(f"{directory}: no checkpoint here or in {directory / _SUBFOLDER} (step-NNNNNNNN)")


def _ls(directory: Path) -> int:
    from megatron_port.checkpoint.reader import open_checkpoint

    whole: list[tuple[Path, Manifest]] = []
    broken: list[tuple[Path, CheckpointError]] = []
    for path in _directories(directory):
        try:
            whole.append((path, open_checkpoint(path).manifest))
        except CheckpointError as error:
            broken.append((path, error))
    whole.sort(key=lambda w: w[1].order, reverse=True)
    print(
        f"{'name':<20} {'samples':>12} {'tokens':>15} {'parameters':>15} {'files':>6} {'size':>10}  {'age':>8}  "
        f"{'saved':<19}  {'state':<6}  layout"
    )
    for path, manifest in whole:
        shapes = {p.name: p.global_shape for p in manifest.pieces if p.kind == "weight"}
        size = quantity(sum(f.size for f in manifest.files.values()))
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
        print(
            f"{path.name:<20} {manifest.state.samples:>12,} {manifest.state.tokens:>15,} "
            f"{sum(prod(s) for s in shapes.values()):>15,} {len(manifest.files):>6} {size:>9}B  "
            f"{_age(time.time() - manifest.saved_at):>8}  {saved}  {'whole':<6}  {_layout(manifest)}"
        )
    for path, fault in broken:
        print(f"{path.name:<20} broken: {fault}")
    if whole:
        print("whole: manifest and sizes are right; `checkpoint verify` reads the contents")
    return EXIT_CHECKPOINT if broken and not whole else EXIT_OK


def _age(seconds: float) -> str:
    """Return an age as ``3.4 h``, in the largest unit that leaves at least one."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def _layout(manifest: Manifest) -> str:
    """Return ``tp 2 pp 4 dp 8 zero 1 deepspeed bf16``, as far as the manifest records it."""
    layout = manifest.state.layout if isinstance(manifest.state.layout, dict) else {}
    config = manifest.state.config if isinstance(manifest.state.config, dict) else {}
    short = {
        "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "virtual_pipeline_size": "vp",
        "context_parallel_size": "cp", "data_parallel_size": "dp", "zero_stage": "zero",
    }
    parts = [
        f"{name} {layout[key]}" for key, name in short.items()
        if key in layout and (name, layout[key]) not in (("vp", 1), ("cp", 1))
    ]
    precision = config.get("precision")
    dtype = precision.get("dtype") if isinstance(precision, dict) else None
    return " ".join([*parts, *(str(x) for x in (config.get("engine"), dtype) if x)]) or "-"


def _verify(directory: Path) -> int:
    from megatron_port.checkpoint.reader import open_checkpoint

    code = EXIT_OK
    for path in _directories(directory):
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            print(f"{path.name}: DAMAGED: {error}")
            code = EXIT_CHECKPOINT
            continue
        faults = 0
        for fault in checkpoint.faults():
            print(f"{path.name}: DAMAGED: {fault}", flush=True)
            faults += 1
        checkpoint.close()
        if faults:
            code = EXIT_CHECKPOINT
            continue
        files = checkpoint.manifest.files
        blocks = sum(len(f.blocks) for f in files.values())
        size = quantity(sum(f.size for f in files.values()))
        counted = f"{blocks} blocks, " if blocks else ""
        print(f"{path.name}: whole: {len(files)} files, {counted}{size}B, every hash matches")
    return code


def _newest(path: Path) -> Checkpoint:
    from megatron_port.checkpoint.reader import find_latest, open_checkpoint

    folder = path if find_latest(path) is not None else path / _SUBFOLDER
    return open_checkpoint(find_latest(folder) or path)


def _compare(a: Checkpoint, b: Checkpoint, name: str, kind: str) -> tuple[float, int]:
    """Return (largest difference, elements that differ); it is infinite where only one side is not a number."""
    from megatron_port.checkpoint.slices import slabs

    worst, count, infinite = 0.0, 0, float("inf")
    for offset, size in slabs(a.shape(name, kind), _SLAB):  # constant memory for any parameter
        x, y = (checkpoint.read(name, kind, offset, size).double() for checkpoint in (a, b))
        unequal = (x != y) & ~(x.isnan() & y.isnan())
        if unequal.any():
            delta = (x[unequal] - y[unequal]).abs().nan_to_num(nan=infinite, posinf=infinite)
            worst, count = max(worst, float(delta.max())), count + delta.numel()
    return worst, count


def _diff(path_a: Path, path_b: Path, *, kind: str, tolerance: float, every: bool) -> int:
    a, b = _newest(path_a), _newest(path_b)
    print(f"A: {a.path} (step {a.step})\nB: {b.path} (step {b.step})")
    for line in _settings(a, b):
        print(f"  setting    {line}")
    kinds = sorted({*a.kinds(), *b.kinds()}) if kind == "all" else [kind]
    if kind != "all" and kind not in {*a.kinds(), *b.kinds()}:
        raise CheckpointError(f"neither checkpoint has {kind!r}; they have {', '.join(a.kinds())}")
    differing = compared = 0
    for k in kinds:
        in_a, in_b = dict.fromkeys(a.names(k)), dict.fromkeys(b.names(k))
        for name in in_a | in_b:
            compared += 1
            verdict, differs = _verdict(a, b, name, k, tolerance, (name in in_a, name in in_b))
            differing += differs
            if differs or every:
                print(f"  {k:<10} {name:<48} {verdict}")
    print(f"{differing} of {compared} tensors differ" + (f" by more than {tolerance:g}" if tolerance else ""))
    return EXIT_DIFFER if differing else EXIT_OK


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
