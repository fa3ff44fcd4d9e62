"""A relocatable image of an environment: interpreter, standard library, packages. ``STAGE`` copies it to the nodes.

The archive is a tar of parts (``parts/00.tar.zst`` …) of about equal size, so that a node unpacks it with all its cores
(launch/stage.sh). Python finds its own library beside its executable, wherever that is; what a virtual environment's
links and ``pyvenv.cfg`` would pin to a path is left behind. Nothing is compiled: the modules' compiled forms go along.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.errors import ConfigError, EnvironmentFault

PARTS = 32
"""More than most unpack at once, so that the last one is short."""
SKIPPED = {"test", "tests", "idlelib", "turtledemo", "ensurepip", "lib2to3"}
"""Folders of the standard library that no rank imports."""


@dataclass(frozen=True)
class ImageFile:
    """A file of the image."""

    source: Path
    name: str
    """Path in the image."""
    size: int


@dataclass(frozen=True)
class Image:
    """Archive that was written, and its size."""

    path: Path
    files: int
    unpacked: int
    """Bytes."""
    packed: int


def environment_files() -> Iterator[ImageFile]:
    """Yield all files of this interpreter's environment: links are followed, so nothing leads out of the image."""
    base, version = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    executable = (base / "bin" / version).resolve()
    if not executable.is_file():
        raise EnvironmentFault(f"{executable} is not there: this Python has no bin/{version} to take along")
    yield ImageFile(executable, f"bin/{version}", executable.stat().st_size)
    library = sysconfig.get_config_var("INSTSONAME") or ""
    for folder in (base / "lib", Path(sysconfig.get_config_var("LIBDIR") or base / "lib")):
        if ".so" in library and (folder / library).is_file():
            found = (folder / library).resolve()
            yield ImageFile(found, f"lib/{library}", found.stat().st_size)
            break
    stdlib = Path(sysconfig.get_path("stdlib"))
    yield from _below(stdlib, f"lib/{version}", skip=SKIPPED | {"site-packages", "dist-packages"})
    places = dict.fromkeys(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
    for place in places:
        yield from _below(place, f"lib/{version}/site-packages", skip=set())


def _below(root: Path, name: str, *, skip: set[str]) -> Iterator[ImageFile]:
    for folder, names, files in os.walk(root, followlinks=True):
        names[:] = sorted(n for n in names if not (n in skip and Path(folder) == root))
        inside = os.path.relpath(folder, root)
        for file in sorted(files):
            source = Path(folder) / file
            if "__editable__" in file:  # leads to a checkout; the launch record brings the code
                continue
            with contextlib.suppress(OSError):
                yield ImageFile(source, os.path.normpath(f"{name}/{inside}/{file}"), source.stat().st_size)


def parts_of(files: list[ImageFile], count: int = PARTS) -> list[list[ImageFile]]:
    """Deal files out so that the parts are about equally large: the largest first, each to the smallest part."""
    parts: list[list[ImageFile]] = [[] for _ in range(count)]
    sizes = [0] * count
    for file in sorted(files, key=lambda f: (-f.size, f.name)):
        at = sizes.index(min(sizes))
        parts[at].append(file)
        sizes[at] += file.size + 512
    return [part for part in parts if part]


def compressor() -> tuple[list[str], str]:
    """Return the command that compresses and the ending of its files: zstd, otherwise gzip."""
    if shutil.which("zstd"):
        return ["zstd", "-q", "-3", "-T1", "-c"], "zst"
    return ["gzip", "-c", "-4"], "gz"


def make_image(target: Path) -> Image:
    """Write the image of this interpreter's environment to ``target``, and its unpacked size beside it.

    Raises:
        ConfigError: the target's name has another ending than .tar.
        EnvironmentFault: the environment cannot be read, or the target not written.
    """
    if target.suffix != ".tar":
        raise ConfigError(f"{target}: an image is a .tar of compressed parts; name it so, e.g. {target.stem}.tar")
    files = list({file.name: file for file in environment_files()}.values())
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    command, ending = compressor()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".image-") as folder:
            made = [Path(folder) / f"{i:02d}.tar.{ending}" for i in range(len(parts_of(files)))]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_write_part, parts_of(files), made, [command] * len(made)))
            with tarfile.open(part, "w") as archive:
                _add_link(archive)
                for path in made:
                    archive.add(path, f"parts/{path.name}")
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, target)
        unpacked = sum(f.size for f in files)
        target.with_name(f"{target.name}.bytes").write_text(f"{unpacked + 4096 * len(files)}\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise EnvironmentFault(f"{target} cannot be written: {error.strerror or error}") from error
    return Image(target, len(files), unpacked, target.stat().st_size)


def _write_part(files: list[ImageFile], path: Path, command: list[str]) -> None:
    with open(path, "wb") as out, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out) as process:
        assert process.stdin is not None
        with tarfile.open(fileobj=process.stdin, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for file in files:
                info = archive.gettarinfo(str(file.source), file.name)
                if info.islnk() or info.issym():
                    info = _as_file(file)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mode |= 0o600
                with open(file.source, "rb") as stream:
                    archive.addfile(info, stream)
        process.stdin.close()
        code = process.wait()
    if code:
        raise OSError(0, f"{command[0]} ended with {code}")


def _as_file(file: ImageFile) -> tarfile.TarInfo:
    about = file.source.stat()
    info = tarfile.TarInfo(file.name)
    info.size, info.mtime, info.mode = about.st_size, int(about.st_mtime), about.st_mode & 0o777
    return info


def _add_link(archive: tarfile.TarFile) -> None:
    """bin/python, and Debian's name of site-packages; relative links within the image."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    links = (("bin/python", version), ("bin/python3", version), (f"lib/{version}/dist-packages", "site-packages"))
    for name, to in links:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, to
        archive.addfile(info, io.BytesIO())
