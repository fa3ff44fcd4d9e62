"""The code and the environment of a submission: kept, and compared with what is there when a job starts."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_port import __version__
from megatron_port.core.io.variables import variables
from megatron_port.core.package import FOLDER, ROOT
from megatron_port.run.launch_record import CODE, DIFF, RecordFault

COMMIT = "_commit"
"""File in a kept package: the commit that it is of, for a folder without .git."""
LEFT_OUT = (".mypy_cache", ".ruff_cache")
PARTS = ("megatron_port", "configs", "launch")
"""Folders of a checkout that jobs use."""
CHUNK = 1 << 24


def _git(*words: str, root: Path | None = None) -> bytes | None:
    """Output of git in the checkout; None where this is none, or git fails."""
    where = root or ROOT
    if not (where / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def commit() -> str:
    """Return the commit of this package, with ``+`` where files differ; empty: not known."""
    head = _git("rev-parse", "HEAD")
    if head is not None:
        changed = _git("status", "--porcelain", "--", *PARTS)
        return head.decode().strip() + ("+" if changed else "")
    try:
        return (FOLDER / COMMIT).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def keep_code(folder: Path, plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Copy this package, with its configurations, launch scripts and compiled kernels, into ``folder/code``.

    Modules of ``plugins`` that no installed package brings are copied beside it. In a checkout its difference from the
    commit is kept as ``code.diff``. Returns the record's ``code``. Raises OSError.
    """
    target = folder / CODE
    # Compiled modules too, so that thousands of ranks need not compile and write them.
    shutil.copytree(FOLDER, target / "megatron_port", ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in plugins:
        _keep_module(name, target)
    made = commit()
    (target / "megatron_port" / COMMIT).write_text(made + "\n", encoding="utf-8")
    difference = _git("diff", "--binary", "HEAD", "--", *PARTS)
    if difference:
        (folder / DIFF).write_bytes(difference)
    files, digest = tree_digest(target)
    return {"version": __version__, "commit": made, "files": files, "digest": digest}


def _keep_module(name: str, target: Path) -> None:
    """Copy a module that is outside of the interpreter's own folders."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    installed = [Path(sysconfig.get_path(k)).resolve() for k in ("purelib", "platlib", "stdlib")]
    if origin is None or any(origin.is_relative_to(place) for place in (*installed, FOLDER)):
        return
    if origin.name == "__init__.py":
        place = target / origin.parent.name
        shutil.copytree(origin.parent, place, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    else:
        shutil.copy2(origin, target / origin.name)


def _files(root: Path) -> Iterator[Path]:
    for folder, names, found in os.walk(root):
        names[:] = sorted(n for n in names if n != "__pycache__")
        yield from (Path(folder) / n for n in sorted(found) if not n.endswith(".pyc"))


def tree_digest(root: Path) -> tuple[int, str]:
    """Return the number of files below ``root`` and the BLAKE2b of their names and contents. Raises OSError."""
    whole, count = hashlib.blake2b(digest_size=16), 0
    for path in _files(root):
        data = path.read_bytes()
        whole.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        whole.update(data)
        count += 1
    return count, whole.hexdigest()


def check_code(folder: Path, code: Mapping[str, Any]) -> None:
    """Raise RecordFault where the kept code is not what was submitted: purged by the site, or edited."""
    try:
        files, digest = tree_digest(folder / CODE)
    except OSError as error:
        raise RecordFault(f"the code kept in {folder / CODE} cannot be read: {error.strerror}; submit again") from None
    if (files, digest) != (code.get("files"), code.get("digest")):
        raise RecordFault(
            f"the code kept in {folder / CODE} is not what was submitted: {files} files with digest {digest[:12]}, "
            f"{code.get('files')} files with {str(code.get('digest'))[:12]} were; a site may have purged it, or "
            "somebody edited it. Submit the run again"
        )


def packages() -> dict[str, str]:
    """Name → version of every distribution that this interpreter finds."""
    found: dict[str, str] = {}
    for place in dict.fromkeys(p for p in sys.path if os.path.isdir(p)):
        for entry in sorted(os.listdir(place)):
            stem, dot, kind = entry.rpartition(".")
            name, dash, version = stem.partition("-")
            if dot and dash and kind in ("dist-info", "egg-info"):
                found.setdefault(name.lower().replace("_", "-"), version.partition("-")[0])
    return found


def interpreter(python: str) -> dict[str, Any]:
    """Return the record's ``environment``: what the interpreter finds that jobs will be started with.

    Raises RecordFault: it does not start, or cannot import this package.
    """
    if os.path.exists(python) and os.path.samefile(python, sys.executable) and python == sys.executable:
        return {"python": python, "version": platform.python_version(), "packages": packages()}
    code = ("import json, platform; from megatron_port.run.sources import packages; "
            "print(json.dumps([platform.python_version(), packages()]))")
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=False,
                              env=variables(prefixes=("",)) | {"PYTHONPATH": str(ROOT)})
        version, found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        raise RecordFault(
            f"{python}, which the job would be started with, cannot run megatron_port; set launch.python or PYTHON "
            "to an interpreter that can"
        ) from None
    return {"python": python, "version": version, "packages": found}


def changed_packages(before: Mapping[str, str], now: Mapping[str, str] | None = None) -> list[str]:
    """Return ``torch 2.13.0 → 2.14.0`` for every package that is another one now."""
    now = packages() if now is None else now
    names = [n for n in sorted({*before, *now}) if before.get(n) != now.get(n) and n != "megatron-port"]
    return [f"{n} {before.get(n, 'absent')} → {now.get(n, 'absent')}" for n in names]


def file_digest(path: Path) -> str:
    """Return the BLAKE2b of a file. Raises OSError."""
    whole = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(CHUNK):
            whole.update(block)
    return whole.hexdigest()


def image_of(archive: str) -> dict[str, Any]:
    """Return the record's ``image`` of a staged archive; empty without one. Raises RecordFault."""
    if not archive:
        return {}
    path = Path(archive)
    try:
        about = path.stat()
        digest = file_digest(path)
    except OSError as error:
        raise RecordFault(f"the archive {archive} (launch.stage) cannot be read: {error.strerror}") from None
    return {"path": str(path.absolute()), "bytes": about.st_size, "mtime_ns": about.st_mtime_ns, "digest": digest}


def check_image(image: Mapping[str, Any]) -> None:
    """Raise RecordFault where the archive is another one than at submission. Reads it only if its times differ."""
    if not image.get("digest"):
        return
    path = Path(str(image.get("path", "")))
    try:
        about = path.stat()
        same = (about.st_size, about.st_mtime_ns) == (image.get("bytes"), image.get("mtime_ns"))
        if same or (about.st_size == image.get("bytes") and file_digest(path) == image["digest"]):
            return
    except OSError as error:
        raise RecordFault(f"the archive {path} (launch.stage) cannot be read: {error.strerror}") from None
    raise RecordFault(
        f"the archive {path} is not the one that was submitted ({about.st_size} bytes now, {image.get('bytes')} then, "
        f"digest {str(image['digest'])[:12]}); restore it under that name, or submit the run again"
    )

