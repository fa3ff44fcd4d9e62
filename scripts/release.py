"""``make release``: sdist and wheel with CPU kernels, hashes, a bill of materials, built twice and compared.

Everything is made from a commit, in two clones in folders of different names; the files must be equal to the byte.
What ``dist/`` holds afterwards:

    megatron_port-VERSION.tar.gz                       sources
    megatron_port-VERSION-py3-none-linux_x86_64.whl    Python 3.10 to 3.14: no library in it knows Python's own ABI
    megatron_port-VERSION.cdx.json                     CycloneDX: what it requires, pinned, with the index's hashes
    SHA256SUMS                                         of these; `sha256sum --check SHA256SUMS`

Needs an environment that `make setup` made, git and g++. Exit 1: the two builds differ; 3: something is missing.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from release_sbom import write_sbom

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools writes over it
print("built", build_meta.build_sdist(out), build_meta.build_wheel(out))
"""
LIBRARIES = ("libmp_cpu-v2.so", "libmp_cpu-v3.so", "libmp_cpu-v4.so", "libmp_binding.so", "manifest.json")


def git(*words: str, at: Path = ROOT) -> str:
    """Output of a git command; stops where it fails."""
    done = subprocess.run(["git", "-C", str(at), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def build(commit: str, epoch: int, where: Path, out: Path) -> None:
    """Build sdist and wheel of a commit in a fresh clone at ``where``; put them into ``out``."""
    git("clone", "--quiet", "--no-checkout", str(ROOT), str(where))
    git("checkout", "--quiet", "--detach", commit, at=where)
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0", "MP_KERNELS_NEEDED": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8",
    }
    environment.pop("PYTHONPATH", None)
    log = out / "build.log"
    with open(log, "w", encoding="utf-8") as stream:
        done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=where, env=environment, stdout=stream,
                              stderr=subprocess.STDOUT, check=False, umask=0o022)
    if done.returncode:
        sys.exit(f"error: the build failed; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-25:]))
    log.unlink()
    for path in out.glob("*.tar.gz"):
        plain_archive(path, epoch)
    if not list(out.glob("*.whl")) or not list(out.glob("*.tar.gz")):
        sys.exit(f"error: the build left {sorted(p.name for p in out.iterdir())}, which is no wheel and sdist")


def plain_archive(path: Path, epoch: int) -> None:
    """Pack a .tar.gz anew without what differs between machines: times, owners, order."""
    with tarfile.open(path) as archive:
        members = sorted(archive.getmembers(), key=lambda m: m.name)
        contents = {m.name: stream.read() for m in members if (stream := archive.extractfile(m)) is not None}
    temporary = path.with_suffix(".tmp")
    with (
        open(temporary, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in members:
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            archive.addfile(member, io.BytesIO(contents[member.name]) if member.name in contents else None)
    os.replace(temporary, path)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two folders of files, a line each; of wheels by member."""
    out = []
    names = sorted({p.name for folder in (first, second) for p in folder.iterdir()})
    for name in names:
        a, b = first / name, second / name
        if not (a.is_file() and b.is_file()):
            out.append(f"{name} is in one of the two only")
        elif digest(a) != digest(b):
            out.append(f"{name}: {digest(a)} and {digest(b)}")
            if name.endswith(".whl"):
                with zipfile.ZipFile(a) as x, zipfile.ZipFile(b) as y:
                    one, other = ({i.filename: (i.CRC, i.date_time) for i in z.infolist()} for z in (x, y))
                out += [f"  {n}" for n in sorted(one.keys() | other.keys()) if one.get(n) != other.get(n)]
    return out


def check_wheel(wheel: Path) -> list[str]:
    """What is wrong with a wheel's name or contents, a line each."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    out = [f"{wheel.name} lacks megatron_port/_kernels/{name}" for name in LIBRARIES
           if f"megatron_port/_kernels/{name}" not in names]
    if "-py3-none-linux_" not in wheel.name:
        out.append(f"{wheel.name} is not tagged for every Python")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="build what is released, twice, and compare")
    parser.add_argument("--commit", default="HEAD", help="what to release (default: HEAD)")
    parser.add_argument("--once", action="store_true", help="build once only")
    parser.add_argument("--out", type=Path, default=DIST, help="default: dist")
    args = parser.parse_args()
    if git("status", "--porcelain", "--untracked-files=no"):
        print("note: there are changes that are not committed; they are not in what is built", flush=True)
    commit = git("rev-parse", args.commit)
    epoch = int(git("show", "--no-patch", "--format=%ct", commit))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        work = Path(folder)
        build(commit, epoch, work / "megatron_port", work / "first")
        print(f"built in {time.monotonic() - started:.0f} s", flush=True)
        if not args.once:
            build(commit, epoch, work / "somewhere" / "else", work / "second")
            different = differences(work / "first", work / "second")
            if different:
                print("error: two builds of the same commit differ:\n" + "\n".join(different), file=sys.stderr)
                return 1
            print("a second build in another folder gives the same bytes", flush=True)
        wheel = next((work / "first").glob("*.whl"))
        wrong = check_wheel(wheel)
        if wrong:
            print("error: " + "\n".join(wrong), file=sys.stderr)
            return 1
        sbom = write_sbom(ROOT, work / "first", wheel.name.split("-")[1], epoch)
        files = sorted(p for p in (work / "first").iterdir())
        sums = "".join(f"{digest(p)}  {p.name}\n" for p in files)
        (work / "first" / "SHA256SUMS").write_text(sums)
        shutil.rmtree(args.out, ignore_errors=True)
        shutil.copytree(work / "first", args.out)
    print(f"{sums}bill of materials: {sbom} components")
    for path in sorted(args.out.iterdir()):
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    print(f"released {commit[:12]} in {time.monotonic() - started:.0f} s; to check: sha256sum --check SHA256SUMS")
    return 0


if __name__ == "__main__":
    sys.exit(main())
