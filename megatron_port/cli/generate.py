"""``megatron-port generate RUN --prompt TEXT``: continue a prompt from a checkpoint, on any layout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_port.cli.train import add_rendezvous_options
from megatron_port.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from megatron_port.runtime.discovery import ProcessInfo


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "generate", help="continue a prompt from a checkpoint",
        description="Load the newest checkpoint of a run folder (or the given step folder) and continue a prompt. "
        "One process by default; give another layout with --set layout.… and as many ranks.",
    )
    parser.add_argument("checkpoint", metavar="RUN", help="run folder, or one of its checkpoints/step-N")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens at most (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest only; 0: all")
    parser.add_argument("--top-p", type=float, default=0.95, help="draw from the smallest set of this mass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", metavar="a.b=VALUE", action="append", default=[])
    add_rendezvous_options(parser)
    parser.set_defaults(run=run)


def _find(path: Path) -> tuple[Path, Path]:
    """(run folder, checkpoint folder)."""
    from megatron_port.checkpoint.reader import find_latest

    if (path / "manifest.json").is_file():
        return path.parent.parent, path
    found = find_latest(path / "checkpoints") if (path / "checkpoints").is_dir() else None
    if found is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run folder with one in checkpoints/")
    return path, found


def run(args: argparse.Namespace) -> int:
    """Generate; 0."""
    if args.tokens < 1 or args.temperature < 0.0 or not 0.0 < args.top_p <= 1.0 or args.top_k < 0:
        raise ConfigError(
            f"--tokens {args.tokens}, --temperature {args.temperature}, --top-p {args.top_p}, --top-k {args.top_k}: "
            "tokens must be at least 1, temperature and top-k at least 0, top-p in (0, 1]"
        )
    if args.nproc:
        from megatron_port.runtime.local import run_local

        return run_local(
            args.nproc, lambda info: generate(args, info),
            preload=("torch", "megatron_port.train.generation"), port=args.master_port,
        )
    from megatron_port.runtime.discovery import discover

    return generate(args, discover(master_addr=args.master_addr, master_port=args.master_port))


def generate(args: argparse.Namespace, info: ProcessInfo) -> int:
    """One rank's part."""
    from megatron_port.checkpoint.reader import open_checkpoint
    from megatron_port.config.loader import load
    from megatron_port.data.tokenizer import get_tokenizer
    from megatron_port.train.generation import Generator
    from megatron_port.train.session import open_session
    from megatron_port.train.state import check_same_model

    folder, path = _find(Path(args.checkpoint))
    neutral = [
        "engine=native", "layout.tensor_parallel_size=1", "layout.pipeline_parallel_size=1",
        "layout.data_parallel_size=0", "layout.sequence_parallel=false", "layout.pipeline_split=[]",
        "layout.zero_stage=0", "layout.pipeline_schedule=1f1b", "layout.virtual_pipeline_size=1",
        "batch.micro_batch_size=1",
        f"batch.global_batch_size={info.world_size}", "batch.rampup_start=0",
    ]
    config = load(folder / "config.toml", [*neutral, *args.overrides]).config
    checkpoint = open_checkpoint(path)
    check_same_model(checkpoint, config)
    tokenizer_name = str(checkpoint.extra.get("tokenizer") or config.data.tokenizer)
    if tokenizer_name == "auto":
        raise CheckpointError(
            f"{path} does not say which tokenizer its data used; pass --set data.tokenizer=byte or gpt2"
        )
    tokenizer = get_tokenizer(tokenizer_name)
    with open_session(config, info, quiet=True) as session:
        model = Generator(session, checkpoint.read)
        new = model.generate(
            tokenizer.encode(args.prompt), max_new_tokens=args.tokens, temperature=args.temperature,
            top_k=args.top_k, top_p=args.top_p, seed=args.seed, stop_id=tokenizer.eod_id,
        )
        if session.speaker:
            print(args.prompt + tokenizer.decode(new))
    return 0
