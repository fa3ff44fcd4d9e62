"""``completion bash | zsh | fish``: tab completion of commands, options, runs, shipped names and settings.

A shell calls ``megatron-port`` with the line so far, and argcomplete answers from the parser of the command in it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_port.core.errors import EXIT_OK, EnvironmentFault
from megatron_port.core.io.variables import line_to_complete

SHELLS = ("bash", "zsh", "fish")
_RUN_ARGUMENTS = ("run_file", "run", "runs", "checkpoint", "directory", "a", "b", "source")
"""Arguments that take a run, by their names in the parsers."""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "completion", help="print what makes a shell complete this command",
        description='Put `eval "$(megatron-port completion bash)"` into ~/.bashrc (zsh: the same with zsh, into '
        "~/.zshrc; fish: `megatron-port completion fish > ~/.config/fish/completions/megatron-port.fish`).",
    )
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    """Print the shell's code; return 0. Raises EnvironmentFault: argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        raise EnvironmentFault("argcomplete is not installed; run: pip install argcomplete") from None
    print(argcomplete.shellcode(["megatron-port"], shell=args.shell))
    return EXIT_OK


def complete(parser: argparse.ArgumentParser, commands: Mapping[str, str]) -> int:
    """Answer the shell; only the module of the command in the line is imported.

    Args:
        commands: name → one line of help.
    """
    from argcomplete.finders import CompletionFinder

    words = line_to_complete().split()
    named = next((word for word in words[1:] if word in commands), "")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for name, text in commands.items():
        if name == named:
            importlib.import_module(f"megatron_port.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    _set_completers(parser)
    CompletionFinder()(parser, always_complete_options=False, default_completer=None)  # it ends the process
    return EXIT_OK


def _set_completers(parser: argparse.ArgumentParser) -> None:
    action: Any
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in {id(p): p for p in action.choices.values()}.values():
                _set_completers(child)
        elif action.dest == "overrides":
            action.completer = complete_setting
        elif action.dest in _RUN_ARGUMENTS and not action.option_strings:
            action.completer = complete_run
        elif not action.choices:
            action.completer = complete_path


def complete_path(prefix: str, **_: Any) -> list[str]:
    """Return the files and folders that begin with ``prefix``."""
    folder, _slash, start = prefix.rpartition("/")
    base = Path(folder or ("/" if prefix.startswith("/") else "."))
    try:
        entries = sorted(p for p in base.iterdir() if p.name.startswith(start) and (start or p.name[0] != "."))
    except OSError:
        return []
    lead = f"{folder}/" if "/" in prefix else ""
    return [f"{lead}{p.name}{'/' if p.is_dir() else ''}" for p in entries]


def complete_run(prefix: str, **_: Any) -> list[str]:
    """Return folders, run files, and the names of shipped runs that begin with ``prefix``."""
    from megatron_port.core.config.loader import shipped_names

    shipped = [name for name in shipped_names() if name.startswith(prefix)]
    return list(dict.fromkeys([*shipped, *complete_path(prefix)]))


def complete_setting(prefix: str, **_: Any) -> Iterable[str]:
    """Return ``table.key=`` of the settings that begin with ``prefix``, or the values that a setting may have."""
    from megatron_port.core.config.choices import CHOICES
    from megatron_port.core.config.dump import leaves
    from megatron_port.core.config.schema import RunConfig

    name, given, _value = prefix.partition("=")
    if given:
        return [f"{name}={choice}" for choice in CHOICES.get(name, ())]
    return [f"{key}=" for key, _ in leaves(RunConfig()) if key.startswith(prefix)]
