"""What a quarter of an hour on one H100 or H200 can show, with nothing but this checkout and a Python that has torch.

    scripts/gpu_session.sh a --kernels FOLDER          # 420 s; PYTHON=… the interpreter; libraries built elsewhere
    scripts/gpu_session.sh b --kernels FOLDER          # 300 s, at once after it
    scripts/gpu_session.sh a --device cpu              # a rehearsal at tiny sizes; its times say nothing

No pip, no make, no network. **a**: the card with its power limit and clocks; tests of the kernels that changed;
captured steps against the same steps call by call, bit for bit; whole steps of 6.7B's layers, of GPT-2 XL's and of
GPT-2 124M beside whatever else this Python has (tokens/s, MFU); the state's hash, and norms at 256 to 8,192 rows; GeLU
in the epilogue of a product, go or no-go. **b**: a profile of captured steps; a run on text in captured steps, with a
resume and a sample; a layer of 8 and of 64 experts with its waits; the engine's tests; layouts whose ranks share the
GPU; GPT-2 XL whole; Llama-3-8B's layers at 8,192 and 32,768 positions; the planner's calibration. A part that fails or
does not end within its limit is noted and the next one starts.

Each part writes a figure to its own file as soon as it is measured, with power, clocks and throttle reasons beside it.
``OUT/gpu-session-DEVICE-a.json`` has everything: it is written anew after each part, lists what has not run, and is
what to commit to benchmarks/results. Exit 1 if a part failed or had no time.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_summary import data_of, summary_table  # noqa: E402
from part_runner import TINY_RUN, Part, PartResult, run_all  # noqa: E402

SECONDS = {"a": 420.0, "b": 300.0}
START_S, RESERVE_S = 15.0, 5.0
"""Of a command's seconds: until the first part begins, where torch comes from a cold disk; for the table at the end."""
LARGE = 100 * 10**9
"""Bytes: an H200 has 141 GB, an H100 80."""
RECORDED = "ours-recorded"
"""The peer that a CPU, which launches nothing, does not have."""
CHANGED = ("row_hashes", "norm", "residual_norm", "softmax", "cross_entropy", "dropout", "optimizer", "table_rows",
           "quantise", "expert_rows", "rotary")
"""Tests of the kernels that are new or changed most since a GPU ran them; all: ``pytest tests/kernels -m gpu``."""
LAYOUTS = ("tp1pp1dp1", "tp2pp1dp1sp", "tp1pp2dp1", "tp2pp2dp1", "tp1pp2dp2")
TEST_WORKERS = 8
"""Processes that share the GPU for the kernels' tests, where pytest-xdist is."""
CLUSTERS = {
    "h200": "clusters/h200", "h100": "clusters/dgx-h100", "a100": "clusters/selene", "mi250x": "clusters/frontier",
    "mi300x": "clusters/mi300x", "b200": "clusters/b200", "l40s": "clusters/l40s",
}
"""Word in a device's name → the cluster file that ``bench calibrate`` corrects."""


@dataclass(frozen=True)
class Sized:
    """A size of the comparison on this card: layers on a large and on a smaller one (0: the size's own), samples of a
    step, peers in their order, and the command line's further words."""

    layers: tuple[int, int]
    peers: tuple[str, ...]
    global_batch: int = 0
    more: tuple[str, ...] = ()


