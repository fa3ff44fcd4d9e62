"""``megatron-port config``: list what is shipped, show what a run file means, check it, print the reference of all
settings."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
import typing
from itertools import pairwise
from typing import Any

from megatron_port.cli.arguments import add_action, add_json, print_json
from megatron_port.cli.main import add_run_options, load_run
from megatron_port.core.config.checks import check, topology_sizes
from megatron_port.core.config.choices import CHOICES, plain_type
from megatron_port.core.config.dump import as_dict, leaves, to_toml, toml_value
from megatron_port.core.config.layout import model_ranks, sizes_text
from megatron_port.core.config.loader import shipped_names
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.ext.telemetry.flops import counted, document_of, model_flops
from megatron_port.run.config_hash import config_hash


def add_parser(subparsers: Any) -> None:
    """Add ``config list | show | check | fields``."""
    parser = subparsers.add_parser("config", help="show, check and explain configurations")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|check|fields")
    listed = add_action(actions, "list", list_names, help="names of the shipped runs, models and clusters")
    listed.add_argument("kind", nargs="?", default="", help="only those of one kind: runs, models, clusters, …")
    add_json(listed)
    shown = add_action(actions, "show", show, help="print the whole configuration as TOML, defaults included")
    add_json(shown)
    add_run_options(shown, optional=True)
    note = shown.add_mutually_exclusive_group()
    note.add_argument("--origin", action="store_true", help="print the origin of each value beside it")
    note.add_argument("--help-fields", action="store_true", help="print the meaning of each value beside it")
    test = add_action(actions, "check", check_run, help="check a run for a number of ranks, without starting it")
    add_run_options(test)
    test.add_argument(
        "--world-size", type=int, metavar="N",
        help="ranks; without it cluster.nodes x gpus_per_node, or what the layout multiplies to",
    )
    add_json(test)
    fields = add_action(actions, "fields", print_fields,
                        help="print every setting with its type, default and meaning (Markdown)")
    add_json(fields)


def list_names(args: argparse.Namespace) -> int:
    """Print the names of what is shipped."""
    names = [name for name in shipped_names() if name.startswith(f"{args.kind}/" if args.kind else "")]
    if not names:
        kinds = sorted({name.partition("/")[0] for name in shipped_names()})
        raise ConfigError(f"no kind {args.kind!r}; use {', '.join(kinds)}")
    if args.json:
        print_json(names)
    else:
        print("\n".join(names))
    return 0


def show(args: argparse.Namespace) -> int:
    """Print a whole configuration."""
    loaded = load_run(args)
    if args.json:
        print_json({"config": as_dict(loaded.config), "origins": loaded.origins, "files": loaded.files,
                    "config_hash": config_hash(loaded.config)})
        return 0
    notes = loaded.origins if args.origin else field_texts() if args.help_fields else None
    print(to_toml(loaded.config, notes), end="")
    return 0


def check_run(args: argparse.Namespace) -> int:
    """Check a run for a number of ranks."""
    loaded = load_run(args)
    check(loaded.config, world_size=args.world_size)
    if args.json:
        tp, pp, dp = topology_sizes(loaded.config, args.world_size)
        print_json({"name": loaded.config.name, "legal": True, "tp": tp, "pp": pp, "dp": dp,
                    "ranks": model_ranks(loaded.config.layout) * dp, "config_hash": config_hash(loaded.config)})
    else:
        print(summary(loaded.config, args.world_size))
    return 0


def print_fields(args: argparse.Namespace) -> int:
    """Print every setting."""
    if not args.json:
        print(reference(), end="")
        return 0
    defaults = dict(leaves(RunConfig()))
    print_json([{"name": name, "type": kind, "default": defaults[name], "meaning": " ".join(text.split()),
                 "choices": list(CHOICES.get(name, ()))} for name, (kind, text) in _described(RunConfig).items()])
    return 0


def summary(config: RunConfig, world_size: int | None) -> str:
    """Return one paragraph on a legal configuration: its size, its split and its batch."""
    tp, pp, dp = topology_sizes(config, world_size)
    batch, sizes = config.batch, sizes_text(tp, pp, dp, config.layout.context_parallel_size)
    step = model_flops(config.model, config.fine_tuning, document_of(config.data)) * batch.global_batch_size
    return (
        f"{config.name} is legal.\n"
        f"  model   {config.model.name}: {counted(config.model, config.fine_tuning)}\n"
        f"  layout  {sizes} = {model_ranks(config.layout) * dp} ranks, engine {config.engine}, "
        f"ZeRO-{config.layout.zero_stage}, {config.precision.dtype}, recompute {config.activations.policy}\n"
        f"  batch   {batch.global_batch_size} samples = micro-batch {batch.micro_batch_size} x "
        f"{batch.global_batch_size // (batch.micro_batch_size * dp)} accumulated x dp {dp}; "
        f"{batch.global_batch_size * config.model.seq_length:,} tokens, {step:.3e} model FLOPs per step"
    )


def field_texts() -> dict[str, str]:
    """Return the help of every leaf, by dotted name."""
    return {name: text for name, (_, text) in _described(RunConfig).items()}


def reference() -> str:
    """Return Markdown tables of every setting."""
    defaults = dict(leaves(RunConfig()))
    described = _described(RunConfig)
    lines: list[str] = []
    table = None
    for name, default in defaults.items():
        head, _, key = name.rpartition(".")
        if head != table:
            title = f"`[{head}]`" if head else "Top level"
            lines += [""] if lines else []
            lines += [f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
            table = head
        kind, text = described[name]
        choices = "" if name not in CHOICES else " (" + ", ".join(str(c) for c in CHOICES[name]) + ")"
        meaning = " ".join(text.split()).replace("|", "\\|")
        lines.append(f"| `{key}` | {kind}{choices} | `{toml_value(default)}` | {meaning} |")
    return "\n".join(lines) + "\n"


def field_help(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, by field name; fields without one are left out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    out: dict[str, str] = {}
    for statement, below in pairwise(body):
        named = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and below.value.value
        if named and isinstance(text, str):
            out[statement.target.id] = inspect.cleandoc(text)  # type: ignore[attr-defined]
    return out


def _described(cls: Any, prefix: str = "") -> dict[str, tuple[str, str]]:
    """Return type and help of every leaf, by dotted name."""
    hints, helps = typing.get_type_hints(cls), field_help(cls)
    out: dict[str, tuple[str, str]] = {}
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            out.update(_described(kind, f"{prefix}{f.name}."))
        elif typing.get_origin(kind) is tuple:
            item = plain_type(typing.get_args(kind)[0])
            name = "table" if dataclasses.is_dataclass(item) else item.__name__
            out[prefix + f.name] = (f"array of {name}", helps.get(f.name, ""))
        else:
            out[prefix + f.name] = (plain_type(kind).__name__, helps.get(f.name, ""))
    return out
