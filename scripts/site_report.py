"""One job that shows what this machine does with the project, in one archive to send back; ``make site-report``.

    make site-report                               # here, or in an interactive job
    sbatch -N 1 … launch/site_report.sh            # as a job: srun checks every node of it, one node does the rest

Doctor, preflight, calibration, the tests of the kernels, layouts against one process (over NCCL, RCCL or gloo), the
comparison with other trainers, a profile, and the planner's predictions beside what was measured. A part that fails,
or does not end within its limit, is noted and the rest runs. Everything is text or JSON; README.md says what there is,
and has the predictions beside the measurements. Names of user, home, hosts and what looks like a secret or an address
are replaced before it is packed. Exit 1 if a part failed: the archive is there all the same.
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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECRET = re.compile(r"(?i)\b([A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL)[A-Z0-9_]*\"?\s*[=:]\s*)\S+")
ADDRESS = re.compile(
    r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b"  # IPv4, not this machine itself
    r"|(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])"  # of a network card
    r"|(?<![\w:])[23fF][0-9a-fA-F]{3}(?::[0-9a-fA-F]{1,4}){0,6}::[0-9a-fA-F:]*"  # IPv6, shortened
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![\w:])"  # and whole
    r"|[\w.+-]+@[\w-]+\.[\w.-]+"  # mail
)
PLACES = ("TMPDIR", "SCRATCH", "WORK", "PROJWORK", "MEMBERWORK", "WORLDWORK", "PROJECT", "STORE", "PSCRATCH")
"""Variables that name folders of a user or a project."""
ORDINARY = {"root", "user", "users", "gpu", "cpu", "node", "home", "work", "data", "test", "slurm", "torch", "python",
            "localhost", "ubuntu", "debian", "admin", "build", "runner"}
"""Names of users and hosts that say nothing, and stand in the texts for other things."""
TIMED_OUT = 124
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
    says: str = ""
    """What its output shows."""


@dataclass
class Outcome:
    """Of a part."""

    name: str
    command: str
    exit: int
    seconds: float
    limit_s: float
    says: str = ""

    @property
    def state(self) -> str:
        """For people."""
        if self.exit == TIMED_OUT:
            return f"stopped: not done after {self.limit_s:g} s, its limit"
        return "ok" if self.exit == 0 else f"failed (exit {self.exit})"


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
        compare += ["--sizes", "tiny", "--peers", "ours", "torch", "--repetitions", "3", "--steps", "4"]
    measured, preflight = folder / "calibrated.toml", str(folder / "preflight")
    # Compiling for the first time takes longer than any one test may.
    check = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=1800"]
    # In short two ops on the CPU's library: nothing is compiled where it is built already.
    two = ["tests/kernels/test_norm.py", "tests/kernels/test_optimizer.py", "-k", "cpu"]
    check += two if short else ["tests/kernels"]
    if gpus:  # builds for these GPUs, tests and times every op
        check = [python, "scripts/gpu_check.py"]

    def part(name: str, command: list[str], says: str, limit_s: float, short_s: float) -> Part:
        return Part(name, command, short_s if short else limit_s, says)

    return [
        part("doctor", [*port, "doctor", "--json"], "versions, devices, which provider serves each op and why",
             300, 180),
        part("preflight-node", [*everywhere, *port, "preflight", "node", cluster, "--out", preflight],
             "each node: memory, disks, product and copy rates of each device", 900, 300),
        part("preflight-network", [*port, "preflight", "network", cluster, "--out", preflight, "--nproc",
                                   str(gpus or 2)],
             "collectives and pairs between the ranks of this node: seconds, bytes/s", 900, 300),
        part("preflight-report", [*port, "preflight", "report", cluster, "--out", preflight],
             "the verdict on nodes and network", 300, 60),
        part("calibrate", [*port, "bench", "calibrate", cluster, "-o", str(measured),
                           *(["--seconds", "0.05"] if short else [])],
             "rates that the planner takes for this machine (calibrated.toml)", 1200, 300),
        part("kernels", check, "own kernels against fp64 and torch", 3600, 900),
        part("layouts", [*port, "parity", str(folder / "site.toml"), "--layouts", *layouts(2 if short else ranks),
                         "--out", str(folder / "layouts")],
             "losses and gradients of parallel layouts against one process", 1800, 300),
        part("compare", compare, "seconds a step of this project and of others, the same model", 4 * 3600, 600),
        part("profile", [python, "-m", "benchmarks.compare.profile", "--size", size, "--device", kind, "--out",
                         str(folder / "profile.json")], "where a step's time goes, beside its limits", 1800, 300),
        part("predict", [python, "-m", "benchmarks.compare.predict", str(folder / "compare.json"), str(measured),
                         "--out", str(folder / "predicted.json")],
             "the planner's step time and memory beside those of compare", 300, 60),
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
            code = TIMED_OUT
            out.write(f"\n[site report] stopped: not done after {part.limit_s:g} s, the limit of this part\n".encode())
    seconds = round(time.monotonic() - started, 1)
    return Outcome(part.name, " ".join(part.command), code, seconds, part.limit_s, part.says)


def replacements() -> list[tuple[str, str]]:
    """What must not leave this machine, longest first, and what stands in its place."""
    host = socket.gethostname()
    known = {str(ROOT): "CHECKOUT", str(Path.home()): "HOME", sys.prefix: "ENVIRONMENT", sys.base_prefix: "PYTHON",
             socket.getfqdn(): "HOST", host: "HOST", host.split(".")[0]: "HOST"}
    for name in PLACES:
        if os.environ.get(name, "").startswith("/"):
            known.setdefault(os.environ[name].rstrip("/"), name)
    with contextlib.suppress(KeyError, OSError):
        known[getpass.getuser()] = "USER"
    for name in ("SLURM_JOB_ACCOUNT", "SLURM_JOB_USER", "SLURM_SUBMIT_HOST", "SLURMD_NODENAME"):
        if os.environ.get(name):
            known[os.environ[name]] = name
    # Names as ordinary as "root" or "/usr" stand in the texts for other things.
    ordinary = ORDINARY | {"/", "/usr", "/usr/local", "/tmp", "/root"}
    telling = {old: new for old, new in known.items() if len(old) > 1 and old not in ordinary}
    return sorted(telling.items(), key=lambda pair: -len(pair[0]))


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


def overview(folder: Path, device: str, gpus: int, outcomes: Sequence[Outcome]) -> str:
    """README.md of the archive: the parts, and the predictions beside the measurements."""
    many = f"{gpus} × {device}" if gpus else "no GPU"
    lines = ["# Site report", "", f"{many}; {os.cpu_count()} cores. Times are by the wall unless they say else.", "",
             "| part | state | took, s | output | shows |", "|---|---|---|---|---|"]
    lines += [f"| {o.name} | {o.state} | {o.seconds:.0f} | {o.name}.txt | {o.says} |" for o in outcomes]
    compared, predicted = (_read(folder / name) for name in ("compare.json", "predicted.json"))
    lines += ["", "## Predicted and measured", ""]
    if predicted.get("rows"):
        lines += ["One process. Predicted by the planner from the rates in calibrated.toml; measured by compare.", "",
                  "| size | as | step predicted, ms | measured, ms | off by | memory predicted, MB | measured, MB |",
                  "|---|---|---|---|---|---|---|"]
        lines += [f"| {r['size']} | {r['peer']} | {r['predicted_seconds'] * 1e3:.4g} | "
                  f"{r['measured_seconds'] * 1e3:.4g} | {r['time_error']:+.0%} | {r['predicted_bytes'] / 1e6:.4g} | "
                  f"{r['measured_bytes'] / 1e6:.4g} |" for r in predicted["rows"]]
    else:
        lines.append("None: compare, calibrate or predict did not end well (see their states).")
    lines += ["", "## Compared", ""]
    for size in compared.get("sizes", []):
        lines += _compared(size)
    return "\n".join(lines) + "\n"


def _compared(size: dict[str, Any]) -> list[str]:
    lines = [f"{size['size']} ({size['about']}), {size['dtype']}, {size['tokens_per_step']} tokens a step:", "",
             "| peer | state | step, ms (quartiles) | processor time, ms | tokens/s | MFU | peak memory, MB |",
             "|---|---|---|---|---|---|---|"]
    for r in size["peers"]:
        if "seconds" not in r:
            lines.append(f"| {r['peer']} | {r['state']}: {r.get('reason', '')} | | | | | |")
            continue
        middle, low, high = (f"{r['seconds'][k] * 1e3:.4g}" for k in ("median", "q1", "q3"))
        mfu = f"{r['mfu']:.1%}" if "mfu" in r else "-"
        lines.append(
            f"| {r['peer']} | {r['state']} | {middle} ({low} to {high}) | {r['cpu_seconds']['median'] * 1e3:.4g} | "
            f"{r['tokens_per_second']:.0f} | {mfu} | {r['peak_memory_bytes'] / 1e6:.4g} |"
        )
    return [*lines, ""]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}


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
        print(f"{part.name:<18} {outcomes[-1].seconds:5.0f} s  {outcomes[-1].state}", flush=True)
    summary = {"gpus": gpus, "device": device or "cpu",
               "parts": [{**asdict(o), "state": o.state} for o in outcomes]}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "README.md").write_text(overview(folder, device, gpus, outcomes))
    archive = folder.with_name(folder.name + ".tar.gz")
    pack(folder, archive)
    print(f"archive: {archive} ({archive.stat().st_size / 1024:.0f} KiB); look into it before you send it")
    return int(any(o.exit for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