FIELD = ("torch-narrow", "megatron-core", "torch-compile-max")
"""Peers after those that take turns: they are timed one by one while there is time."""
TURNS = ("--kept", "3")
SIZES = {
    "a": {
        "6.7b": Sized((6, 3), (RECORDED, "torch-compile", "ours", *FIELD), 16, TURNS),
        "gpt2-xl": Sized((12, 12), (RECORDED, "torch-compile", "ours", *FIELD), 16, TURNS),
        "gpt2-124m": Sized((0, 0), (RECORDED, "torch-compile", "ours", *FIELD), 0, TURNS),
    },
    "b": {
        "xl-48": Sized((48, 48), (RECORDED, "torch"), 16, ("--steps", "8", "--repetitions", "1")),
        "llama-8b": Sized((4, 2), (RECORDED, "ours-lt", "torch-compile", "torchtitan", "ours", *FIELD), 4),
        "llama-8b-long": Sized((0, 0), ("ours", "torch", "torchtitan", "megatron-core", "torch-compile")),
    },
}
"""What matters most of a command comes first. A layer of 6.7B is what counts: as many as let three peers take turns."""
TINY_SIZES = {
    "a": {"tiny-bf16": Sized((2, 1), (RECORDED, "ours", "torch", "torch-narrow", "torchtitan"), 0, ("--kept", "3"))},
    "b": {"tiny-llama": Sized((0, 0), (RECORDED, "ours", "torch")), "tiny-layers": Sized((0, 0), ("ours", "torch"))},
}


@dataclass(frozen=True)
class Setting:
    """What the parts are made for."""

    folder: Path
    device: str
    memory: int
    tiny: bool
    name: str
    """Of the device, in small letters and hyphens."""

    def file(self, name: str) -> str:
        """Path of a part's file."""
        return str(self.folder / name)


def cluster_of(name: str) -> str:
    """The shipped cluster that has such a device; without one, a machine that is described from nothing."""
    return next((cluster for word, cluster in CLUSTERS.items() if word in name.split("-")), "clusters/cpu")


def device_name(device: str) -> str:
    """What results are called: the device's name in small letters and hyphens."""
    import torch

    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def setting_of(folder: Path, device: str, tiny: bool) -> Setting:
    """Look at the device."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    return Setting(folder, device, memory, tiny, device_name(device))


def sizes_of(which: str, tiny: bool) -> dict[str, Sized]:
    """Sizes of a command, in their order."""
    return (TINY_SIZES if tiny else SIZES)[which]


def compare_part(at: Setting, size: str, sized: Sized, least_s: float) -> Part:
    """One part a size, so that a size that goes wrong costs its own time only."""
    layers = sized.layers[0 if at.memory >= LARGE else 1]
    named = "gpt2-xl" if size == "xl-48" else size  # the same model, beside another number of layers
    changes = ["--layers", str(layers)] if layers else []
    changes += ["--global-batch", str(sized.global_batch)] if sized.global_batch else []
    steps = ["--steps", "3", "--warm-up", "3", "--window", "0.05" if at.tiny else "1.5",
             "--repetitions", "2" if at.tiny else "3"]
    command = [sys.executable, "-m", "benchmarks.compare", "--device", at.device, "--sizes", named, *changes, *steps,
               *sized.more, "--out", at.file(f"compare-{size}.json"), "--peers",
               *(peer for peer in sized.peers if at.device != "cpu" or peer != RECORDED)]
    return Part(f"compare-{size}", command, 1.25 * least_s, "tokens/s and MFU of this project and others", "", least_s)


def tests(at: Setting, name: str, where: Sequence[str], *, workers: bool) -> list[str]:
    """The command that runs tests that need a GPU (on a CPU: those of its own library). It names each as it ends, since
    the junit file of a part that is stopped is never written."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={at.file(f'{name}.xml')}"]
    command += ["-m", "gpu"] if at.device == "cuda" else ["-k", "cpu"]
    if at.device == "cuda" and workers and not at.tiny and importlib.util.find_spec("xdist"):
        command += ["-n", str(min(TEST_WORKERS, len(os.sched_getaffinity(0))))]
    return [*command, *where]


def xl_or_tiny(at: Setting) -> list[str]:
    """The size whose captured steps are proved and profiled."""
    return ["--size", "tiny-bf16"] if at.tiny else ["--size", "gpt2-xl", "--layers", "12", "--global-batch", "16"]


