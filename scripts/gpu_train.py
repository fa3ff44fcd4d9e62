"""A user's first run on a device, from text to text: this checkout's pages as a corpus, training, a resume, a sample.

    python scripts/gpu_train.py --device cuda --out FOLDER            # GPT-2 124M with its dropout, in captured steps
    python scripts/gpu_train.py --device cpu --tiny --out FOLDER      # a rehearsal

Each step is a ``megatron-port`` command of its own. ``FOLDER/train.json`` has what came of it: the first and last loss,
where the second start resumed, tokens/s, MFU, peak memory, the sample. Exit 1: the loss did not fall, or the second
start did not go on from the first one's end. Gigabytes of checkpoints are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.compare.clocks import clock_log  # noqa: E402
from benchmarks.compare.results import hardware  # noqa: E402
from megatron_port.ext.telemetry.metrics import read_metrics  # noqa: E402

RUN = """extends = "{model}"
name = "first"
engine = "native"
output_dir = "{out}"
[model]
vocab_size = 257
{shape}
[layout]
vocab_padding_multiple = 1
[batch]
micro_batch_size = {micro_batch}
global_batch_size = {global_batch}
[precision]
dtype = "{dtype}"
[optimizer]
lr = 6e-4
warmup_steps = 5
[data]
train = ["{corpus}"]
tokenizer = "byte"
[training]
steps = {steps}
[checkpoint]
save_interval = {steps}
[backend]
device = "{device}"
"""
TINY = "num_layers = 2\nhidden_size = 64\nnum_attention_heads = 4\nseq_length = 32"
STEPS, TINY_STEPS = (40, 60), (6, 12)
"""Of the first start, and of both."""


def command(*arguments: str, log: Path) -> str:
    """Run ``megatron-port …``; return what it printed, which is added to ``log``. SystemExit: it failed."""
    done = subprocess.run([sys.executable, "-m", "megatron_port", *arguments], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, cwd=ROOT, check=False)
    with log.open("a") as out:
        out.write(f"$ megatron-port {' '.join(arguments)}\n{done.stdout}\n")
    if done.returncode:
        print(done.stdout[-3000:])
        sys.exit(done.returncode)
    return done.stdout


def write_inputs(folder: Path, device: str, *, tiny: bool) -> Path:
    """Write the pages as text and the run file; return the latter."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    pages = "\n\n".join(p.read_text() for p in sorted((ROOT / "docs").glob("*.md")))
    (folder / "text" / "pages.txt").write_text(pages)
    run = folder / "first.toml"
    run.write_text(RUN.format(
        model="models/gpt-tiny" if tiny else "models/gpt2-124m", out=folder / "runs", shape=TINY if tiny else "",
        micro_batch=2 if tiny else 16, global_batch=4 if tiny else 64, steps=(TINY_STEPS if tiny else STEPS)[0],
        corpus=folder / "corpus",
        dtype="fp32" if device == "cpu" else "bf16", device=device,
    ))
    return run


def results(folder: Path, sample: str) -> dict[str, Any]:
    """What the run's own metrics say."""
    steps = [x for x in read_metrics(folder / "metrics.jsonl") if "loss" in x]
    settled = steps[len(steps) // 2 :]
    found: dict[str, Any] = {
        "steps": [int(x["step"]) for x in steps], "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"],
        "sample": sample[-400:],
    }
    for key in ("tokens_per_second", "seconds", "model_tflops_per_device", "mfu", "memory_bytes"):
        values = [float(x[key]) for x in settled if x.get(key) is not None]
        if values:
            found[key] = statistics.median(values)
    return found


def train(folder: Path, device: str, *, tiny: bool) -> tuple[dict[str, Any], tuple[int, int]]:
    """Train, resume and sample in ``folder``; return what came of it, and the steps of the first start and of both."""
    run, log = write_inputs(folder, device, tiny=tiny), folder / "commands.txt"
    command("data", "prepare", str(folder / "corpus"), "--input", str(folder / "text"), "--tokenizer", "byte", log=log)
    first, further = TINY_STEPS if tiny else STEPS
    recorded = ["--set", "backend.graphs=step"] if device == "cuda" else []
    command("train", str(run), *recorded, log=log)
    with clock_log(device) as clocks:
        again, clocked = clocks.timed(
            lambda: command("train", str(run), "--set", f"training.steps={further}", *recorded, log=log))
    resumed = re.search(r"resumed from .* at step (\d+)", again)
    sample = command("generate", str(folder / "runs" / "first"), "--prompt", "A layout ", "--tokens", "60", log=log)
    found = results(folder / "runs" / "first", sample)
    found |= {"resumed_at": int(resumed[1]) if resumed else None, "recorded": bool(recorded), "clocks": clocked}
    return found, (first, further)


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cuda is also ROCm's name")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    folder = (args.out / "train").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        found, counts = train(folder, args.device, tiny=args.tiny)
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    said = " ".join(["scripts/gpu_train.py", *(sys.argv[1:] if argv is None else argv)])
    found = {"command": said, "hardware": hardware(args.device, 1), **found}
    (args.out / "train.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "steps"}, indent=1))
    whole = found["steps"] == list(range(1, counts[1] + 1)) and found["resumed_at"] == counts[0]
    return 0 if whole and found["last_loss"] < (0.98 if args.tiny else 0.6) * found["first_loss"] else 1


if __name__ == "__main__":
    sys.exit(main())
