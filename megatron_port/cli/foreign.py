"""``megatron-port parity foreign FILE.py``: is another trainer on several ranks what it is on one process?"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import add_json, print_json
from megatron_port.core.config.ranges import expanded, local_path
from megatron_port.core.errors import EXIT_NUMERICS, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from megatron_port.tools.foreign.session import Session


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "foreign", help="compare another trainer's ranks with itself on one process",
        description="Run a trainer on one process and on several ranks of this machine, from the same weights and on "
        "the same batches, with gloo, no GPU. Compare losses, gradients by name, gradient norm, updates and outputs of "
        "modules, and say what a wrong tensor is of the right one. Exit 6 when something differs.",
        epilog="How to write an adapter, and what was found of other trainers: docs/parity-for-others.md.",
    )
    parser.add_argument("adapter", metavar="ADAPTER", nargs="?", type=expanded,
                        help="FILE.py or FILE.py:CLASS with an Adapter, or the name of a shipped one; none: list them")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N",
                        help="processes of the layout (default 2); several: --fuzz draws one of them")
    parser.add_argument("--set", dest="chosen", metavar="NAME=VALUE", action="append", default=[],
                        help="replace one option of the adapter (repeatable), e.g. --set tp=2")
    parser.add_argument("--fuzz", type=int, metavar="N", help="draw N layouts from the adapter's space")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw (default 0); the others follow")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one case; then it is hung (default 120)")
    parser.add_argument("--out", type=local_path, help="keep logs and records here; with --fuzz, draws.jsonl, whose "
                        "draws are not run again, and a script for each failure (default: here)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare; return 0 or 6."""
    from megatron_port.tools.foreign.ranks import Ranks, shipped_adapters
    from megatron_port.tools.foreign.session import Session

    if args.adapter is None:
        print("\n".join(shipped_adapters()))
        return EXIT_OK
    if args.fuzz is not None and args.fuzz < 1:
        raise ConfigError(f"--fuzz {args.fuzz}: at least 1")
    if any(n < 1 for n in args.ranks) or (len(args.ranks) > 1 and not args.fuzz):
        raise ConfigError(f"--ranks {' '.join(map(str, args.ranks))}: one number from 1; several only with --fuzz")
    with Ranks() as ranks:
        session = Session(args.adapter, ranks)
        if args.fuzz:
            return _fuzz(args, session)
        verdict = session.compare(options_of(args.chosen), args.ranks[0], folder=args.out, seconds=args.seconds)
    if args.json:
        print_json(verdict.as_json())
    else:
        print("\n".join(verdict.lines()))
    return EXIT_OK if verdict.equal else EXIT_NUMERICS


def options_of(given: Sequence[str]) -> dict[str, Any]:
    """Return ``--set``'s values; what is no Python literal is a string.

    Raises:
        ConfigError: one without a value.
    """
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals:
            raise ConfigError(f"--set {one}: NAME=VALUE is needed")
        try:
            found[name] = ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def _fuzz(args: argparse.Namespace, session: Session) -> int:
    from megatron_port.tools.foreign import fuzz

    out: Path = args.out or Path.cwd()
    out.mkdir(parents=True, exist_ok=True)
    file, fixed, rows = out / "draws.jsonl", options_of(args.chosen), []
    of = fuzz.what_is_drawn(session, args.ranks, fixed)
    done = fuzz.recorded(file, of)
    for seed in range(args.seed, args.seed + args.fuzz):
        if seed in done:
            rows.append(done[seed])
            continue
        case = fuzz.draw(session, args.ranks, seed, fixed)
        case = fuzz.run(session, case, seconds=args.seconds)
        if not case.ok:
            case = fuzz.minimised(session, case, args.ranks, seconds=args.seconds)
            script = fuzz.write_reproduction(out, args.adapter, case)
            print("\n".join([f"draw {seed}: {script}", *case.lines]), file=sys.stderr if args.json else sys.stdout)
        rows.append(fuzz.record(case, of))
        with open(file, "a") as f:
            f.write(json.dumps(rows[-1]) + "\n")
    failed = [row for row in rows if not row["equal"]]
    if args.json:
        print_json(rows)
    else:
        print(f"{len(rows) - len(failed)} of {len(rows)} draws equal; {file}")
    return EXIT_NUMERICS if failed else EXIT_OK
