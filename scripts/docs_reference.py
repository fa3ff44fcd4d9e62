"""Write the generated pages of docs/: the commands, from their parsers, and the Python API, from its docstrings.

``python scripts/docs_reference.py`` writes docs/commands.md and docs/python-api.md, and the tables of docs/config.md
and docs/metrics.md; with ``--check`` it only names the pages that are out of date (tests/unit/test_docs.py).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COMMANDS_HEAD = """# Commands

Made by `python scripts/docs_reference.py` from the command line's own parsers. `megatron-port COMMAND --help`
prints the same. Each command takes `--debug`, which adds the traceback to an error.
"""
API_HEAD = """# Python API: functions and classes

Made by `python scripts/docs_reference.py` from the docstrings. [api.md](api.md) shows them at work. Each name
is imported from `megatron_port` itself.
"""
CONFIG_HEAD = """# Settings

Every key of a run file, as `megatron-port config fields` prints it. `--set a.b=VALUE` replaces one on the command
line, and `megatron-port config show RUN --origin` prints where each value came from.

"""


METRICS_HEAD = "| field | type | definition |\n|---|---|---|\n"
LONGEST_SIGNATURE = 600


def option_rows(parser: argparse.ArgumentParser) -> list[str]:
    """Table rows of a parser's arguments, without help and its subcommands."""
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.help == argparse.SUPPRESS:
            continue
        value = "" if action.nargs == 0 else metavar(action)
        names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
        said = (action.help or "") % {"default": action.default, "prog": "megatron-port"}
        meaning = re.sub(r"\s+", " ", said).replace("|", "\\|")
        rows.append(f"| `{'`, `'.join(n.replace('|', chr(92) + '|') for n in names)}` | {meaning} |")
    return rows


def metavar(action: argparse.Action) -> str:
    """How an argument's value is called in the help."""
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    name = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return name + (" …" if action.nargs in ("+", "*") else "")


def parsers(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """``(name, help, parser)`` of each subcommand, without those that only group others."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for group in groups:
        helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
        seen: set[int] = set()
        for word, sub in group.choices.items():
            if id(sub) in seen:
                continue  # another name of the same one
            seen.add(id(sub))
            yield f"{name} {word}", helps.get(word, ""), sub
            yield from parsers(sub, f"{name} {word}")


def commands_page() -> str:
    """docs/commands.md."""
    from megatron_port.cli.main import COMMANDS

    out = [COMMANDS_HEAD]
    for command, summary in COMMANDS.items():
        root = argparse.ArgumentParser("megatron-port")
        importlib.import_module(f"megatron_port.cli.{command}").add_parser(root.add_subparsers(dest="command"))
        out += [f"## {command}", "", f"{summary[0].upper()}{summary[1:]}.", ""]
        for name, text, parser in parsers(root, "megatron-port"):
            rows = option_rows(parser)
            if not rows and any(isinstance(a, argparse._SubParsersAction) for a in parser._actions):
                continue
            if name.count(" ") > 1:
                out += [f"### {name.removeprefix('megatron-port ')}", "", f"{text[:1].upper()}{text[1:]}.", ""]
            out += ["| argument | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(out).rstrip() + "\n"


def api_page() -> str:
    """docs/python-api.md."""
    import megatron_port

    out = [API_HEAD]
    for name in sorted(n for n in megatron_port.__all__ if n != "__version__"):
        thing = getattr(megatron_port, name)
        out += [f"## {name}", "", *described(name, thing), ""]
        if inspect.isclass(thing):
            for method, member in sorted(vars(thing).items()):
                function = getattr(member, "__func__", member)
                if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                    out += [f"### {name}.{method}", "", *described(method, function), ""]
    return "\n".join(out).rstrip() + "\n"


def described(name: str, thing: Any) -> list[str]:
    """Signature and docstring as Markdown."""
    lines = []
    if not inspect.isclass(thing) or ("__init__" in vars(thing) and not getattr(thing, "_is_protocol", False)):
        signature = re.sub(r"= <[^,)]*", "= …", str(inspect.signature(thing)))
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature).replace("megatron_port.", "")
        if len(signature) < LONGEST_SIGNATURE:  # beyond, it is the table of a configuration
            lines += ["```text", f"{name}{signature}", "```", ""]
    doc = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.getdoc(thing) or "").replace("``", "`")
    doc = re.sub(r"::\n\n((?: {4}.*\n)+)", lambda m: f":\n\n```text\n{inspect.cleandoc(m[1])}\n```\n", doc)
    doc = re.sub(r"^(Args|Returns|Raises|Yields):$", r"**\1**\n", doc, flags=re.M)
    doc = re.sub(r"\n {8,}", " ", doc)
    return [*lines, re.sub(r"^    (\S[^:\n]*):", r"- `\1`:", doc, flags=re.M)]


def config_page() -> str:
    """docs/config.md."""
    from megatron_port.cli.config import reference

    return CONFIG_HEAD + reference()


def metrics_page() -> str:
    """docs/metrics.md, written by hand but for the table of the metrics."""
    from megatron_port.ext.telemetry.step_metrics import OWN

    rows = [f"| `{m.name}` | {m.type.__name__} | {m.help} |\n" for m in OWN]
    head, rest = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").split(METRICS_HEAD)
    return head + METRICS_HEAD + "".join(rows) + rest[rest.index("\n\n") + 1:]


PAGES = {
    "commands.md": commands_page, "python-api.md": api_page, "config.md": config_page, "metrics.md": metrics_page,
}


def stale() -> list[str]:
    """Pages that differ from what would be written."""
    return [name for name, make in PAGES.items()
            if not (ROOT / "docs" / name).exists() or (ROOT / "docs" / name).read_text(encoding="utf-8") != make()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    if parser.parse_args().check:
        old = stale()
        print("\n".join(f"docs/{name} is out of date: python scripts/docs_reference.py" for name in old))
        return 1 if old else 0
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
