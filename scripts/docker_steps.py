#!/usr/bin/env python3
"""Print the steps of a Dockerfile as a shell script, or run them in a folder that holds a root file system.

For machines without a container engine: `docker_steps.py docker/cpu.Dockerfile --root FOLDER` stands in for
`docker build` after `debootstrap` has made FOLDER, which takes the place of FROM. Every RUN is a chroot of its own
(root, a mount namespace that ends with it) with the environment that the Dockerfile gives so far and nothing else.
COPY honours .dockerignore. Layers, users, ports and health checks are not modelled: an instruction that is none of
FROM, ARG, ENV, RUN, WORKDIR, COPY, CMD is an error.

`--env` and `--bind` give a build what this host needs to reach its package index; they are no part of the image.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = ("FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "CMD")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of the mount namespace of one RUN: what a container has, and what --bind adds.
ENTER = """
set -e
root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
for pair in $BINDS; do mount --bind "${pair%%:*}" "$root${pair#*:}"; done
exec chroot "$root" "$@"
"""


class Unsupported(Exception):
    """The Dockerfile says something that is not modelled here."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, continuation lines joined."""

    line: int
    """Where it begins, counted from 1."""
    name: str
    value: str


def instructions(text: str) -> list[Instruction]:
    """Read a Dockerfile. Comments go, also those between continued lines.

    Raises:
        Unsupported: an instruction that is not one of KNOWN, a here-document, a continuation that ends the file.
    """
    out: list[Instruction] = []
    parts: list[str] = []
    start = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip() if not parts else raw.rstrip()
        if line.lstrip().startswith("#") or (not line and not parts):
            continue
        if not parts:
            start = number
        parts.append(line.removesuffix("\\"))
        if line.endswith("\\"):
            continue
        name, _, value = "\n".join(parts).strip().partition(" ")
        parts = []
        if name.upper() not in KNOWN or "<<" in value:
            raise Unsupported(f"line {start}: {name} is not modelled" + (" with <<" if "<<" in value else ""))
        out.append(Instruction(start, name.upper(), value.strip()))
    if parts:
        raise Unsupported(f"line {start}: the file ends in a continued line")
    return out


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put ``$NAME`` and ``${NAME}`` in, as ENV, ARG, COPY and WORKDIR do; a name that is not set is an error."""
    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in values:
            raise Unsupported(f"${name} is used before it is set in: {text}")
        return values[name]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def assignments(value: str, values: Mapping[str, str]) -> dict[str, str]:
    """``A=1 B="2 3"`` of ENV or ARG, with variables filled in; ``A`` alone is empty."""
    out = {}
    for word in shlex.split(value.replace("\n", " ")):
        name, _, text = word.partition("=")
        out[name] = fill(text, values)
    return out


@dataclass
class Image:
    """What the instructions so far have made of the environment."""

    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "HOME": "/root"})
    folder: str = "/"

    def values(self) -> dict[str, str]:
        """What a RUN sees."""
        return {**self.arguments, **self.environment}

    def note(self, step: Instruction, given: Mapping[str, str]) -> None:
        """Take in ARG, ENV and WORKDIR; the others change nothing here. ``given``: --build-arg."""
        if step.name == "ARG":
            self.arguments.update({k: given.get(k, v) for k, v in assignments(step.value, self.values()).items()})
        elif step.name == "ENV":
            self.environment.update(assignments(step.value, self.values()))
        elif step.name == "WORKDIR":
            self.folder = os.path.join(self.folder, fill(step.value, self.values()))


def ignored(name: str, patterns: Sequence[str]) -> bool:
    """Whether .dockerignore keeps this path (relative to the context) or a folder above it out."""
    parts = name.split("/")
    for pattern in patterns:
        words = pattern.removeprefix("**/").split("/")
        starts = range(len(parts)) if pattern.startswith("**/") else range(1)
        for start in starts:
            some = parts[start : start + len(words)]
            if len(some) == len(words) and all(map(fnmatch.fnmatchcase, some, words)):
                return True
    return False


def ignore_patterns(context: Path) -> list[str]:
    """Lines of .dockerignore."""
    file = context / ".dockerignore"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    if any(line.startswith("!") for line in found):
        raise Unsupported(".dockerignore: exceptions (!) are not modelled")
    return found


def copied(context: Path, source: str, patterns: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """(file or link, path below the target) of one source of a COPY; a folder's content goes, as docker does."""
    path = context / source
    if not path.is_symlink() and path.is_file():
        yield path, path.name
        return
    for folder, folders, files in os.walk(path):
        relative = Path(folder).relative_to(path)
        here = Path(folder).relative_to(context)
        below = [name for name in folders if not ignored((here / name).as_posix(), patterns)]
        links = [name for name in below if (Path(folder) / name).is_symlink()]
        folders[:] = [name for name in below if name not in links]
        for name in [*files, *links]:
            if not ignored((here / name).as_posix(), patterns):
                yield Path(folder) / name, (relative / name).as_posix()


