"""One job that shows what this machine does with the project, in one archive to send back; ``make site-report``.

    make site-report                               # here, or in an interactive job
    sbatch -N 1 … launch/site_report.sh            # as a job: srun checks every node of it, one node does the rest

Doctor, preflight, calibration, the tests of the kernels, layouts against one process (over NCCL, RCCL or gloo), the
comparison with other trainers, a profile, and the planner's predictions beside what was measured. A part that fails is
noted and the rest runs. Everything is text or JSON; names of user, home, hosts and what looks like a secret or an
address are replaced before it is packed. Exit 1 if a part failed: the archive is there all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECRET = re.compile(r"(?i)\b([A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL)[A-Z0-9_]*\"?\s*[=:]\s*)\S+")
ADDRESS = re.compile(r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b")
RUN = """# Layouts against one process: small, so that every machine can.
name = "site"
engine = "native"
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
vocab_size = 256
seq_length = 32
[layout]
vocab_padding_multiple = 1
[batch]
micro_batch_size = 2
global_batch_size = 8
[precision]
dtype = "fp32"
[data]
synthetic = true
"""


@dataclass(frozen=True)
class Part:
    """One command; its output goes to ``NAME.txt``."""

    name: str
    command: list[str]
    limit_s: float


@dataclass
class Outcome:
    """Of a part."""

    name: str
    command: str
    exit: int
    seconds: float


def clusters() -> dict[str, str]:
    """What torch calls a device → the shipped description that fits it best."""
    return {"H200": "clusters/h200", "H100": "clusters/dgx-h100", "A100": "clusters/perlmutter-80gb",
            "MI250X": "clusters/frontier", "A800": "clusters/a800"}


def devices() -> tuple[int, str]:
    """(GPUs that torch sees, name of the first)."""
    import torch

    if not torch.cuda.is_available():
        return 0, ""
    return torch.cuda.device_count(), torch.cuda.get_device_name(0)


def layouts(ranks: int) -> list[str]:
    """One process first, then what so many ranks can split."""
    found = ["tp1pp1dp1", "tp2pp1dp1sp", "tp1pp2dp1", "tp1pp1dp2"]
    return found + [name for world, name in ((4, "tp2pp2dp1"), (8, "tp2pp2dp2")) if ranks >= world]


def parts(folder: Path, gpus: int, device: str, *, short: bool, cluster: str) -> list[Part]:
    """Everything, in order. ``short``: the smallest sizes, for a look at the whole in a few minutes."""
    python, port = sys.executable, [sys.executable, "-m", "megatron_port"]
    cluster = cluster or next((c for name, c in clusters().items() if name in device),
                              "clusters/slurm" if gpus else "clusters/cpu")
    kind = "cuda" if gpus else "cpu"
    ranks = max(gpus, 4)
    (folder / "site.toml").write_text(RUN)
    everywhere: list[str] = []
    if os.environ.get("SLURM_JOB_NUM_NODES") and shutil.which("srun"):
        everywhere = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    compare = [python, "-m", "benchmarks.compare", "--out", str(folder / "compare.json"), "--device", kind]
    size = "tiny" if short else "gpt2-xl" if gpus else "quickstart"
    if short:
        compare += ["--sizes", "tiny", "--peers", "ours", "torch", "--repetitions", "2", "--steps", "2"]
    measured, preflight = folder / "calibrated.toml", str(folder / "preflight")
    kernels = ["tests/kernels/test_norm.py", "tests/kernels/test_optimizer.py"] if short else ["tests/kernels"]
    # Compiling for the first time takes longer than any one test may.
    check = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=1800", *kernels]
    if gpus:  # builds for these GPUs, tests and times every op
        check = [python, "scripts/gpu_check.py"]
    return [
        Part("doctor", [*port, "doctor", "--json"], 300),
        Part("preflight-node", [*everywhere, *port, "preflight", "node", cluster, "--out", preflight], 900),
        Part("preflight-network", [*port, "preflight", "network", cluster, "--out", preflight, "--nproc",
                                   str(gpus or 2)], 900),
        Part("preflight-report", [*port, "preflight", "report", cluster, "--out", preflight], 300),
        Part("calibrate", [*port, "bench", "calibrate", cluster, "-o", str(measured),
                           *(["--seconds", "0.05"] if short else [])], 1200),
        Part("kernels", check, 3600),
        Part("layouts", [*port, "parity", str(folder / "site.toml"), "--layouts", *layouts(2 if short else ranks),
                         "--out", str(folder / "layouts")], 1800),
        Part("compare", compare, 4 * 3600),
        Part("profile", [python, "-m", "benchmarks.compare.profile", "--size", size, "--device", kind, "--out",
                         str(folder / "profile.json")], 1800),
        Part("predict", [python, "-m", "benchmarks.compare.predict", str(folder / "compare.json"), str(measured),
                         "--out", str(folder / "predicted.json")], 300),
    ]


def run(part: Part, folder: Path) -> Outcome:
    """Run a part and what it starts; both streams into its file."""
    started = time.monotonic()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    with open(folder / f"{part.name}.txt", "wb") as out:
        process = subprocess.Popen(part.command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=env,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = 124
    return Outcome(part.name, " ".join(part.command), code, round(time.monotonic() - started, 1))


def replacements() -> list[tuple[str, str]]:
    """What must not leave this machine, longest first, and what stands in its place."""
    host = socket.gethostname()
    known = {str(ROOT): "CHECKOUT", str(Path.home()): "HOME", sys.prefix: "ENVIRONMENT", host: "HOST",
             host.split(".")[0]: "HOST"}
    with contextlib.suppress(KeyError, OSError):
        known[getpass.getuser()] = "USER"
    for name in ("SLURM_JOB_ACCOUNT", "SLURM_JOB_USER", "SLURM_SUBMIT_HOST", "SLURMD_NODENAME"):
        if os.environ.get(name):
            known[os.environ[name]] = name
    # Words as short as "root" or "gpu" stand in the texts for other things.
    return sorted(((old, new) for old, new in known.items() if len(old) > 4), key=lambda pair: -len(pair[0]))


def redact(text: str, names: Iterable[tuple[str, str]]) -> str:
    """The text without names, addresses and secrets."""
    for old, new in names:
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(old)}(?![A-Za-z0-9])", new, text)
    return ADDRESS.sub("ADDRESS", SECRET.sub(r"\1REMOVED", text))


def pack(folder: Path, archive: Path) -> None:
    """Redact every file in place and put all into the archive, which is whole or not there."""
    names = replacements()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            try:
                path.write_text(redact(path.read_text(encoding="utf-8"), names), encoding="utf-8")
            except UnicodeDecodeError:
                path.unlink()  # recorded gradients and the like: the tables hold what they say

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.name = redact(entry.name, names)
        return entry

    part = archive.with_name(f".{archive.name}.partial")
    with tarfile.open(part, "w:gz") as tar:
        tar.add(folder, arcname="site-report", filter=anonymous)
    with open(part, "rb") as stream:
        os.fsync(stream.fileno())
    part.replace(archive)


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "site-report",
                        help="folder; the archive lies beside")
    parser.add_argument("--short", action="store_true", help="the smallest sizes, a few minutes on a CPU")
    parser.add_argument("--only", nargs="+", metavar="PART", default=[], help="some parts only")
    parser.add_argument("--cluster", default="", help="description to calibrate, e.g. clusters/frontier")
    args = parser.parse_args(argv)
    folder = args.out.resolve()
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    gpus, device = devices()
    wanted = parts(folder, gpus, device, short=args.short, cluster=args.cluster)
    unknown = set(args.only) - {p.name for p in wanted}
    if unknown:
        known = ", ".join(p.name for p in wanted)
        print(f"error: no part {', '.join(sorted(unknown))}; parts: {known}", file=sys.stderr)
        return 2
    outcomes = []
    for part in wanted:
        if args.only and part.name not in args.only:
            continue
        outcomes.append(run(part, folder))
        if part.name == "kernels" and gpus:
            for path in (ROOT / "benchmarks" / "results").glob("gpu-check-*.json"):
                shutil.copy(path, folder)
        state = "ok" if outcomes[-1].exit == 0 else f"exit {outcomes[-1].exit}"
        print(f"{part.name:<18} {state:<9} {outcomes[-1].seconds:.0f} s", flush=True)
    summary = {"gpus": gpus, "device": device or "cpu", "parts": [asdict(o) for o in outcomes]}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    archive = folder.with_name(folder.name + ".tar.gz")
    pack(folder, archive)
    print(f"archive: {archive} ({archive.stat().st_size / 1024:.0f} KiB); look into it before you send it")
    return int(any(o.exit for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
