"""``checkpoint list | show | rm | verify | diff | push | pull``: look at and copy checkpoints without a
model or a GPU."""

from __future__ import annotations

import argparse
import shutil
import time
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli import checkpoint_convert
from megatron_port.cli.arguments import add_json, add_verb, add_yes, confirm, print_json, print_table, verb_of
from megatron_port.cli.checkpoint_diff import SUBFOLDER, diff
from megatron_port.cli.progress import ProgressBar
from megatron_port.core.config.urls import expanded, is_remote, local_path, url_fault
from megatron_port.core.errors import EXIT_CHECKPOINT, EXIT_OK, CheckpointError
from megatron_port.core.io.numbers import quantity

if TYPE_CHECKING:
    from megatron_port.core.checkpoint.format import Manifest

_WHERE = "a run's folder, its run file or shipped name, a folder of checkpoints, or one checkpoint"


def add_parser(subparsers: Any) -> None:
    """Add ``checkpoint`` and its actions to the program's parser."""
    parser = subparsers.add_parser("checkpoint", help="list, verify, compare, convert and copy checkpoints")
    actions = parser.add_subparsers(dest="action", required=True,
                                    metavar="list|show|rm|verify|diff|export|import|push|pull")
    for verb, text in (("list", "checkpoints of a run, newest first; also those in a store (s3://bucket/folder)"),
                       ("show", "one checkpoint: state, layout, settings and files")):
        action = add_verb(actions, verb, help=text)
        action.add_argument("directory", type=expanded, help=_WHERE)
        add_json(action)
    remove = add_verb(actions, "rm", help="remove checkpoints, each as a whole")
    remove.add_argument("directory", type=expanded, nargs="+",
                        help="checkpoints, e.g. runs/x/checkpoints/step-00000100")
    add_yes(remove)
    action = actions.add_parser("verify", help="read and hash every block; exit 5 if one is damaged")
    action.add_argument("directory", type=expanded, help=_WHERE)
    add_json(action)
    action = actions.add_parser(
        "diff", help="largest difference of each tensor, and settings that differ; exit 1 if tensors differ"
    )
    action.add_argument("a", type=expanded, help="a checkpoint, or a run or folder whose newest is taken")
    action.add_argument("b", type=expanded, help="the other")
    action.add_argument("--kind", default="weight", help="weight, exp_avg, exp_avg_sq or all (default: weight)")
    action.add_argument("--tolerance", type=float, default=0.0, help="differences up to this are equal (default: 0)")
    action.add_argument("--all", action="store_true", help="also list parameters that are equal")
    add_json(action)
    checkpoint_convert.add_actions(actions)
    copy = actions.add_parser("push", help="copy a checkpoint into a store, in parts, and read it back")
    copy.add_argument("directory", type=expanded, help="the checkpoint")
    copy.add_argument("url", type=expanded, help="s3://bucket/folder")
    copy = actions.add_parser("pull", help="copy a checkpoint from a store; its hashes are compared")
    copy.add_argument("url", type=expanded, help="of one copy, or of what they were pushed to, whose newest is taken")
    copy.add_argument("directory", type=expanded, help="folder in which the checkpoint's folder is made")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return its exit code. Raises CheckpointError where there is nothing to look at."""
    action = verb_of(args.action)
    if action in ("export", "import"):
        return checkpoint_convert.run(args)
    if action in ("push", "pull"):
        return _copy(action, local_path(args.directory), args.url)
    if action == "rm":
        return _remove([local_path(d) for d in args.directory], yes=args.yes)
    if action == "diff":
        return diff(args.a, args.b, kind=args.kind, tolerance=args.tolerance, every=args.all,
                    as_json=args.json)
    if action == "list" and is_remote(args.directory):
        return _list_remote(args.directory, as_json=args.json)
    return {"list": _list, "show": _show, "verify": _verify}[action](_folder(args.directory), as_json=args.json)


def _folder(name: str) -> Path:
    """Return the folder that holds the checkpoints of what was named."""
    from megatron_port.core.config.run_names import run_folder_of

    path = local_path(name)
    return path if path.exists() and not path.is_file() else run_folder_of(name)


def _copy(action: str, directory: Path, url: str) -> int:
    from megatron_port.ext.storage.mirror import pull, push

    if fault := url_fault(url, writable=True):
        raise CheckpointError(fault)
    with ProgressBar(action) as bar:
        if action == "push":
            place = push(directory, url, advance=bar)
            bar.print(f"copied {directory} to {place}, which reads back the same")
        else:
            bar.print(str(pull(url, directory, bar.print, advance=bar)))
    return EXIT_OK


def directories(directory: Path) -> list[Path]:
    """Return the checkpoint directories, complete or not, by name. Raises CheckpointError: there is none."""
    from megatron_port.core.checkpoint.format import MANIFEST, step_of

    if directory.is_dir() and ((directory / MANIFEST).exists() or step_of(directory.resolve().name) is not None):
        return [directory]
    for folder in (directory, directory / SUBFOLDER):
        if folder.is_dir():
            found = [p for p in folder.iterdir() if step_of(p.name) is not None and p.is_dir()]
            if found:
                return sorted(found)
    raise CheckpointError(f"{directory}: no checkpoint here or in {directory / SUBFOLDER} (step-NNNNNNNN)")


def _list(directory: Path, *, as_json: bool) -> int:
    from megatron_port.core.checkpoint.reader import open_checkpoint

    whole: list[tuple[Path, Manifest]] = []
    broken: list[tuple[Path, CheckpointError]] = []
    for path in directories(directory):
        try:
            whole.append((path, open_checkpoint(path).manifest))
        except CheckpointError as error:
            broken.append((path, error))
    whole.sort(key=lambda w: w[1].order, reverse=True)
    code = EXIT_CHECKPOINT if broken and not whole else EXIT_OK
    if as_json:
        print_json([*({**_summary(path, m), "state": "whole"} for path, m in whole),
                    *({"name": path.name, "path": path, "state": "broken", "fault": str(e)} for path, e in broken)])
        return code
    print(
        f"{'name':<20} {'samples':>12} {'tokens':>15} {'parameters':>15} {'files':>6} {'size':>10}  {'age':>8}  "
        f"{'saved':<19}  {'state':<6}  layout"
    )
    for path, manifest in whole:
        one = _summary(path, manifest)
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
        print(
            f"{path.name:<20} {one['samples']:>12,} {one['tokens']:>15,} {one['parameters']:>15,} {one['files']:>6} "
            f"{quantity(one['bytes']):>9}B  {_age(time.time() - manifest.saved_at):>8}  {saved}  {'whole':<6}  "
            f"{one['layout']}"
        )
    for path, fault in broken:
        print(f"{path.name:<20} broken: {fault}")
    if whole:
        print("whole: manifest and sizes are right; `checkpoint verify` reads the contents")
    return code


def _summary(path: Path, manifest: Manifest) -> dict[str, Any]:
    shapes = {p.name: p.global_shape for p in manifest.pieces if p.kind == "weight"}
    return {
        "name": path.name, "path": path, "step": manifest.state.step, "samples": manifest.state.samples,
        "tokens": manifest.state.tokens, "parameters": sum(prod(s) for s in shapes.values()),
        "files": len(manifest.files), "bytes": sum(f.size for f in manifest.files.values()),
        "saved_at": manifest.saved_at, "layout": _layout(manifest),
    }


def _list_remote(url: str, *, as_json: bool) -> int:
    from megatron_port.ext.storage.mirror import copies

    if fault := url_fault(url):
        raise CheckpointError(fault)
    found = copies(url)
    if as_json:
        print_json([{"name": name, "url": place} for name, place in found])
    else:
        print_table([("name", "URL"), *found])
    return EXIT_OK


def _show(directory: Path, *, as_json: bool) -> int:
    from megatron_port.core.checkpoint.reader import find_latest, open_checkpoint

    found = directories(directory)
    path = found[0] if found == [directory] else find_latest(found[0].parent)
    if path is None:
        raise CheckpointError(f"{directory}: none of {len(found)} checkpoints is complete; `checkpoint list` shows why")
    checkpoint = open_checkpoint(path)
    state = checkpoint.manifest.state
    body = {
        **_summary(path, checkpoint.manifest), "kinds": list(checkpoint.kinds()), "scalars": dict(state.scalars),
        "tokenizer": state.tokenizer, "versions": dict(checkpoint.manifest.versions),
        "config_hash": state.config_hash,
        "file_bytes": {name: entry.size for name, entry in checkpoint.manifest.files.items()},
    }
    if as_json:
        print_json({**body, "config": state.config})
        return EXIT_OK
    for key, value in body.items():
        shown = f"{value:,}" if type(value) is int else value
        if isinstance(value, dict):
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) or "-"
        elif isinstance(value, list):
            shown = ", ".join(map(str, value))
        elif key == "saved_at":
            shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        print(f"{key.replace('_', ' '):<12} {shown}")
    return EXIT_OK


def _remove(paths: list[Path], *, yes: bool) -> int:
    """Remove checkpoints: renamed first, so that a reader never finds a part of one."""
    from megatron_port.core.checkpoint.format import step_of
    from megatron_port.core.dist.lease import refuse_if_held

    for path in paths:
        if not path.is_dir() or path.is_symlink() or step_of(path.resolve().name) is None:
            raise CheckpointError(f"{path}: no checkpoint; give its own folder, e.g. runs/x/checkpoints/step-00000100")
        refuse_if_held(path.resolve().parent.parent)
    if not confirm(f"remove {', '.join(map(str, paths))}", yes=yes):
        return EXIT_OK
    for path in paths:
        gone = path.with_name(f".{path.name}.removed.tmp")
        try:
            path.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed ({error.strerror or error})") from error
        print(f"removed {path}")
    return EXIT_OK


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


def _verify(directory: Path, *, as_json: bool) -> int:
    results = []
    with ProgressBar("verify") as bar:
        for path in directories(directory):
            faults, what = _faults_of(path, bar)
            results.append({"name": path.name, "path": path, "faults": faults, "checked": what})
            if as_json:
                continue
            for fault in faults:
                bar.print(f"{path.name}: DAMAGED: {fault}")
            if not faults:
                bar.print(f"{path.name}: whole: {what}, every hash matches")
    if as_json:
        print_json(results)
    return EXIT_CHECKPOINT if any(one["faults"] for one in results) else EXIT_OK


def _faults_of(path: Path, bar: ProgressBar) -> tuple[list[str], str]:
    """Return what is wrong with a checkpoint, and what was read."""
    from megatron_port.core.checkpoint.reader import open_checkpoint

    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return [str(error)], ""
    faults = list(checkpoint.faults(bar))
    checkpoint.close()
    files = checkpoint.manifest.files
    blocks = sum(len(f.blocks) for f in files.values())
    counted = f"{blocks} blocks, " if blocks else ""
    return faults, f"{len(files)} files, {counted}{quantity(sum(f.size for f in files.values()))}B"
