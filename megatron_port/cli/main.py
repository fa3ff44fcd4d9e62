"""The ``megatron-port`` command: find the command's module, import only that, and turn errors into exit codes.

A command is ``cli/<name>.py`` with ``add_parser(subparsers)``, and ``run(args) -> int`` where its actions do not name
what to run (``arguments.add_action``).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_port import __version__
from megatron_port.core.config.ranges import expanded
from megatron_port.core.errors import ConfigError, PortError
from megatron_port.core.io.files import tighten
from megatron_port.core.io.logging import safe_output
from megatron_port.core.io.variables import completing
from megatron_port.run.launchers import is_rank_zero

if TYPE_CHECKING:
    from megatron_port.core.config.loader import Loaded
    from megatron_port.core.dist.rank import ProcessInfo

COMMANDS = {
    "train": "train a model, or resume a run",
    "config": "list, show, check and explain configurations",
    "data": "fetch, tokenize, index, verify, inspect and blend corpora",
    "generate": "continue prompts from a checkpoint or a Hugging Face folder",
    "evaluate": "perplexity on a corpus, and tasks of lm-eval-harness",
    "distill": "compute a teacher's predictions ahead of training",
    "parity": "compare layouts with one process, gradient by gradient",
    "foreign": "compare another trainer's ranks with itself on one process",
    "doctor": "print the machine, versions and providers, and what is wrong with them",
    "checkpoint": "list, verify, compare, convert and copy checkpoints",
    "compress": "make a smaller model out of a trained one",
    "launch": "submit runs to a scheduler, see their state, cancel them",
    "runs": "list, show and remove runs",
    "watch": "a live page of a run, in a browser",
    "report": "one HTML file about a run, or several side by side",
    "plan": "does a run fit, how fast is it, what would be better",
    "tune": "find the fastest layout: planned, then measured",
    "bench": "measure one node for the planner; run the paper's scaling studies",
    "chaos": "kill ranks of a run on purpose, and report what it cost",
    "preflight": "check the nodes of a job and the network between them",
    "completion": "print what makes a shell complete this command",
}
"""Name of the command and of its module → one line of help."""

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
        from megatron_port.core.config.dump import toml_value

        corpora = [*getattr(namespace, self.dest), str(values)]
        setattr(namespace, self.dest, corpora)
        namespace.overrides = [*namespace.overrides, f"data.train={toml_value(corpora)}", "data.synthetic=false"]


def add_run_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the run file, ``--set`` and ``--data`` of every command that takes a run; ``load_run`` reads them."""
    parser.add_argument(
        "run_file", type=expanded, metavar="RUN", nargs="?" if optional else None,
        help="run file, the name of a shipped one, e.g. runs/quickstart, or a run's folder (its config.toml)",
    )
    add_overrides(parser, "training.steps=20")
    parser.add_argument(
        "--data", metavar="PREFIX", action=_Corpus, default=[],
        help="train on this .bin/.idx pair (repeatable); same as --set data.train=… and data.synthetic=false",
    )


def add_overrides(parser: argparse.ArgumentParser, example: str) -> None:
    """Add ``--set``, which ``args.overrides`` collects."""
    parser.add_argument("--set", dest="overrides", metavar="a.b=VALUE", action="append", default=[],
                        help=f"replace one value (repeatable), e.g. --set {example}")


def add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--master-addr``, ``--master-port`` and ``--nproc``, which every command on several ranks has."""
    parser.add_argument("--master-addr", help="host of rank 0; overrides the launcher's")
    parser.add_argument("--master-port", type=int, help="port of rank 0; overrides the launcher's")
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine (instead of torchrun)")


def on_ranks(args: argparse.Namespace, rank_main: Callable[[ProcessInfo], int], *preload: str) -> int:
    """Return ``rank_main``'s exit code for this process's rank, or with ``--nproc`` of ranks that are started here.

    ``preload``: modules that the ranks need, imported once before they are forked.
    """
    if args.nproc:
        from megatron_port.run.local_ranks import run_local

        return run_local(args.nproc, rank_main, preload=preload, port=args.master_port)
    from megatron_port.run.discovery import discover

    return rank_main(discover(master_addr=args.master_addr, master_port=args.master_port))


def load_run(args: argparse.Namespace) -> Loaded:
    """Return the configuration that ``add_run_options``' arguments name. Raises ConfigError.

    What a run's folder says beyond the file in it joins ``args.overrides``: job scripts and trials name that file.
    """
    from megatron_port.core.config.dump import leaves, toml_value
    from megatron_port.core.config.loader import OF_FOLDER, load
    from megatron_port.core.io.variables import handed_files

    loaded = load(args.run_file, args.overrides, texts=handed_files())
    own = [f"{n}={toml_value(v)}" for n, v in leaves(loaded.config) if loaded.origins[n].startswith(OF_FOLDER)]
    args.overrides = [*own, *args.overrides]
    return loaded


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code (``errors`` lists them, 130: interrupted).

    Whatever it prints passes through ``io.logging``: names in files are not commands to a terminal.
    """
    with safe_output():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    tighten()
    return exit_code_of(lambda: _dispatch(without_local_rank(arguments)), debug=debug)


