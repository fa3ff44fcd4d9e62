"""One job that shows what this machine does with the project, in one archive to send back; ``make site-report``.

    make site-report                               # here, or in an interactive job
    sbatch -N 1 … launch/site_report.sh            # as a job: srun checks every node of it, one node does the rest

Doctor, preflight, calibration, the tests of the kernels, layouts against one process (over NCCL, RCCL or gloo), the
comparison with other trainers, a profile, and the planner's predictions beside what was measured. A part that fails,
or does not end within its limit, is noted and the rest runs. In a job the limits shrink to the time that the job has
left, and a TERM (``--signal=B:TERM@SECONDS``) ends the part at work, so that there is an archive in any case.
Everything is text or JSON; README.md says what there is, and has the predictions beside the measurements. Names of
user, home, hosts and what looks like a secret or an address are replaced before it is packed (``site_redact``). Exit 1
if a part failed or did not run: the archive is there all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import site_redact  # noqa: E402
from part_runner import TINY_RUN, Part, run_all  # noqa: E402
from site_overview import overview  # noqa: E402

PACKING_S = 120.0
"""Kept of a job's time for the archive. SLURM's signal comes up to a minute before its time, which is 30 s in
launch/site_report.sh: by then all should be done."""

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


def size_of(gpus: int, short: bool) -> list[str]:
    """The size that compare (short) and profile take. On a GPU a dozen layers of GPT-2 XL: 9 GB of state."""
    if not gpus:
        return ["quickstart"]
    return ["gpt2-xl", "--layers", "12", "--global-batch", "16"] if short else ["gpt2-xl"]


def parts(folder: Path, gpus: int, device: str, *, short: bool, cluster: str, nodes: int = 1) -> list[Part]:
    """Everything, in order. ``short``: small sizes, for a look at the whole in a few minutes. ``nodes``: of the job;
    0: no job, or none in which srun can be used."""
    python, port = sys.executable, [sys.executable, "-m", "megatron_port"]
    cluster = cluster or next((c for name, c in clusters().items() if name in device),
                              "clusters/slurm" if gpus else "clusters/cpu")
    kind = "cuda" if gpus else "cpu"
    ranks = gpus or 2
    # --overlap: the report itself may run in a step of the job that holds all of its resources.
    each = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--export=ALL",
            "--kill-on-bad-exit=0"] if nodes else []
    compare = [python, "-m", "benchmarks.compare", "--out", str(folder / "compare.json"), "--device", kind]
    if short:
        compare += ["--sizes", *size_of(gpus, short), "--peers", "ours", "torch", "--repetitions", "3", "--steps", "2",
                    "--warm-up", "1"]
    measured, preflight = folder / "calibrated.toml", str(folder / "preflight")
    # Compiling for the first time takes longer than any one test may.
    check = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=1800"]
    # In short two ops on the CPU's library: nothing is compiled where it is built already.
    two = ["tests/kernels/test_norm.py", "tests/kernels/test_optimizer.py", "-k", "cpu"]
    check += two if short else ["tests/kernels"]
    if gpus:  # builds for these GPUs, tests and times every op
        check = [python, "scripts/gpu_check.py"]

    def part(name: str, command: list[str], says: str, limit_s: float, short_s: float, files: str = "") -> Part:
        return Part(name, command, short_s if short else limit_s, says, files, min(short_s, 300.0))

    between = []
    if nodes > 1:
        together = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes * ranks}", f"--ntasks-per-node={ranks}",
                    "--overcommit", "--export=ALL", "--kill-on-bad-exit=1"]
        between = [part("preflight-nodes", [*together, *port, "preflight", "network", cluster, "--out",
                                            f"{preflight}-nodes"],
                        "collectives and pairs between the nodes: seconds, bytes/s", 900, 300,
                        "preflight-nodes/network.json")]
    return [
        part("doctor", [*port, "doctor", "--json"], "versions, devices, which provider serves each op and why",
             300, 180),
        part("preflight-node", [*each, *port, "preflight", "node", cluster, "--out", preflight],
             "each node: memory, disks, product and copy rates of each device", 900, 300, "preflight/node-*.json"),
        part("preflight-network", [*port, "preflight", "network", cluster, "--out", preflight, "--nproc", str(ranks)],
             "collectives and pairs between the ranks of this node: seconds, bytes/s", 900, 300,
             "preflight/network.json"),
        part("preflight-report", [*port, "preflight", "report", cluster, "--out", preflight],
             "the verdict on nodes and network", 300, 60, "preflight/preflight.json"),
        *between,
        part("calibrate", [*port, "bench", "calibrate", cluster, "-o", str(measured),
                           *(["--seconds", "0.05"] if short else [])],
             "rates that the planner takes for this machine", 1200, 300, "calibrated.toml"),
        part("kernels", check, "own kernels against fp64 and torch", 3600, 900,
             "gpu-check-*.json" if gpus else ""),
        part("layouts", [*port, "parity", str(folder / "site.toml"), "--layouts",
                         *layouts(2 if short else max(gpus, 4)), "--out", str(folder / "layouts"),
                         "--set", f"backend.share_devices={str(0 < gpus < 4).lower()}"],
             "losses and gradients of parallel layouts against one process", 1800, 300, "layouts/*/rank-*.json"),
        part("compare", compare, "seconds per step of this project and of others, the same model", 4 * 3600, 600,
             "compare.json"),
        part("profile", [python, "-m", "benchmarks.compare.profile", "--size", *size_of(gpus, short), "--device", kind,
                         "--out", str(folder / "profile.json")],
             "where a step's time goes, beside its limits", 1800, 300, "profile.json"),
        part("predict", [python, "-m", "benchmarks.compare.predict", str(folder / "compare.json"), str(measured),
                         "--out", str(folder / "predicted.json")],
             "the planner's step time and memory beside those of compare", 300, 60, "predicted.json"),
    ]


def job_seconds_left() -> float | None:
    """Of the SLURM job around this process; None: there is none, or it has no end."""
    from megatron_port.run.launchers import clock_seconds, current_job, run_tool

    job = current_job()
    if job is None:
        return None
    code, text = run_tool(["scontrol", "show", "job", job.id])
    words = dict(word.partition("=")[::2] for word in text.split()) if code == 0 else {}
    ran, limit = clock_seconds(words.get("RunTime", "")), clock_seconds(words.get("TimeLimit", ""))
    return None if ran is None or limit is None else float(limit - ran)


def job_nodes() -> int:
    """Nodes of the SLURM job in which srun can be used; 0: none."""
    text = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdigit() and shutil.which("srun") else 0


def made_with(device: str, gpus: int, nodes: int, arguments: Sequence[str]) -> dict[str, Any]:
    """What a reader must know of how the report was made."""
    import torch

    import megatron_port

    commit = "not known (no git checkout)"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, text=True,
                              capture_output=True, timeout=30)
        commit = done.stdout.strip() if done.returncode == 0 else commit
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": f"{nodes or 1} node{'s' if nodes > 1 else ''}; of this one {cores} cores usable, "
                   + (f"{gpus} × {device}" if gpus else "no GPU"),
        "made": " ".join([time.strftime("%Y-%m-%d %H:%M UTC by scripts/site_report.py", time.gmtime()), *arguments]),
        "project": f"megatron_port {megatron_port.__version__}, commit {commit}",
        "torch": torch.__version__,
    }


def clear(folder: Path) -> str:
    """Make the folder, without what an earlier report left there; why not, if something else is in it."""
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "site.toml").is_file()):
            return f"{folder} is no folder of an earlier report; give --out one that is empty or not there"
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "site.toml").write_text(TINY_RUN)
    return ""


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "site-report",
                        help="folder; the archive lies beside")
    parser.add_argument("--short", action="store_true", help="small sizes and two peers, a few minutes on a CPU")
    parser.add_argument("--only", nargs="+", metavar="PART", default=[], help="some parts only")
    parser.add_argument("--cluster", default="", help="description to calibrate, e.g. clusters/frontier")
    parser.add_argument("--minutes", type=float, default=0.0,
                        help="all of it; default: what the SLURM job has left, else as long as it takes")
    args = parser.parse_args(argv)
    if os.environ.get("SLURM_JOB_ID") and not os.environ.get("SLURMD_NODENAME"):
        print("error: a job is allocated, but this shell is not on one of its nodes; first: srun -N1 -n1 --pty "
              "bash, or submit launch/site_report.sh with sbatch", file=sys.stderr)
        return 3
    try:
        gpus, device = devices()
    except ImportError as error:
        print(f"error: {sys.executable} cannot import torch ({error}); make setup, or set PYTHON to an interpreter "
              "that has it", file=sys.stderr)
        return 3
    started = time.monotonic()
    left = args.minutes * 60 if args.minutes > 0 else job_seconds_left()
    folder, nodes = args.out.resolve(), job_nodes()
    wanted = parts(folder, gpus, device, short=args.short, cluster=args.cluster, nodes=nodes)
    unknown = set(args.only) - {p.name for p in wanted}
    if unknown:
        known = ", ".join(p.name for p in wanted)
        print(f"error: no part {', '.join(sorted(unknown))}; parts: {known}", file=sys.stderr)
        return 2
    wrong = clear(folder)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    if left is not None:
        print(f"at most {left / 60:.4g} minutes; what does not fit is left out", flush=True)
    load = os.getloadavg()[0]
    outcomes = run_all([p for p in wanted if not args.only or p.name in args.only], folder,
                       None if left is None else started + left, reserve_s=PACKING_S)
    for path in (ROOT / "benchmarks" / "results").glob("gpu-check-*.json"):
        if gpus and path.stat().st_mtime > time.time() - (time.monotonic() - started):  # of this run
            shutil.copy(path, folder)
    about = made_with(device, gpus, nodes, sys.argv[1:] if argv is None else argv)
    about["took"] = (f"{(time.monotonic() - started) / 60:.1f} minutes; load average {load:.1f} before, "
                     f"{os.getloadavg()[0]:.1f} after")
    summary = {**about, "gpus": gpus, "device": device or "cpu", "nodes": nodes,
               "parts": [{**asdict(o), "state": o.state} for o in outcomes]}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "README.md").write_text(overview(folder, about, outcomes))
    archive = folder.with_name(folder.name + ".tar.gz")
    site_redact.pack(folder, archive, [(str(path), "REPORT") for path in (folder, args.out) if path.is_absolute()])
    print(f"archive: {archive} ({archive.stat().st_size / 1024:.0f} KiB); look into it before you send it")
    return int(any(o.exit for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
