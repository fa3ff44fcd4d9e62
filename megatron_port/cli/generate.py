"""``megatron-port generate SOURCE --prompt TEXT``: continue prompts, on any layout."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import SOURCE_HELP, ProgressBar, weights_folder
from megatron_port.cli.main import add_overrides, add_rendezvous_options, on_ranks
from megatron_port.core.config.ranges import expanded
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.logging import silent

if TYPE_CHECKING:
    from megatron_port.core.dist.rank import ProcessInfo
    from megatron_port.tools.inference.generation import Sampling


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "generate", help="continue prompts from a checkpoint or a Hugging Face folder",
        description="Load the newest checkpoint of a run folder, the given step folder, or a Hugging Face folder, and "
        "continue prompts. One process by default; give another layout with --set layout.… and as many ranks.",
    )
    parser.add_argument("checkpoint", type=expanded, metavar="SOURCE", help=SOURCE_HELP)
    parser.add_argument("--prompt", action="append", default=[], help="text to continue (repeatable)")
    parser.add_argument("--prompts", type=expanded, metavar="FILE", help="file with one text to continue per line")
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message: the model's chat template "
                        "stands around it, and the answer alone is printed")
    parser.add_argument("--tokens", type=int, default=100, help="most new tokens (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw only from the k most likely; 0: all")
    parser.add_argument("--top-p", type=float, default=0.95, help="draw from the smallest set with this probability")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts in one pass (default 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt (always with several prompts)")
    parser.add_argument("--ema", action="store_true", help="take the averaged weights (optimizer.ema_decay)")
    add_overrides(parser, "layout.tensor_parallel_size=2")
    add_rendezvous_options(parser)


def run(args: argparse.Namespace) -> int:
    """Generate; return 0."""
    from megatron_port.tools.inference.generation import Sampling

    sampling = Sampling(
        max_new_tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed,
        stop_strings=tuple(args.stop),
    )
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size {args.batch_size}: at least 1")
    prompts = [*args.prompt, *_lines(args.prompts)]
    if not prompts:
        raise ConfigError("nothing to continue: give --prompt TEXT or --prompts FILE")
    rank_main = partial(generate, args, prompts, sampling)
    return on_ranks(args, rank_main, "torch", "megatron_port.tools.inference.generation")


def _lines(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from None


def generate(args: argparse.Namespace, prompts: list[str], sampling: Sampling, info: ProcessInfo) -> int:
    """Generate on one rank; return the exit code."""
    from dataclasses import replace

    from megatron_port.ext.corpora.tokenizer import encode_whole
    from megatron_port.run.session import open_session
    from megatron_port.run.weights import inference_config, open_weights
    from megatron_port.tools.inference.generation import Generator
    from megatron_port.tools.inference.model import InferenceModel

    weights = open_weights(weights_folder(args.checkpoint), averaged=args.ema)
    if info.rank == 0 and weights.notes:
        print(*weights.notes, sep="\n", file=sys.stderr)
    config = inference_config(weights, args.overrides, info.world_size)
    tokenizer = weights.tokenizer(config.data.tokenizer)
    chat = weights.chat(tokenizer) if args.chat else None
    ends = chat.stop_ids if chat else ()
    sampling = replace(sampling, stop_ids=tuple(dict.fromkeys((*weights.stop_ids(tokenizer), *ends))))
    encoded = [chat.prompt(tokenizer, p) if chat else encode_whole(tokenizer, p) for p in prompts]
    with open_session(config, info, quiet=True) as session:
        generator = Generator(InferenceModel(session, weights.read), tokenizer.decode)
        with ProgressBar("generate", "token") as bar:
            advance = bar if session.is_rank_zero else silent
            found = generator.generate(encoded, sampling, batch_size=args.batch_size, advance=advance)
        if not session.is_rank_zero:
            return 0
        for prompt, new in zip(prompts, found):
            if args.json or len(prompts) > 1:
                body = {"prompt": prompt, "text": new.text, "tokens": new.tokens, "stopped": new.stopped}
                print(json.dumps(body, ensure_ascii=False))
            else:
                print((new.text or "").lstrip(" ") if chat else f"{prompt}{new.text}")
    return 0
