"""Write constraints/ anew: resolve pyproject.toml for every supported Python at once.

Needs ``uv`` in the environment that runs it (``make lock`` installs it). The result is for
Linux and Python 3.10 to 3.14; markers say which line is for which. torch is kept in a file of
its own for each version that the tests run on, so that one can be exchanged for another.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from setup import FILES_ONLY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TORCH_VERSIONS = ("2.11.0", "2.12.0", "2.13.0")
TORCH_ONLY = re.compile(r"(torch(?!ao)|triton|nvidia-|cuda-)")
# Clauses that say only what [tool.uv] environments already says.
GIVEN = {"python_full_version < '3.15'", "platform_machine == 'x86_64'", "sys_platform == 'linux'",
         "platform_python_implementation != 'PyPy'"}
NOTE = "# Made by `make lock`; do not edit.\n"


def resolve(sources: list[str], work: Path, pin: str = "") -> list[str]:
    """The pinned lines that ``uv`` finds for ``sources``; ``pin`` is one more constraint."""
    constraint, output = work / "pin.txt", work / "out.txt"
    constraint.write_text(pin + "\n")
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.10",
               "--no-header", "--no-annotate", "--constraint", str(constraint), "--output-file", str(output)]
    subprocess.run([*command, *sources], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [shorten(line) for line in output.read_text().splitlines()]


def shorten(line: str) -> str:
    """``line`` without the clauses of its marker that hold everywhere we run."""
    entry = line.removesuffix(" \\")  # hashes follow on lines of their own
    pin, _, marker = entry.partition(" ; ")
    clauses = [clause for clause in marker.split(" and ") if clause and clause not in GIVEN]
    return (f"{pin} ; {' and '.join(clauses)}" if clauses else pin) + line[len(entry):]


def write(name: str, head: str, lines: list[str]) -> None:
    """Replace constraints/``name`` at once."""
    path = ROOT / "constraints" / name
    temporary = path.with_suffix(".tmp")
    temporary.write_text(head + NOTE + "\n".join(lines) + "\n")
    os.replace(temporary, path)
    print(f"{path.relative_to(ROOT)}: {sum('==' in line for line in lines)} pins")


def extra(name: str) -> str:
    """The requirements of one extra of pyproject.toml, a line each."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return "\n".join(tomllib.load(file)["project"]["optional-dependencies"][name])


def write_hashes(name: str, head: str, pins: list[str], work: Path) -> None:
    """Replace constraints/hashes/``name``: ``pins`` with the SHA-256 of every file that the index has of them."""
    request = work / "pins.in"
    request.write_text("\n".join(pins) + "\n")
    write(f"hashes/{name}", head, resolve([str(request), "--generate-hashes", "--no-deps"], work))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sources = ["pyproject.toml", "constraints/build.in", "--extra", "test", "--extra", "dev"]
        everything = resolve(sources, work, pin=f"torch=={TORCH_VERSIONS[-1]}")
        write("common.txt", "# All but torch and what only torch brings (torch-*.txt); Linux, Python 3.10 to 3.14.\n",
              [line for line in everything if not TORCH_ONLY.match(line)])
        for version in TORCH_VERSIONS:
            request = work / "torch.in"
            request.write_text(f"torch=={version}\n")
            lines = [line for line in resolve([str(request)], work) if TORCH_ONLY.match(line)]
            head = f"# torch {version} and what only it brings; pip takes the build that it is pointed at.\n"
            write(f"torch-{version}.txt", head, lines)
        pins = [line for line in everything if not TORCH_ONLY.match(line)] + lines + list(FILES_ONLY)
        write_hashes("packages.txt", "# HASHES=1 make setup: everything, with hashes.\n", pins, work)
        request.write_text(extra("docs") + "\n")
        site = resolve([str(request)], work)
        write_hashes("docs.txt", "# make docs: the site's packages, with hashes.\n", site, work)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
