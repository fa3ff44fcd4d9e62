"""``compress measure | plan | run | report``: smaller models out of trained ones."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import SOURCE_HELP, ProgressBar, add_json, print_json, print_table, weights_folder
from megatron_port.cli.main import add_overrides, add_rendezvous_options, on_ranks
from megatron_port.core.config.ranges import expanded, local_path
from megatron_port.core.errors import EXIT_OK, ConfigError
from megatron_port.core.io.logging import silent

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig
    from megatron_port.core.dist.rank import ProcessInfo
    from megatron_port.tools.compress.request import Request


def add_parser(subparsers: Any) -> None:
    """Add ``compress`` and its actions to the program's parser."""
    parser = subparsers.add_parser("compress", help="make a smaller model out of a trained one")
    actions = parser.add_subparsers(dest="action", required=True, metavar="measure|plan|run|report")
    measure = actions.add_parser(
        "measure", help="how much layers, heads, MLP rows, experts and features matter",
        description="Evaluate the model on a calibration set and write the importance of its parts, which pruning "
        "reads. One process by default; give another layout with --set layout.… and as many ranks.",
    )
    measure.add_argument("source", type=expanded, metavar="SOURCE", help=SOURCE_HELP)
    measure.add_argument("--data", type=expanded, metavar="PREFIX", required=True,
                         help="the calibration set, a .bin/.idx pair")
    measure.add_argument("--samples", type=int, default=512, metavar="N",
                         help="the first N samples of seq_length tokens (default: 512; Minitron took 1,024)")
    measure.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help="samples in one pass")
    measure.add_argument("--out", type=local_path, required=True, metavar="FILE", help="e.g. importance.safetensors")
    add_overrides(measure, "layout.tensor_parallel_size=2")
    add_rendezvous_options(measure)
    plan = actions.add_parser("plan", help="parameters, FLOPs per token, memory and time of a step, before and after")
    plan.add_argument("source", type=expanded, metavar="SOURCE", help="a run file, or " + SOURCE_HELP)
    _add_method(plan)
    add_json(plan)
    add_overrides(plan, "layout.tensor_parallel_size=2")
    make = actions.add_parser(
        "run", help="write the smaller model as a checkpoint",
        description="Write OUT/step-00000000 and OUT/model.toml. `train` starts from it with "
        "checkpoint.initial_weights, on any layout, and `checkpoint export` writes it as a Hugging Face folder.",
    )
    make.add_argument("source", type=expanded, metavar="SOURCE", help=SOURCE_HELP)
    make.add_argument("out", type=local_path, metavar="OUT", help="a folder, in which step-00000000 is made")
    _add_method(make)
    report = actions.add_parser("report", help="loss against size and FLOPs of several runs, as one page")
    report.add_argument("runs", type=expanded, nargs="+", metavar="RUN",
                        help="a run's folder, its run file, or a shipped name")
    report.add_argument("--out", type=local_path, default=local_path("compression.html"), metavar="FILE.html",
                        help="the page (default: compression.html)")
    add_json(report)


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Add what may be made smaller, and how."""
    prune = parser.add_argument_group("pruning", "how many are left of each; what matters least goes")
    prune.add_argument("--importance", type=local_path, metavar="FILE", help="written by `compress measure`")
    prune.add_argument("--layers", type=int, default=0, metavar="N", help="layers")
    prune.add_argument("--drop-layers", default="", metavar="I,J", help="these go (from 0), in place of --layers")
    prune.add_argument("--heads", type=int, default=0, metavar="N", help="query heads")
    prune.add_argument("--groups", type=int, default=0, metavar="N", help="key/value heads")
    prune.add_argument("--ffn", type=int, default=0, metavar="N", help="rows of the MLP of dense layers")
    prune.add_argument("--experts", type=int, default=0, metavar="N", help="experts of a layer")
    prune.add_argument("--hidden", type=int, default=0, metavar="N", help="width of the residual stream")
    factor = parser.add_argument_group("low rank", "matrices become products of two thin ones, which are both trained")
    factor.add_argument("--factor", default="", metavar="A=R,B=R", help="qkv, output, up, down with their ranks, or "
                        "the names alone, or all, with --energy or --budget")
    factor.add_argument("--energy", type=float, default=0.0, metavar="SHARE",
                        help="least rank that keeps this share of the squared singular values in every layer")
    factor.add_argument("--budget", type=float, default=0.0, metavar="SHARE",
                        help="largest rank whose factors have at most this share of the matrix's elements")
    parser.add_argument_group("sharing").add_argument(
        "--share", type=int, default=0, metavar="N", help="N consecutive layers use one set of weights, first the mean"
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return its exit code."""
    return {"measure": _measure, "plan": _plan, "run": _run, "report": _report}[args.action](args)


def _measure(args: argparse.Namespace) -> int:
    if args.micro_batch_size < 1 or args.samples < 1:
        raise ConfigError(
            f"--micro-batch-size {args.micro_batch_size}, --samples {args.samples}: both must be at least 1"
        )
    return on_ranks(args, lambda info: measure(args, info), "torch", "megatron_port.tools.compress.importance")


