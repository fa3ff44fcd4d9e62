"""``megatron-port evaluate SOURCE --data PREFIX | --text FILE | --tasks A,B | --reference PREFIX``: how well a model
predicts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import SOURCE_HELP, ProgressBar, print_json, weights_folder
from megatron_port.cli.main import add_overrides, add_rendezvous_options, on_ranks
from megatron_port.core.config.ranges import expanded
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.io.logging import Advance, silent

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig
    from megatron_port.core.dist.rank import ProcessInfo
    from megatron_port.core.train.hooks import Session
    from megatron_port.run.weights import Weights
    from megatron_port.tools.inference.model import Samples


STDOUT = "-"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "evaluate", help="perplexity on a corpus, and tasks of lm-eval-harness",
        description="Load weights (a run folder, a step folder, or a Hugging Face folder) and measure perplexity on a "
        "corpus or a text, or run tasks of lm-eval-harness. One process by default; give another layout or engine with "
        "--set layout.… and as many ranks.",
    )
    parser.add_argument("checkpoint", type=expanded, metavar="SOURCE", help=SOURCE_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", type=expanded, metavar="PREFIX",
                      help="perplexity on this .bin/.idx pair, all of it, with the "
                      "run's masks, documents and packing")
    what.add_argument("--text", type=expanded, metavar="FILE",
                      help="perplexity on this text (UTF-8), by the model's tokenizer")
    what.add_argument("--tasks", metavar="A,B", help="tasks of lm-eval-harness (pip install lm-eval)")
    what.add_argument("--reference", type=expanded, metavar="PREFIX",
                      help="write PREFIX.reference: the log-probabilities of "
                      "a corpus' answers, which training.loss=dpo needs (docs/preferences.md)")
    parser.add_argument("--stride", type=int, default=0, metavar="N",
                        help="tokens between windows; below model.seq_length each token sees more before it (default: "
                        "seq_length)")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="only the first N tokens; 0: all")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help="windows or texts in one pass")
    parser.add_argument("--include-path", type=expanded, metavar="DIR", help="tasks: a folder with further task files")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="tasks: examples before each question")
    parser.add_argument("--limit", type=float, metavar="N", help="tasks: questions of each, or a share below 1")
    parser.add_argument("--json", type=expanded, nargs="?", const=STDOUT, metavar="FILE",
                        help="print the result as JSON instead; with FILE: write it there too")
    parser.add_argument("--ema", action="store_true", help="take the averaged weights (optimizer.ema_decay)")
    add_overrides(parser, "layout.tensor_parallel_size=2")
    add_rendezvous_options(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate; return 0."""
    if args.micro_batch_size < 1 or args.stride < 0 or args.max_tokens < 0:
        raise ConfigError(
            f"--micro-batch-size {args.micro_batch_size}, --stride {args.stride}, --max-tokens {args.max_tokens}: the "
            "first must be at least 1, the others at least 0"
        )
    preload = ["torch", "megatron_port.tools.inference.model"]
    if any(o.replace(" ", "") == "engine=deepspeed" for o in args.overrides):
        preload.append("megatron_port.ext.deepspeed.deepspeed_preload")
    return on_ranks(args, lambda info: evaluate(args, info), *preload)


def evaluate(args: argparse.Namespace, info: ProcessInfo) -> int:
    """Evaluate on one rank; return the exit code."""
    from megatron_port.run.session import open_session
    from megatron_port.run.weights import inference_config, open_weights

    weights = open_weights(weights_folder(args.checkpoint), averaged=args.ema)
    if info.rank == 0 and weights.notes:
        print(*weights.notes, sep="\n", file=sys.stderr)
    corpus = [f"data.train={json.dumps([args.data])}", "data.synthetic=false"] if args.data else []
    config = inference_config(
        weights, [*corpus, *args.overrides], info.world_size, micro_batch=args.micro_batch_size
    )
    if args.reference:
        from megatron_port.tools.inference.model import reference_config

        config = reference_config(config, args.reference, args.overrides)
    if args.tasks:
        from megatron_port.tools.inference.scoring import require_harness

        require_harness()
    with open_session(config, info, quiet=True) as session:
        made = _tasks if args.tasks else _reference if args.reference else _perplexity
        with ProgressBar("evaluate", "sample") as bar:
            result, line = made(args, session, weights, bar if session.is_rank_zero else silent)
        if session.is_rank_zero and args.json == STDOUT:
            print_json(result)
        elif session.is_rank_zero:
            session.logger.log(line)
            if args.json:
                from megatron_port.core.checkpoint.shard import write_text

                write_text(Path(args.json), json.dumps(result, indent=1, default=str) + "\n")
    return 0


def _reference(
    args: argparse.Namespace, session: Session, weights: Weights, advance: Advance
) -> tuple[dict[str, Any], str]:
    from megatron_port.core.data.indexed import reference_path
    from megatron_port.tools.inference.model import compute_reference

    header = compute_reference(args.reference, session, weights, advance)
    found = {"source": str(weights.path), "corpus": args.reference, "fingerprint": header.fingerprint,
             "dtype": header.dtype}
    return found, f"{reference_path(args.reference)}: log-probabilities by {weights.path}"


