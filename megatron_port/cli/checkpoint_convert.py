"""``checkpoint export | import``: to and from Hugging Face, torch's distributed checkpoint and DeepSpeed's formats."""

from __future__ import annotations

import argparse
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron_port.cli.checkpoint_diff import newest_of
from megatron_port.cli.progress import ProgressBar
from megatron_port.core.config.plugins import import_problems
from megatron_port.core.config.urls import expanded, local_path
from megatron_port.core.errors import EXIT_OK, CheckpointError, ConfigError

if TYPE_CHECKING:
    from megatron_port.core.checkpoint.reader import Checkpoint
    from megatron_port.core.config.schema import ModelConfig

_FORMATS = ("auto", "dcp", "universal", "megatron-deepspeed", "hf")
_PLUGIN = ("--plugin",)
_PLUGIN_HELP: dict[str, Any] = {
    "action": "append", "default": [], "metavar": "MODULE",
    "help": "hf: import a module that registers a model family; may be given several times",
}


def add_actions(actions: Any) -> None:
    """Add the two actions to those of ``checkpoint``."""
    out = actions.add_parser(
        "export", help="write a checkpoint in another system's format",
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
    into = actions.add_parser(
        "import", help="read another system's checkpoint into this format",
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


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return its exit code.

    Raises CheckpointError; ConfigError for the file of ``--model``, or a plugin that cannot be loaded.
    """
    problems = import_problems(args.plugin, "--plugin")
    if problems:
        raise ConfigError(problems)
    return _export(args) if args.action == "export" else _import(args)


def _export(args: argparse.Namespace) -> int:
    from megatron_port.core.checkpoint.reader import open_checkpoint
    from megatron_port.ext.weights.averaged import AveragedCheckpoint
    from megatron_port.ext.weights.merged import MergedCheckpoint
    from megatron_port.tools.compress.plain import plain
    from megatron_port.tools.interop.export_dcp import export_dcp
    from megatron_port.tools.interop.export_universal import export_universal
    from megatron_port.tools.interop.sidecar import tuning_of

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
    from megatron_port.tools.interop.export_peft import export_peft

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
