"""What ten minutes on a GPU can show, with nothing but this checkout and a Python that has torch.

    scripts/gpu_session.sh --minutes 10                        # PYTHON=… the interpreter
    scripts/gpu_session.sh --kernels FOLDER                    # libraries built elsewhere: make kernels KERNELS=cuda
    scripts/gpu_session.sh --device cpu --minutes 8            # a rehearsal at tiny sizes; its times say nothing

No pip, no make, no network. In order: doctor; every own kernel against fp64; a step against the CPU's, fp32 and bf16; a
first run on text with a resume and a sample; the tests of the engine on a GPU; layouts whose ranks share the GPU, over
gloo; the rates of ops against the measured copy bandwidth; five sizes of GPT through this project and whatever else
this Python has (tokens/s, MFU); a profile (launches, gaps); the planner's calibration; the ops once more beside
torch.compile. A part that fails or does not end within its limit is noted and the next one starts.

``OUT/gpu-session-DEVICE.json`` has everything that was measured and is written anew after each part, so that a session
that is cut off leaves what it had; it is what to commit to benchmarks/results. ``--reference`` takes an earlier such
file: plain torch's numbers in it prove the peers where plain torch has no time to run, and its MFU stands beside
today's. Exit 1 if a part failed or had no time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_summary import data_of, summary_table  # noqa: E402
from part_runner import TINY_RUN, Part, PartResult, run_all  # noqa: E402

RECORDED = "ours-recorded"
"""The peer that a CPU, which launches nothing, does not have."""
SIZES = {
    "gpt2-124m": ([], ["ours", RECORDED, "torch", "torch-compile"]),
    "6.7b-layers": ([], ["ours", "ours-fp8", "torch", "megatron-core", "torch-compile"]),
    "6.7b": (["--layers", "8", "--global-batch", "16"], ["ours", RECORDED, "ours-fp8", "torch"]),
    "gpt2-xl": (["--layers", "12", "--global-batch", "16"], ["ours", RECORDED, "torch", "torch-compile"]),
    "llama-8b-long": ([], ["ours", "torch", "torchtitan", "torch-compile"]),
}
"""Size → what is changed of it, so that every peer's state fits beside the others' and a step takes a tenth of a second
to one; and the peers that can train it and have the time. What compiles comes last."""
TINY_SIZES: dict[str, tuple[list[str], list[str]]] = {
    **{name: ([], ["ours", RECORDED, "torch"]) for name in ("tiny", "tiny-bf16")},
    **{name: ([], ["ours", "torch"]) for name in ("tiny-layers", "tiny-llama-layers")},
}
LAYOUTS = ("tp1pp1dp1", "tp2pp1dp1sp", "tp1pp2dp1", "tp2pp2dp1", "tp1pp2dp2")
TEST_WORKERS = 8
"""Processes that share the GPU for the kernels' tests, where pytest-xdist is."""
CLUSTERS = {
    "h200": "clusters/h200", "h100": "clusters/dgx-h100", "a100": "clusters/selene", "mi250x": "clusters/frontier",
    "mi300x": "clusters/mi300x", "b200": "clusters/b200", "l40s": "clusters/l40s",
}
"""Word in a device's name → the cluster file that ``bench calibrate`` corrects."""


def cluster_of(device: str) -> str:
    """The shipped cluster that has such a device; without one, a machine that is described from nothing."""
    import torch

    words = device_name(device).split("-") if device == "cpu" or torch.cuda.is_available() else []
    return next((cluster for word, cluster in CLUSTERS.items() if word in words), "clusters/cpu")


def device_name(device: str) -> str:
    """What results are called: the device's name in small letters and hyphens."""
    import torch

    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def compare_parts(folder: Path, device: str, tiny: bool, limit_s: float) -> list[Part]:
    """One part a size, so that a size that goes wrong costs its own time only."""
    python, found = sys.executable, []
    for size, (changes, peers) in (TINY_SIZES if tiny else SIZES).items():
        command = [python, "-m", "benchmarks.compare", "--device", device, "--sizes", size, *changes,
                   "--peers", *(peer for peer in peers if device != "cpu" or peer != RECORDED),
                   "--out", str(folder / f"compare-{size}.json"), "--repetitions", "3", "--steps", "3",
                   "--warm-up", "3", "--minutes", f"{0.8 * limit_s / 60:.2f}"]
        if (folder / "reference.json").exists():
            command += ["--reference", str(folder / "reference.json")]
        found.append(Part(f"compare-{size}", command, limit_s, "tokens/s and MFU of this project and others", "",
                          limit_s / 2))
    return found