def first_parts(at: Setting) -> list[Part]:
    """Command a: what brings the headline numbers."""
    python = sys.executable
    norm = "tests/kernels/test_norm.py"  # opcheck compares under modes below which the ghost machine computes nothing
    kernels = [norm, "--deselect", f"{norm}::test_opcheck"] if at.tiny else [
        f"tests/kernels/test_{name}.py" for name in CHANGED]
    on_gpu = at.device == "cuda"
    recorded = [python, "-m", "benchmarks.compare.recorded", *xl_or_tiny(at), "--out", at.file("recorded.json"),
                *(["--window", "0.05", "--steps", "2"] if at.tiny else [])]
    ops = [python, "benchmarks/gpu_kernels.py", "--device", at.device, "--rows", "--variants", "own", "eager",
           *(["--tiny"] if at.tiny else []), "--json", at.file("ops.json")]
    epilogues = [python, "benchmarks/epilogues.py", *(["--tiny"] if at.tiny else []), "--json",
                 at.file("epilogues.json")]
    least = {"6.7b": 85.0, "gpt2-xl": 70.0, "gpt2-124m": 70.0}
    return [
        Part("env", [python, "scripts/gpu_env.py", "--device", at.device, "--out", at.file("env.json")], 30.0,
             "card, power limit, clocks, versions, what serves each op", "", 20.0),
        Part("kernels", tests(at, "kernels", kernels, workers=True), 60.0, "changed kernels against fp64", "", 45.0),
        *([Part("recorded", recorded, 60.0, "replayed steps against the same steps call by call, bit for bit", "",
                48.0)] if on_gpu else []),
        *(compare_part(at, name, sized, least.get(name, 60.0)) for name, sized in sizes_of("a", at.tiny).items()),
        Part("ops", ops, 60.0, "the state's hash, and norms at few to many rows, against copy bandwidth", "", 34.0),
        *([Part("epilogues", epilogues, 45.0, "GeLU in the product's epilogue: go or no-go", "", 28.0)] if on_gpu
          else []),
    ]


def second_parts(at: Setting) -> list[Part]:
    """Command b: what stands beside them."""
    python, port = sys.executable, [sys.executable, "-m", "megatron_port"]
    profile = [python, "-m", "benchmarks.compare.profile", "--device", at.device, "--peer",
               RECORDED if at.device == "cuda" else "ours", *xl_or_tiny(at), "--out", at.file("profile.json")]
    experts = ["tiny-experts"] if at.tiny else ["experts-8", "experts-64"]
    layouts = LAYOUTS[:3] if at.tiny else LAYOUTS
    engine = ["tests/gpu", *(["-k", "bit_equal"] if at.tiny else [])]
    calibrate = [*port, "bench", "calibrate", cluster_of(at.name), "-o", at.file("calibrated.toml"), "--seconds",
                 "0.02" if at.tiny else "0.1", "--set", f"backend.device={at.device}"]
    least = {"xl-48": 30.0, "llama-8b": 44.0, "llama-8b-long": 20.0}
    return [
        Part("profile", profile, 40.0, "where a captured step's time goes; launch gaps; waits", "", 25.0),
        Part("train", [python, "scripts/gpu_train.py", "--device", at.device, "--out", str(at.folder),
                       *(["--tiny"] if at.tiny else [])], 70.0,
             "a run on text in captured steps: loss, tokens/s, a resume, a sample", "", 50.0),
        Part("experts", [python, "-m", "benchmarks.compare.profile", "--device", at.device, "--size", *experts, "--out",
                         at.file("experts.json")], 45.0, "a layer of experts: time by group, waits", "", 28.0),
        *([Part("engine", tests(at, "engine", engine, workers=True), 70.0, "runs, waits and layouts on the GPU", "",
                45.0)] if at.device == "cuda" else []),
        Part("layouts", [*port, "parity", at.file("run.toml"), "--layouts", *layouts, "--out", at.file("layouts"),
                         "--set", f"backend.device={at.device}", "--set", "layout.zero_stage=0", "--set",
                         f"backend.share_devices={str(at.device == 'cuda').lower()}"], 40.0,
             "losses and gradients of layouts whose ranks share the GPU, over gloo", "", 16.0),
        *(compare_part(at, name, sized, least.get(name, 40.0)) for name, sized in sizes_of("b", at.tiny).items()),
        *([] if at.tiny and at.device == "cuda" else [  # its products have a GPU's size: minutes on the ghost machine
            Part("calibrate", calibrate, 60.0, "what the planner needs of this device", "", 22.0)]),
    ]


