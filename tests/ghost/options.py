"""What the commands of this folder have in common: options, and the machine that they run on."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from environment import NoCudaTorch, Torch, find_torch, make_environment  # noqa: E402
from libraries import build, build_kernels  # noqa: E402
from machine import Machine  # noqa: E402


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser that has ``--python``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--python", type=Path, help="of an environment with the CUDA build of torch; none: one is made")
    return made


class Budgets:
    """A committed table of rows by name, which measured ones may not exceed.

    Args:
        over: the sentences of what a measured row has above the table's.
        write: measured rows replace the table's.
    """

    def __init__(self, path: Path, over: Callable[[str, Any, Any], list[str]], *, write: bool) -> None:
        self.path, self.over, self.write = path, over, write
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.exceeded: list[str] = []

    def hold(self, name: str, row: Any) -> None:
        """Compare a row with the table's, or write it."""
        if self.write:
            self.rows[name] = row
            self.path.write_text(json.dumps(self.rows, indent=1) + "\n")
        elif name in self.rows:
            self.exceeded += self.over(name, row, self.rows[name])
        else:
            self.exceeded.append(f"{name}: the table has no such row; --write adds it")

    def end(self) -> int:
        """Print what exceeds the table. Returns the exit code."""
        print(*self.exceeded, sep="\n")
        return int(bool(self.exceeded))


def chosen_torch(python: Path | None) -> Torch:
    """Return the torch of ``--python``. Ends the process with 3 where there is no CUDA build of it."""
    try:
        return find_torch(python.absolute() if python else make_environment(ROOT))
    except NoCudaTorch as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)


def built_for(torch: Torch) -> Path:
    """Build the machine for a torch, and the kernels; return the folder, which is kept between commands."""
    folder = ROOT / "build" / "ghost" / f"machine-{torch.version}"
    build(torch.libraries, folder)
    build_kernels(ROOT, folder / "kernels")
    return folder


@contextlib.contextmanager
def machine(torch: Torch, *, devices: int = 8, tree: Path = ROOT) -> Iterator[Machine]:
    """Yield a running machine, built first. Its folder is temporary."""
    built = built_for(torch)
    with tempfile.TemporaryDirectory() as scratch, Machine(torch.python, built, Path(scratch), devices, tree) as made:
        yield made


def commit() -> str:
    """Return the short name of the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