def copy(root: Path, image: Image, value: str, context: Path) -> int:
    """Do a COPY into the root; the number of files.

    Raises:
        Unsupported: options, or a source that is not in the context.
    """
    *sources, target = shlex.split(fill(value, image.values()))
    if any(word.startswith("--") for word in sources) or not sources:
        raise Unsupported(f"COPY {value}")
    patterns = ignore_patterns(context)
    to = os.path.normpath(os.path.join(image.folder, target))
    count = 0
    for source in sources:
        if not (context / source).exists():
            raise Unsupported(f"COPY {value}: {source} is not in {context}")
        single = (context / source).is_file()
        for path, below in copied(context, source, patterns):
            place = to if single and len(sources) == 1 and not target.endswith("/") else os.path.join(to, below)
            out = root / place.lstrip("/")
            out.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                out.unlink(missing_ok=True)
                out.symlink_to(os.readlink(path))
            else:
                shutil.copy2(path, out)
            count += 1
    return count


def run(root: Path, image: Image, command: str, host: Mapping[str, str], binds: Sequence[str]) -> int:
    """One RUN in a chroot; its exit code."""
    for pair in binds:
        outside, _, inside = pair.partition(":")
        place = root / inside.lstrip("/")
        if Path(outside).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    (root / image.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    command_line = ["/usr/bin/env", "-i", *(f"{k}={v}" for k, v in {**image.values(), **host}.items()),
                    "/bin/sh", "-c", f"cd {shlex.quote(image.folder)} && {command}"]
    enter = ["unshare", "--mount", "sh", "-c", ENTER, "enter", str(root), *command_line]
    return subprocess.run(enter, env={"PATH": PATH, "BINDS": " ".join(binds)}, stdin=subprocess.DEVNULL).returncode


def script(steps: Sequence[Instruction], given: Mapping[str, str]) -> str:
    """The steps as a shell script to read, or to run by hand in a fresh machine."""
    image = Image()
    lines = ["set -eu"]
    for step in steps:
        image.note(step, given)
        if step.name in ("ARG", "ENV"):
            values = image.arguments if step.name == "ARG" else image.environment
            lines += [f"export {name}={shlex.quote(values[name])}" for name in assignments(step.value, image.values())]
        elif step.name == "WORKDIR":
            lines.append(f"mkdir -p {shlex.quote(image.folder)} && cd {shlex.quote(image.folder)}")
        elif step.name == "RUN":
            lines.append("( " + re.sub(r"\s*\n\s*", " ", step.value) + " )")
        else:
            lines.append(f"# {step.name} " + step.value)
    return "\n".join(lines) + "\n"


def build(
    steps: Sequence[Instruction], root: Path, context: Path, *, given: Mapping[str, str], host: Mapping[str, str],
    binds: Sequence[str], start: int = 0,
) -> int:
    """The steps from line ``start`` on in the root; 0, or the exit code of the first RUN that failed."""
    image = Image()
    for step in steps:
        image.note(step, given)
        if step.line < start:
            continue
        head = f"{step.name} " + re.sub(r"\s*\n\s*", " ", step.value)
        started = time.monotonic()
        print(f"--- line {step.line}: {head}" + (f" (here: {root})" if step.name == "FROM" else ""), flush=True)
        if step.name == "COPY":
            print(f"    {copy(root, image, step.value, context)} files", flush=True)
        elif step.name == "RUN":
            code = run(root, image, step.value.replace("\n", " "), host, binds)
            print(f"    exit {code} after {time.monotonic() - started:.0f} s", flush=True)
            if code:
                return code
    return 0


def pairs(words: Sequence[str], sign: str) -> dict[str, str]:
    """``A=1`` … as a mapping."""
    return dict(word.split(sign, 1) for word in words)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--root", type=Path, help="run the steps in this root file system (needs root)")
    parser.add_argument("--context", type=Path, default=Path("."), help="what COPY takes from")
    parser.add_argument("--build-arg", action="append", default=[], metavar="A=VALUE", help="replace an ARG's default")
    parser.add_argument("--env", action="append", default=[], metavar="A=VALUE", help="of this host, for every RUN")
    parser.add_argument("--bind", action="append", default=[], metavar="HERE:INSIDE", help="mount it for every RUN")
    parser.add_argument("--start", type=int, default=0, metavar="LINE", help="resume at this line, after a failure")
    chosen = parser.parse_args(arguments)
    try:
        steps = instructions(chosen.dockerfile.read_text())
        given = pairs(chosen.build_arg, "=")
        if chosen.root is None:
            print(script(steps, given), end="")
            return 0
        return build(steps, chosen.root.resolve(), chosen.context.resolve(), given=given,
                     host=pairs(chosen.env, "="), binds=chosen.bind, start=chosen.start)
    except (OSError, Unsupported) as error:
        print(f"docker_steps: {chosen.dockerfile}: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    raise SystemExit(main())
