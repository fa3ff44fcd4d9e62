"""The ``megatron-port`` command: find the command's module, import only that, and turn errors into exit codes.

A command is ``cli/<module>.py`` with ``add_parser(subparsers)`` and ``run(args) -> int``. A command whose
module is not there is not listed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_port import __version__
from megatron_port.errors import ConfigError, PortError
from megatron_port.runtime.permissions import tighten
from megatron_port.runtime.printable import safe_output
from megatron_port.runtime.rank_zero import is_rank_zero

if TYPE_CHECKING:
    from megatron_port.config.loader import Loaded

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train", "train a model, or resume a run"),
    "config": ("config", "show, check and explain configurations"),
    "data": ("data", "fetch, tokenize, index, verify, inspect and blend corpora"),
    "generate": ("generate", "continue prompts from a checkpoint or a Hugging Face folder"),
    "evaluate": ("evaluate", "perplexity on a corpus, and tasks of lm-eval-harness"),
    "parity": ("parity", "compare layouts with one process, gradient by gradient"),
    "doctor": ("doctor", "print the machine, versions and providers, and what is wrong with them"),
    "checkpoint": ("checkpoint", "list, verify and convert checkpoints"),
    "launch": ("launch", "write or submit the job script of a run"),
    "report": ("report", "one HTML file about a run, or several side by side"),
    "plan": ("plan", "does a run fit, how fast is it, what would be better"),
    "tune": ("tune", "find the fastest layout: planned, then measured"),
    "bench": ("bench", "measure one node for the planner; run the paper's scaling studies"),
    "preflight": ("preflight", "check the nodes of a job and the network between them"),
}
"""Name → (module in ``cli/``, one line of help)."""

EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


class Parser(argparse.ArgumentParser):
    """Argument parser that prints its usage once: under a launcher, on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message on rank 0, and exit with 2."""
        if is_rank_zero():
            self.print_usage(sys.stderr)
            print(f"error: {message}", file=sys.stderr)
        raise SystemExit(ConfigError.exit_code)

    def _print_message(self, message: str, file: Any = None) -> None:
        if is_rank_zero():
            super()._print_message(message, file)


class _Corpus(argparse.Action):
    """Action that turns ``--data A --data B`` into the ``--set`` it stands for."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from megatron_port.config.dump import toml_value

        corpora = [*getattr(namespace, self.dest), str(values)]
        setattr(namespace, self.dest, corpora)
        namespace.overrides = [*namespace.overrides, f"data.train={toml_value(corpora)}", "data.synthetic=false"]


def add_run_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the run file, ``--set`` and ``--data`` of every command that takes a run; ``load_run`` reads them."""
    parser.add_argument(
        "run_file", metavar="run.toml", nargs="?" if optional else None,
        help="run file, the name of a shipped one, e.g. runs/quickstart, or a run's folder (its config.toml)",
    )
    parser.add_argument(
        "--set", dest="overrides", metavar="a.b=VALUE", action="append", default=[],
        help="replace one value (repeatable), e.g. --set training.steps=20",
    )
    parser.add_argument(
        "--data", metavar="PREFIX", action=_Corpus, default=[],
        help="train on this .bin/.idx pair (repeatable); same as --set data.train=… and data.synthetic=false",
    )


def load_run(args: argparse.Namespace) -> Loaded:
    """Return the configuration that ``add_run_options``' arguments name. Raises ConfigError.

    What a run's folder says beyond the file in it joins ``args.overrides``: job scripts and trials name that file.
    """
    from megatron_port.config.dump import leaves, toml_value
    from megatron_port.config.loader import OF_FOLDER, load

    loaded = load(args.run_file, args.overrides)
    own = [f"{n}={toml_value(v)}" for n, v in leaves(loaded.config) if loaded.origins[n].startswith(OF_FOLDER)]
    args.overrides = [*own, *args.overrides]
    return loaded


def available_commands() -> dict[str, tuple[str, str]]:
    """Return the rows of COMMANDS whose module is installed."""
    here = Path(__file__).parent
    return {
        name: row for name, row in COMMANDS.items()
        if (here / f"{row[0]}.py").is_file() or (here / row[0] / "__init__.py").is_file()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code (``errors`` lists them, 130: interrupted).

    Whatever it prints passes through ``runtime.printable``: names in files are not commands to a terminal.
    """
    with safe_output():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    tighten()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as e:  # argparse: help, version and usage errors
        return e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except PortError as e:
        if debug:
            traceback.print_exc()
        if is_rank_zero() if e.is_reporter is None else e.is_reporter:
            from megatron_port.runtime.redact import redact

            print(f"error: {redact(str(e))}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`); Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Take out ``--debug``, which may stand anywhere before ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [a for i, a in enumerate(arguments) if i >= end or a != "--debug"], "--debug" in arguments[:end]


def _dispatch(arguments: list[str]) -> int:
    commands = available_commands()
    parser = _top_parser(commands)
    name = arguments[0] if arguments else ""
    if not name:
        parser.print_help()
        return ConfigError.exit_code
    if name.startswith("-"):
        parser.parse_args(arguments)  # --help and --version leave here
        parser.error("give a command first")
    if name not in commands:
        from megatron_port.config.loader import did_you_mean

        near = did_you_mean(name, list(commands))
        raise ConfigError(f"unknown command {name!r}; commands: {', '.join(commands)}{near}")
    module = importlib.import_module(f"megatron_port.cli.{commands[name][0]}")
    module.add_parser(parser.add_subparsers(dest="command", metavar="command"))
    return int(module.run(parser.parse_args(arguments)) or 0)


def _top_parser(commands: dict[str, tuple[str, str]]) -> Parser:
    width = max((len(name) for name in commands), default=0)
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in commands.items())
    parser = Parser(
        prog="megatron-port",
        description="Train GPT-like models with tensor, pipeline and data parallelism.",
        epilog=f"commands:\n{listing}\n\n`megatron-port COMMAND --help` explains one; --debug shows tracebacks.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-port {__version__}")
    return parser