def measure(args: argparse.Namespace, info: ProcessInfo) -> int:
    """Measure on one rank; return the exit code."""
    from megatron_port.core.data.indexed import IndexedDataset
    from megatron_port.core.data.loader import RankView
    from megatron_port.core.model.shapes import fingerprint
    from megatron_port.run.build import build_engine
    from megatron_port.run.session import open_session
    from megatron_port.run.weights import inference_config, open_weights
    from megatron_port.tools.compress.importance import Importance, measure_importance, write_importance
    from megatron_port.tools.inference.model import StreamWindows

    weights = open_weights(weights_folder(args.source))
    overrides = [f"data.train={json.dumps([args.data])}", "data.synthetic=false", *args.overrides]
    config = inference_config(weights, overrides, info.world_size, micro_batch=args.micro_batch_size)
    corpus, length = IndexedDataset(args.data), config.model.seq_length
    count = min(args.samples, (corpus.num_tokens - 1) // length)
    if not count:
        raise ConfigError(f"{args.data}: {corpus.num_tokens} tokens are less than one sample of {length}; give more")
    samples = StreamWindows(corpus.read, count * length + 1, length, config.model.vocab_size)
    with open_session(config, info, quiet=True) as session:
        engine = build_engine(config, session.ctx, session.providers, initialise=False)
        engine.load_weights(weights.read)
        with ProgressBar("measure", "sample") as bar:
            scores, tokens, loss = measure_importance(
                engine, session.ctx, config.model, samples, view=RankView.on(config, session.ctx),
                micro_batch_size=config.batch.micro_batch_size, advance=bar if session.is_rank_zero else silent,
            )
        if session.is_rank_zero:
            found = Importance(
                scores=scores, source=str(weights.path), fingerprint=fingerprint(config.model, weights.read),
                corpus=args.data, tokens=tokens, loss=loss,
            )
            write_importance(args.out, found)
            session.logger.log(f"{args.out}: {', '.join(sorted(scores))} over {tokens:,} tokens, loss {loss:.4f}")
    return EXIT_OK


def _request(args: argparse.Namespace) -> Request:
    from megatron_port.tools.compress.request import Request
    from megatron_port.tools.compress.selection import Sizes

    try:
        drop = tuple(int(n) for n in args.drop_layers.split(",") if n.strip())
    except ValueError:
        raise ConfigError(f"--drop-layers {args.drop_layers}: give numbers of layers, e.g. 3,4") from None
    sizes = Sizes(layers=args.layers, heads=args.heads, groups=args.groups, ffn=args.ffn, experts=args.experts,
                  hidden=args.hidden)
    return Request(sizes=sizes, drop=drop, importance=args.importance, factor=_factor(args.factor), energy=args.energy,
                   budget=args.budget, share=args.share)


def _factor(text: str) -> dict[str, int] | None:
    """Return the ranks that ``--factor`` names, 0 where it names none; empty: all linears; None: it was not given."""
    if text in ("", "all"):
        return {} if text else None
    out = {}
    for part in text.split(","):
        name, _, rank = part.strip().partition("=")
        if rank and not rank.isdecimal():
            raise ConfigError(f"--factor {text}: {rank!r} is no rank; give e.g. qkv=64,up=128, or all")
        out[name] = int(rank or 0)
    return out


def _plan(args: argparse.Namespace) -> int:
    from megatron_port.tools.compress.selection import budget_of, rows_of

    config = _described(args.source, args.overrides)
    smaller = _request(args).planned(config.model)
    before, after = budget_of(config, config.model), budget_of(config, smaller)
    if args.json:
        print_json({"before": asdict(before), "after": asdict(after), "model": asdict(smaller)})
        return EXIT_OK
    print_table(rows_of(before, after), right=(1, 2, 3))
    for told in dict.fromkeys(b.unplanned for b in (before, after) if b.unplanned):
        print(f"memory is not planned: {told}")
    if before.family and not after.family:
        print(f"{before.family} cannot say these sizes: it trains, and is not exported as a Hugging Face folder")
    return EXIT_OK


def _described(source: str, overrides: list[str]) -> RunConfig:
    """Return the run of a run file, of a run's folder, or of a checkpoint's or Hugging Face folder's model."""
    from dataclasses import replace

    from megatron_port.core.config.loader import load
    from megatron_port.run.weights import open_weights

    path = local_path(source)
    if not path.is_dir() or (path / "config.toml").is_file():
        return load(source, overrides).config
    weights = open_weights(path)
    weights.close()
    config = load(weights.run_file, overrides).config
    return replace(config, model=weights.model)


def _run(args: argparse.Namespace) -> int:
    from megatron_port.run.weights import open_weights
    from megatron_port.tools.compress.convert import convert

    source = open_weights(weights_folder(args.source))
    with ProgressBar("compress") as bar:
        model, read, provenance = _request(args).made_of(source)
        path = convert(source, model, read, args.out, provenance=provenance, note=bar.print, advance=bar)
    source.close()
    print(f"{path}: {provenance['method']}; a run starts from it with extends = [\"{args.out / 'model.toml'}\"] and "
          f"--set checkpoint.initial_weights={args.out}")
    return EXIT_OK


def _report(args: argparse.Namespace) -> int:
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.core.io.files import write_output
    from megatron_port.tools.compress.curve import as_rows, curve_page, point_of

    points = [point_of(run_folder_of(name)) for name in args.runs]
    write_output(args.out, curve_page(points))
    if args.json:
        print_json(as_rows(points))
        return EXIT_OK
    rows = [("run", "parameters", "forward FLOPs per token", "tokens", "validation loss")]
    rows += [(p.name, f"{p.parameters:,}", f"{p.forward_flops:,.0f}", f"{p.tokens:,}", f"{p.loss:.4f}") for p in points]
    print_table(rows, right=(1, 2, 3, 4))
    print(args.out)
    return EXIT_OK
