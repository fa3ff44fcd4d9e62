"""``checkpoint list | show | rm | verify | diff | push | pull``: look at and copy checkpoints without a
model or a GPU.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import ProgressBar, add_action, add_json, add_yes, confirm, print_json, print_table
from megatron_port.core.config.choices import import_problems
from megatron_port.core.config.ranges import expanded, is_remote, local_path, url_fault
from megatron_port.core.errors import EXIT_CHECKPOINT, EXIT_OK, CheckpointError, ConfigError
from megatron_port.core.io.logging import one_line
from megatron_port.ext.telemetry.numbers import quantity

if TYPE_CHECKING:
    from megatron_port.core.checkpoint.format import Manifest
    from megatron_port.core.checkpoint.reader import Checkpoint
    from megatron_port.core.config.schema import ModelConfig


# ``checkpoint diff``: the largest difference of each tensor between two checkpoints, and settings that differ.

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
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.core.checkpoint.reader import find_latest

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


def diff(args: argparse.Namespace) -> int:
    """Compare the newest checkpoints at two places; return 0 or 1. Raises CheckpointError."""
    from megatron_port.core.checkpoint.reader import open_checkpoint

    kind, tolerance, every = args.kind, args.tolerance, args.all
    a, b = open_checkpoint(newest_of(args.a)), open_checkpoint(newest_of(args.b))
    if kind != "all" and kind not in {*a.kinds(), *b.kinds()}:
        raise CheckpointError(f"neither checkpoint has {kind!r}; they have {', '.join(a.kinds())}")
    settings = list(_settings(a, b))
    kinds = sorted({*a.kinds(), *b.kinds()}) if kind == "all" else [kind]
    verdicts = _verdicts(a, b, kinds, tolerance)
    if args.json:
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


# ``checkpoint export | import``: to and from Hugging Face, torch's distributed checkpoint and DeepSpeed's formats.

_FORMATS = ("auto", "dcp", "universal", "megatron-deepspeed", "hf")
_PLUGIN = ("--plugin",)
_PLUGIN_HELP: dict[str, Any] = {
    "action": "append", "default": [], "metavar": "MODULE",
    "help": "hf: import a module that registers a model family; may be given several times",
}


def add_actions(actions: Any) -> None:
    """Add the two actions to those of ``checkpoint``."""
    out = add_action(
        actions, "export", _export, help="write a checkpoint in another system's format",
        description="Write a checkpoint as torch.distributed.checkpoint (dcp), DeepSpeed Universal (universal) or a "
        "Hugging Face folder (hf): model.family, or the first family that computes what the model does. That is "
        "checked against transformers' logits before it appears. Adapters are written as PEFT's (peft), or merged into "
        "the weights beside which they were trained (hf).",
    )
    out.add_argument("source", type=expanded, metavar="SOURCE",
                     help="a checkpoint, or a run (folder, run file or shipped name) "
                     "whose newest is taken")
    out.add_argument("out", type=local_path, metavar="OUT", help="a new folder")
    out.add_argument("--to", required=True, choices=("dcp", "universal", "hf", "peft"), help="the format")
    out.add_argument(
        "--base", type=expanded, default="", metavar="PATH",
        help="of a checkpoint of adapters: the weights beside which they were trained, if not where the run had them",
    )
    out.add_argument("--ema", action="store_true", help="write the averaged weights (optimizer.ema_decay)")
    out.add_argument(
        "--names", choices=("megatron", "canonical"), default="megatron",
        help="universal: parameters named as Megatron-DeepSpeed's pipeline does (default), or as here",
    )
    out.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="",
        help="hf: dtype of the weights (default: as saved, the float32 masters)",
    )
    out.add_argument("--shard-size", type=float, default=5.0, metavar="GB", help="hf: largest file, 10^9 bytes (5)")
    out.add_argument(
        "--tokenizer", type=local_path, metavar="DIR",
        help="hf: folder with the files of the tokenizer trained with, if not where the run had it; another is refused",
    )
    out.add_argument("--no-tokenizer", action="store_true", help="hf: write no tokenizer")
    out.add_argument("--skip-check", action="store_true",
                     help="hf: do not compare with transformers' model; the card notes it")
    out.add_argument(*_PLUGIN, **_PLUGIN_HELP)
    into = add_action(
        actions, "import", _import, help="read another system's checkpoint into this format",
        description="Read a DCP or Universal export of ours, a Megatron-DeepSpeed checkpoint, or a Hugging Face folder "
        "(safetensors of a registered family), and commit it as OUT/step-N, from which `train` resumes "
        "(checkpoint.resume) or starts (checkpoint.initial_weights).",
    )
    into.add_argument("source", type=local_path, metavar="SOURCE", help="the checkpoint's folder")
    into.add_argument("out", type=local_path, metavar="OUT", help="a folder for checkpoints; step-N is made in it")
    into.add_argument("--from", dest="format", choices=_FORMATS, default="auto", help="the format (default: detect it)")
    into.add_argument("--model", type=expanded, metavar="FILE.toml",
                      help="a run or model file with the model that it holds")
    into.add_argument(
        "--vocab-size", type=int, default=0, metavar="N",
        help="entries of the tokenizer: Megatron saves the padded size only, which is taken otherwise",
    )
    into.add_argument("--trust-pickle", action="store_true", help="you trust the author of the source's pickles")
    into.add_argument("--skip-check", action="store_true",
                      help="hf: do not compare with transformers' model, where it is installed")
    into.add_argument("--weights-only", action="store_true", help="without the optimizer's state: step 0 of a new run")
    into.add_argument(*_PLUGIN, **_PLUGIN_HELP)


def _import_plugins(args: argparse.Namespace) -> None:
    if problems := import_problems(args.plugin, "--plugin"):
        raise ConfigError(problems)


def _export(args: argparse.Namespace) -> int:
    _import_plugins(args)
    from megatron_port.core.checkpoint.reader import open_checkpoint
    from megatron_port.ext.weights.readers import AveragedCheckpoint
    from megatron_port.run.saved_model import tuning_of
    from megatron_port.tools.compress.convert import plain
    from megatron_port.tools.interop.dcp import export_dcp
    from megatron_port.tools.interop.merged import MergedCheckpoint
    from megatron_port.tools.interop.universal import export_universal

    args.source = newest_of(args.source)
    checkpoint = open_checkpoint(args.source)
    if args.ema:
        if args.to == "universal":
            raise CheckpointError("--ema: a universal checkpoint has all state; use --to hf, dcp or peft")
        checkpoint = AveragedCheckpoint(checkpoint)
    if args.to == "peft":
        return _export_peft(args, checkpoint)
    if tuning_of(checkpoint.manifest.state.config, str(args.source)).enabled:
        if args.to != "hf":
            raise CheckpointError(f"{args.source} holds adapters, and {args.to} a whole model; use --to peft or hf")
        checkpoint = MergedCheckpoint(checkpoint, args.base)
    if args.to == "hf":
        checkpoint = plain(checkpoint)
        return _export_hf(args, checkpoint)
    if args.to == "dcp":
        export_dcp(checkpoint, args.out)
        print(f"{args.out}: step {checkpoint.step} for torch.distributed.checkpoint.load")
    else:
        export_universal(checkpoint, args.out, names=args.names)
        print(
            f"{args.out}: step {checkpoint.step} for DeepSpeed's load_checkpoint({str(args.out)!r}) with "
            '"checkpoint": {"load_universal": true}'
        )
    return EXIT_OK


def _export_peft(args: argparse.Namespace, checkpoint: Checkpoint) -> int:
    from megatron_port.run.weights import open_base
    from megatron_port.tools.interop.peft import export_peft

    family = export_peft(checkpoint, args.out, cache(lambda: open_base(checkpoint, args.base).read))
    print(f"{args.out}: step {checkpoint.step} for peft's PeftModel.from_pretrained({family} model, {str(args.out)!r})")
    return EXIT_OK


def _export_hf(args: argparse.Namespace, checkpoint: Checkpoint) -> int:
    from megatron_port.tools.interop.export_hf import export_hf

    if args.shard_size <= 0:
        raise CheckpointError(f"--shard-size {args.shard_size}: a size in GB is needed")
    if args.tokenizer and args.no_tokenizer:
        raise CheckpointError("--tokenizer and --no-tokenizer: give one of them")
    with ProgressBar("export") as bar:
        export_hf(
            checkpoint, args.out, dtype=args.dtype, tokenizer=args.tokenizer, weights_only=args.no_tokenizer,
            shard_bytes=int(args.shard_size * 1e9), check=not args.skip_check, note=bar.print, advance=bar,
        )
    print(f"{args.out}: step {checkpoint.step} for transformers' from_pretrained({str(args.out)!r})")
    return EXIT_OK


def _import(args: argparse.Namespace) -> int:
    _import_plugins(args)
    from megatron_port.tools.interop.run_import import import_checkpoint

    with ProgressBar("import") as bar:
        path = import_checkpoint(
            args.source, args.out, form=args.format, model=_model(args.model, args.vocab_size), note=bar.print,
            vocab_size=args.vocab_size, trusted=args.trust_pickle, weights_only=args.weights_only,
            check=not args.skip_check, advance=bar,
        )
    print(f"{path}: imported; `megatron-port train run.toml --set checkpoint.resume={path}` starts from it")
    if (path.parent / "model.toml").is_file():
        print(f'its model is {path.parent / "model.toml"}: name it in the run\'s extends')
    return EXIT_OK


def _model(file: str | None, vocab_size: int) -> ModelConfig | None:
    if file is None:
        return None
    from dataclasses import replace

    from megatron_port.core.config.loader import load

    model = load(file).config.model
    if vocab_size < 0:
        raise CheckpointError(f"--vocab-size {vocab_size}: a number of entries is needed")
    return replace(model, vocab_size=vocab_size) if vocab_size else model


_WHERE = "a run's folder, its run file or shipped name, a folder of checkpoints, or one checkpoint"


def add_parser(subparsers: Any) -> None:
    """Add ``checkpoint`` and its actions to the program's parser."""
    parser = subparsers.add_parser("checkpoint", help="list, verify, compare, convert and copy checkpoints")
    actions = parser.add_subparsers(dest="action", required=True,
                                    metavar="list|show|rm|verify|diff|export|import|push|pull")
    for verb, act, text in (("list", _list, "checkpoints of a run, newest first; also those in a store (s3://bucket/folder)"),
                            ("show", _show, "one checkpoint: state, layout, settings and files")):
        action = add_action(actions, verb, act, help=text)
        action.add_argument("directory", type=expanded, help=_WHERE)
        add_json(action)
    remove = add_action(actions, "rm", _remove, help="remove checkpoints, each as a whole")
    remove.add_argument("directory", type=expanded, nargs="+",
                        help="checkpoints, e.g. runs/x/checkpoints/step-00000100")
    add_yes(remove)
    action = add_action(actions, "verify", _verify, help="read and hash every block; exit 5 if one is damaged")
    action.add_argument("directory", type=expanded, help=_WHERE)
    add_json(action)
    action = add_action(
        actions, "diff", diff,
        help="largest difference of each tensor, and settings that differ; exit 1 if tensors differ",
    )
    action.add_argument("a", type=expanded, help="a checkpoint, or a run or folder whose newest is taken")
    action.add_argument("b", type=expanded, help="the other")
    action.add_argument("--kind", default="weight", help="weight, exp_avg, exp_avg_sq or all (default: weight)")
    action.add_argument("--tolerance", type=float, default=0.0, help="differences up to this are equal (default: 0)")
    action.add_argument("--all", action="store_true", help="also list parameters that are equal")
    add_json(action)
    add_actions(actions)
    copy = add_action(actions, "push", _push, help="copy a checkpoint into a store, in parts, and read it back")
    copy.add_argument("directory", type=expanded, help="the checkpoint")
    copy.add_argument("url", type=expanded, help="s3://bucket/folder")
    copy = add_action(actions, "pull", _pull, help="copy a checkpoint from a store; its hashes are compared")
    copy.add_argument("url", type=expanded, help="of one copy, or of what they were pushed to, whose newest is taken")
    copy.add_argument("directory", type=expanded, help="folder in which the checkpoint's folder is made")