def parts(which: str, at: Setting) -> list[Part]:
    """The parts of a command, in their order. In a rehearsal, whose times mean nothing, each may take what is left."""
    made = first_parts(at) if which == "a" else second_parts(at)
    return [replace(part, limit_s=4.0 * part.least_s) for part in made] if at.tiny else made


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


def not_run(part: Part) -> dict[str, Any]:
    """Return the row of a part that has not ended. A comparison names its peers: what has no figure must not vanish."""
    row: dict[str, Any] = {"command": " ".join(part.command), "exit": None, "state": "not run yet", "seconds": 0.0,
                           "says": part.says, "data": None}
    if "--peers" in part.command:
        peers = part.command[part.command.index("--peers") + 1 :]
        size = part.command[part.command.index("--sizes") + 1]
        row["data"] = {"sizes": [{"size": size, "peers": [{"peer": p, "state": "not run"} for p in peers]}]}
    return row


class Record:
    """The session's file, written anew after each part."""

    def __init__(self, which: str, at: Setting, arguments: Sequence[str], wanted: Sequence[Part]) -> None:
        import torch

        from benchmarks.compare.clocks import card

        self.folder, self.path = at.folder, at.folder / f"gpu-session-{at.name}-{which}.json"
        self.made: dict[str, Any] = {
            "device": at.name, "card": card(at.device), "torch": torch.__version__, "python": sys.version.split()[0],
            "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "command": " ".join(["scripts/gpu_session.sh", *arguments]),
            "parts": {part.name: not_run(part) for part in wanted},
        }
        self.write()

    def take(self, outcome: PartResult) -> None:
        """Add a part: how it ended, what it measured, and the end of its output where it did not end well."""
        row = {**asdict(outcome), "state": outcome.state, "data": data_of(outcome.name, self.folder)}
        if row["data"] is None:
            row["data"] = self.made["parts"][outcome.name]["data"]
        if outcome.exit:
            text = self.folder / f"{outcome.name}.txt"
            row["tail"] = text.read_text(errors="replace")[-2000:] if text.exists() else ""
        self.made["parts"][outcome.name] = row
        self.write()

    def write(self) -> None:
        """Replace the file whole."""
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.made, indent=1) + "\n")
        partial.replace(self.path)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=list(SECONDS), help="; ".join(f"{k}: {s:.0f} s" for k, s in SECONDS.items()))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-session", help="folder of the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cuda is also ROCm's name")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and few cases (always on a CPU)")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="own kernels built elsewhere")
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
    os.environ["PREBUILT_KERNELS"] = "1"  # the tests take the libraries as they are: nothing is compiled
    at = setting_of(folder, args.device, args.tiny or args.device == "cpu")
    wanted = parts(args.which, at)
    unknown = set(args.only) - {p.name for p in wanted}
    if unknown:
        print(f"error: no part {', '.join(sorted(unknown))}; parts: {', '.join(p.name for p in wanted)}",
              file=sys.stderr)
        return 2
    wanted = [p for p in wanted if not args.only or p.name in args.only]
    for part in wanted:  # what an earlier session left is not this one's
        for name in (f"{part.name}.json", f"{part.name}.xml", f"{part.name}.txt"):
            (folder / name).unlink(missing_ok=True)
    record = Record(args.which, at, sys.argv[1:] if argv is None else argv, wanted)
    outcomes = run_all(wanted, folder, started + SECONDS[args.which], reserve_s=RESERVE_S, after=record.take)
    text = summary_table(record.made)
    record.path.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwritten: {record.path}")
    return int(any(o.exit for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