def tests(name: str, folder: Path, device: str, *, tiny: bool, where: str) -> list[str]:
    """The command that runs the tests of a folder that a GPU is needed for (on a CPU: those of its own library)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={folder / f'{name}.xml'}"]
    command += ["-m", "gpu"] if device == "cuda" else ["-k", "cpu"]
    if tiny:  # opcheck compares under modes of its own, below which the ghost machine computes nothing
        norm = f"{where}/test_norm.py"
        return [*command, norm, "--deselect", f"{norm}::test_opcheck"]
    if device == "cuda" and importlib.util.find_spec("xdist"):
        command += ["-n", str(min(TEST_WORKERS, len(os.sched_getaffinity(0))))]
    return [*command, where]


def parts(folder: Path, device: str, *, tiny: bool, minutes: float) -> list[Part]:
    """Every part in order; what matters most comes first, because what does not fit is left out at the end."""
    python, port = sys.executable, [sys.executable, "-m", "megatron_port"]
    scale = minutes / 10.0
    layouts = LAYOUTS[:3] if tiny else LAYOUTS
    ops = [python, "benchmarks/gpu_kernels.py", "--device", device, *(["--tiny"] if tiny else [])]
    profiled = ["tiny"] if tiny else ["gpt2-xl", "--layers", "12", "--global-batch", "16"]

    def part(name: str, command: list[str], says: str, limit_s: float, least_s: float) -> Part:
        return Part(name, command, limit_s * scale, says, "", least_s * scale)

    return [
        part("doctor", [*port, "doctor", str(folder / "run.toml"), "--json"],
             "versions, devices, what serves each op", 60, 20),
        part("kernels", tests("kernels", folder, device, tiny=tiny, where="tests/kernels"),
             "own kernels against fp64, at most twice eager torch's error", 120, 50),
        part("step", [python, "-m", "benchmarks.compare.devices", "--device", device, "--out",
                      str(folder / "step.json"), *(["--sizes", "tiny", "tiny-bf16"] if tiny else [])],
             "losses and gradient norms of a step against the CPU's", 90, 30),
        part("train", [python, "scripts/gpu_train.py", "--device", device, "--out", str(folder),
                       *(["--tiny"] if tiny else [])], "a run on text: loss, tokens/s, a resume, a sample", 90, 40),
        *([] if tiny else [part("engine", tests("engine", folder, device, tiny=False, where="tests/gpu"),
                                "runs, waits and layouts on the GPU", 90, 30)]),
        part("layouts", [*port, "parity", str(folder / "run.toml"), "--layouts", *layouts, "--out",
                         str(folder / "layouts"), "--set", f"backend.device={device}", "--set", "layout.zero_stage=0",
                         "--set", f"backend.share_devices={str(device == 'cuda').lower()}"],
             "losses and gradients of layouts whose ranks share the GPU, over gloo", 120, 50),
        part("ops", [*ops, "--variants", "own", "eager", "apex", "liger", "--json", str(folder / "ops.json")],
             "device and launch times of every op against copy bandwidth", 120, 50),
        *compare_parts(folder, device, tiny, 90.0 * scale),
        part("profile", [python, "-m", "benchmarks.compare.profile", "--device", device, "--size", *profiled, "--out",
                         str(folder / "profile.json")], "where a step's time goes; launch gaps; waits", 60, 40),
        *([] if tiny and device == "cuda" else [  # its products have a GPU's size, which a stand-in takes minutes for
            part("calibrate", [*port, "bench", "calibrate", cluster_of(device), "-o", str(folder / "calibrated.toml"),
                               "--set", f"backend.device={device}", "--seconds", "0.02" if tiny else "0.1"],
                 "what the planner needs of this device", 90, 20)]),
        part("ops-compile", [*ops, "--variants", "own", "eager" if tiny else "compile", "--json",
                             str(folder / "ops-compile.json")], "the ops beside torch.compile", 180, 20),
    ]


def install_kernels(source: Path) -> str:
    """Copy prebuilt libraries to where the package looks for them; why not, if some are not there."""
    from megatron_port.ext.kernels import kernels

    if source.resolve() == kernels.FOLDER.resolve():
        return ""
    found = sorted([*source.glob("libmp_*.so"), *source.glob("manifest.json")])
    if not any(p.name == kernels.BINDING for p in found):
        return f"{source} has no {kernels.BINDING}; build with make kernels KERNELS=cuda, which makes the binding too"
    kernels.FOLDER.mkdir(exist_ok=True)
    for path in found:
        shutil.copy2(path, kernels.FOLDER)
    return ""


def write_reference(earlier: dict[str, Any], folder: Path) -> None:
    """Collect the comparisons of an earlier session in one file of the comparison's own form."""
    rows = [size for part in earlier["parts"].values() for size in (part.get("data") or {}).get("sizes", [])]
    if rows:
        (folder / "reference.json").write_text(json.dumps({"sizes": rows}))