def _perplexity(
    args: argparse.Namespace, session: Session, weights: Weights, advance: Advance
) -> tuple[dict[str, Any], str]:
    from megatron_port.core.data.loader import RankView
    from megatron_port.run.build import build_engine
    from megatron_port.tools.inference.model import perplexity

    config = session.config
    samples, size = _corpus(args, config) if args.data else _text(args, weights, config)
    engine = build_engine(config, session.ctx, session.providers, initialise=False)
    engine.load_weights(weights.read)
    view = RankView.on(config, session.ctx)
    found = perplexity(
        engine, session.ctx, samples, view=view, micro_batch_size=config.batch.micro_batch_size, advance=advance
    )
    out: dict[str, Any] = {
        "source": str(weights.path), "corpus": args.data or args.text, "tokens": found.tokens, "loss": found.loss,
        "perplexity": found.perplexity, "seq_length": config.model.seq_length,
        "stride": args.stride or config.model.seq_length,
    }
    line = f"loss {found.loss:.6f} nats per token, perplexity {found.perplexity:.4f}, over {found.tokens:,} tokens"
    if args.data:
        out |= {"attention_documents": config.data.attention_documents, "packing": config.data.packing}
        line += f" (attention {config.data.attention_documents} documents, packing {config.data.packing})"
    if size:
        out["bits_per_byte"] = found.bits_per_byte(size)
        line += f"; {out['bits_per_byte']:.4f} bits per byte"
    return out, line


def _corpus(args: argparse.Namespace, config: RunConfig) -> tuple[Samples, int]:
    """Return (all of a corpus as the run's evaluation reads its own, 0)."""
    import numpy as np

    from megatron_port.core.data.indexed import IndexedDataset
    from megatron_port.core.data.loader import index_folder, within_documents
    from megatron_port.core.data.objective import Objective
    from megatron_port.ext.corpora.index_cache import IndexCache
    from megatron_port.ext.corpora.packing import PackedDataset
    from megatron_port.tools.inference.model import StreamWindows

    corpus, data, model = IndexedDataset(args.data), config.data, config.model
    Objective().check_corpora([corpus])
    if data.packing == "first_fit":
        if args.stride or args.max_tokens:
            raise ConfigError('--stride and --max-tokens cut a stream, and under data.packing = "first_fit" a sample '
                              "holds whole documents: leave them out, or add --set data.packing=none")
        return PackedDataset(corpus, first=0, end=corpus.num_documents, seq_length=model.seq_length,
                             vocab_size=model.vocab_size, cache=IndexCache(index_folder(config))), 0
    if data.mask_eod_loss and corpus.meta is None:
        raise DataError(f"data.mask_eod_loss: {corpus.prefix} has no sidecar that names its end-of-document id; "
                        "prepare it again, or add --set data.mask_eod_loss=false")
    eod = corpus.meta.eod_id if data.mask_eod_loss and corpus.meta is not None else None

    def counted(position: int, count: int) -> np.ndarray:
        mask = corpus.read_mask(position, count)
        after = np.ones(count, bool) if eod is None else corpus.read(position - 1, count) != eod
        return after if mask is None else after & mask

    tokens = min(args.max_tokens or corpus.num_tokens, corpus.num_tokens)
    return StreamWindows(
        corpus.read, tokens, model.seq_length, model.vocab_size, args.stride, counted=counted,
        documents=corpus.documents_in if within_documents(config) else None,
    ), 0


def _text(args: argparse.Namespace, weights: Weights, config: RunConfig) -> tuple[Samples, int]:
    """Return (a text, one document, its bytes or 0 if it is cut)."""
    import numpy as np

    from megatron_port.ext.corpora.tokenizer import encode_whole
    from megatron_port.tools.inference.model import StreamWindows

    try:
        data = Path(args.text).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise DataError(f"{args.text}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{args.text}: byte {error.start} is not UTF-8 ({error.reason})") from None
    ids = np.asarray(encode_whole(weights.tokenizer(config.data.tokenizer), text), dtype=np.int64)
    cut = 0 < args.max_tokens < len(ids)
    model = config.model
    windows = StreamWindows(lambda at, count: ids[at : at + count], args.max_tokens if cut else len(ids),
                            model.seq_length, model.vocab_size, args.stride)
    return windows, 0 if cut else len(data)


def _tasks(
    args: argparse.Namespace, session: Session, weights: Weights, advance: Advance
) -> tuple[dict[str, Any], str]:
    from megatron_port.tools.inference.model import InferenceModel
    from megatron_port.tools.inference.scoring import run_tasks

    tokenizer = weights.tokenizer(session.config.data.tokenizer)
    found, table = run_tasks(
        InferenceModel(session, weights.read), tokenizer, [t for t in args.tasks.split(",") if t],
        include_path=args.include_path, num_fewshot=args.num_fewshot, limit=args.limit,
        batch_size=session.config.batch.micro_batch_size, is_rank_zero=session.is_rank_zero,
    )
    return found, table  # the harness draws a bar of its own