def _folder(name: str) -> Path:
    """Return the folder that holds the checkpoints of what was named."""
    from megatron_port.cli.run_names import run_folder_of

    path = local_path(name)
    return path if path.exists() and not path.is_file() else run_folder_of(name)


def _push(args: argparse.Namespace) -> int:
    from megatron_port.ext.storage.mirror import push

    directory = local_path(args.directory)
    if fault := url_fault(args.url, writable=True):
        raise CheckpointError(fault)
    with ProgressBar("push") as bar:
        place = push(directory, args.url, advance=bar)
        bar.print(f"copied {directory} to {place}, which reads back the same")
    return EXIT_OK


def _pull(args: argparse.Namespace) -> int:
    from megatron_port.ext.storage.mirror import pull

    directory = local_path(args.directory)
    if fault := url_fault(args.url, writable=True):
        raise CheckpointError(fault)
    with ProgressBar("pull") as bar:
        bar.print(str(pull(args.url, directory, bar.print, advance=bar)))
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


def _list(args: argparse.Namespace) -> int:
    from megatron_port.core.checkpoint.reader import open_checkpoint

    if is_remote(args.directory):
        return _list_remote(args.directory, as_json=args.json)
    directory = _folder(args.directory)
    whole: list[tuple[Path, Manifest]] = []
    broken: list[tuple[Path, CheckpointError]] = []
    for path in directories(directory):
        try:
            whole.append((path, open_checkpoint(path).manifest))
        except CheckpointError as error:
            broken.append((path, error))
    whole.sort(key=lambda w: w[1].order, reverse=True)
    code = EXIT_CHECKPOINT if broken and not whole else EXIT_OK
    if args.json:
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