def exit_code_of(call: Callable[[], int], *, debug: bool = False) -> int:
    """Return the exit code of ``call()``; an error is reported in one message instead of raised.

    One that nobody foresaw says where its traceback was written. ``debug``: tracebacks are printed.
    """
    try:
        code = call()
        sys.stdout.flush()
        return code
    except SystemExit as e:  # argparse: help, version and usage errors
        return e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except PortError as e:
        return _reported(e, debug)
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`); Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except Exception as e:
        from megatron_port.core.io.logging import unexpected

        return _reported(unexpected(e), debug)


def _reported(error: PortError, debug: bool) -> int:
    """Print an error in one message, where this process is the one to print it; return its exit code."""
    if debug:
        traceback.print_exception(type(error), error, error.__traceback__)
    if is_rank_zero() if error.is_reporter is None else error.is_reporter:
        from megatron_port.core.io.logging import redact

        print(f"error: {redact(str(error))}", file=sys.stderr)
    return error.exit_code


def without_local_rank(arguments: list[str]) -> list[str]:
    """Take out the ``--local_rank=N`` that deepspeed --module and torch.distributed.launch put ahead of the command.

    They set LOCAL_RANK, too, which ``discovery`` reads.

    Raises:
        ConfigError: it is no number.
    """
    first, equals, value = arguments[0].partition("=") if arguments else ("", "", "")
    if first not in ("--local_rank", "--local-rank"):
        return arguments
    value, rest = (value, arguments[1:]) if equals else ("".join(arguments[1:2]), arguments[2:])
    if not value.isdecimal():
        raise ConfigError(f"{first} {value!r}: a launcher gives the number of a rank on its node")
    return rest


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Take out ``--debug``, which may stand anywhere before ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [a for i, a in enumerate(arguments) if i >= end or a != "--debug"], "--debug" in arguments[:end]


def _dispatch(arguments: list[str]) -> int:
    parser = _top_parser()
    if completing():
        from megatron_port.cli.completion import complete

        return complete(parser, COMMANDS)
    arguments = command_of(arguments)
    name = arguments[0] if arguments else ""
    if not name:
        parser.print_help()
        return ConfigError.exit_code
    if name.startswith("-"):
        parser.parse_args(arguments)  # --help and --version leave here
        parser.error("give a command first")
    if name not in COMMANDS:
        raise ConfigError(_unknown(name))
    module = importlib.import_module(f"megatron_port.cli.{name}")
    module.add_parser(parser.add_subparsers(dest="command", metavar="command"))
    args = parser.parse_args(arguments)
    return int((module.run if hasattr(module, "run") else args.act)(args) or 0)


def command_of(arguments: list[str]) -> list[str]:
    """Return the arguments with the command that ``parity foreign`` stands for: its options are others."""
    return arguments[1:] if arguments[:2] == ["parity", "foreign"] else arguments


def _unknown(name: str) -> str:
    from megatron_port.core.config.loader import did_you_mean
    from megatron_port.ext.advice import elsewhere as unsupported

    refused = unsupported.not_supported(name, of="command")
    if refused:
        return f"command {name!r}{refused}; commands: {', '.join(COMMANDS)}"
    return f"unknown command {name!r}; commands: {', '.join(COMMANDS)}{did_you_mean(name, list(COMMANDS))}"


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="megatron-port",
        description="Train GPT-like models with tensor, pipeline and data parallelism.",
        epilog=f"commands:\n{listing}\n\n`megatron-port COMMAND --help` explains one; --debug shows tracebacks.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-port {__version__}")
    return parser