class Record:
    """The session's file, written anew after each part."""

    def __init__(self, folder: Path, device: str, arguments: list[str]) -> None:
        import torch

        self.folder, self.path = folder, folder / f"gpu-session-{device_name(device)}.json"
        self.made: dict[str, Any] = {
            "device": device_name(device), "torch": torch.__version__, "python": sys.version.split()[0],
            "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "command": " ".join(["scripts/gpu_session.sh", *arguments]), "parts": {},
        }

    def take(self, outcome: PartResult) -> None:
        """Add a part: how it ended, what it measured, and the end of its output where it did not end well."""
        row = {**asdict(outcome), "state": outcome.state, "data": data_of(outcome.name, self.folder)}
        if outcome.exit:
            text = self.folder / f"{outcome.name}.txt"
            row["tail"] = text.read_text(errors="replace")[-2000:] if text.exists() else ""
        self.made["parts"][outcome.name] = row
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.made, indent=1) + "\n")
        partial.replace(self.path)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of it all (default 10)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-session", help="folder of the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cuda is also ROCm's name")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and few cases (always on a CPU)")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="own kernels built elsewhere")
    parser.add_argument("--reference", type=Path, metavar="JSON", help="gpu-session-*.json of an earlier session")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="some parts only")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print the table; see the module's docstring."""
    started = time.monotonic()
    args = arguments(argv)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here; --device cpu rehearses the session", file=sys.stderr)
        return 3
    problem = install_kernels(args.kernels) if args.kernels else ""
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(TINY_RUN)
    earlier = json.loads(args.reference.read_text()) if args.reference else {}
    if earlier:
        write_reference(earlier, folder)
    os.environ["PREBUILT_KERNELS"] = "1"  # the tests take the libraries as they are: nothing is compiled
    wanted = parts(folder, args.device, tiny=args.tiny or args.device == "cpu", minutes=args.minutes)
    unknown = set(args.only) - {p.name for p in wanted}
    if unknown:
        print(f"error: no part {', '.join(sorted(unknown))}; parts: {', '.join(p.name for p in wanted)}",
              file=sys.stderr)
        return 2
    wanted = [p for p in wanted if not args.only or p.name in args.only]
    for part in wanted:  # what an earlier session left is not this one's
        for name in (f"{part.name}.json", f"{part.name}.xml", f"{part.name}.txt"):
            (folder / name).unlink(missing_ok=True)
    record = Record(folder, args.device, sys.argv[1:] if argv is None else argv)
    outcomes = run_all(wanted, folder, started + 60 * args.minutes, reserve_s=5.0, after=record.take)
    text = summary_table(record.made, earlier)
    record.path.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwritten: {record.path}")
    return int(any(o.exit for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