def _show(args: argparse.Namespace) -> int:
    from megatron_port.core.checkpoint.reader import find_latest, open_checkpoint

    directory = _folder(args.directory)
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
    if args.json:
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


def _remove(args: argparse.Namespace) -> int:
    """Remove checkpoints: renamed first, so that a reader never finds a part of one."""
    from megatron_port.core.checkpoint.format import step_of
    from megatron_port.run.lease import refuse_if_held

    paths = [local_path(d) for d in args.directory]
    for path in paths:
        if not path.is_dir() or path.is_symlink() or step_of(path.resolve().name) is None:
            raise CheckpointError(f"{path}: no checkpoint; give its own folder, e.g. runs/x/checkpoints/step-00000100")
        refuse_if_held(path.resolve().parent.parent)
    if not confirm(f"remove {', '.join(map(str, paths))}", yes=args.yes):
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


def _verify(args: argparse.Namespace) -> int:
    results = []
    with ProgressBar("verify") as bar:
        for path in directories(_folder(args.directory)):
            faults, what = _faults_of(path, bar)
            results.append({"name": path.name, "path": path, "faults": faults, "checked": what})
            if args.json:
                continue
            for fault in faults:
                bar.print(f"{path.name}: DAMAGED: {fault}")
            if not faults:
                bar.print(f"{path.name}: whole: {what}, every hash matches")
    if args.json:
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
