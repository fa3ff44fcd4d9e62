"""Hold what pip downloads to SHA-256 hashes: ``HASHES=1 make setup``.

``constraints/hashes/packages.txt`` lists every pinned package with the hashes of its files on PyPI; ``make lock``
writes it. With HASHES=1 the first phase installs all of them by ``pip install --require-hashes --no-deps``, and
no later phase asks an index again. DeepSpeed's sources are held to their hash as well, before they are compiled.

torch is left out where TORCH_INDEX points elsewhere: a build that is not PyPI's has other hashes.
"""

from __future__ import annotations

import re
from pathlib import Path

BUILT_HERE = ("deepspeed",)
"""Compiled by setup itself, from a source archive with a hash."""
TORCH_FAMILY = re.compile(r"(torch|triton|nvidia-|cuda-)")


def entries(text: str) -> dict[str, list[str]]:
    """Entries of a hashed requirements file by package: a line per version, its continued lines joined."""
    found: dict[str, list[str]] = {}
    for entry in re.sub(r"\\\n\s*", " ", text).splitlines():
        if name := re.match(r"[A-Za-z0-9._-]+", entry):
            found.setdefault(name[0].lower(), []).append(entry)
    return found


def requirements(hashes: Path, out: Path, *, other_torch: bool) -> list[str]:
    """Arguments of ``pip install`` for the first phase; without torch's packages where another index serves them."""
    chosen = [entry for name, versions in entries(hashes.read_text()).items() for entry in versions
              if name not in BUILT_HERE and not (other_torch and TORCH_FAMILY.match(name))]
    out.write_text("\n".join(chosen) + "\n")
    return ["--require-hashes", "--prefer-binary", "-r", str(out)]


def source(hashes: Path, out: Path, name: str) -> list[str]:
    """Arguments of ``pip wheel`` for one package that is built here."""
    out.write_text("\n".join(entries(hashes.read_text())[name]) + "\n")
    return ["--require-hashes", "-r", str(out)]
