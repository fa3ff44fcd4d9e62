"""What `make quickstart` runs: fetch a corpus, train on it with every parallelism, and show what came of it.

Each phase says what it does and how long it should take on two cores; a phase
whose result is there already is not done again, and a run that was interrupted
goes on from its last checkpoint. Start afresh with `rm -r runs/quickstart`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "KING HENRY:\n"
DATA = Path("data")
ROOT = Path(__file__).resolve().parent.parent


def phase(text: str, seconds: str) -> float:
    """Announce a phase; its start."""
    print(f"\n== {text} (about {seconds} on two cores)", flush=True)
    return time.perf_counter()


def command(*arguments: str, capture: bool = False) -> str:
    """Run ``megatron-port …`` as a user would; leaves with its exit code if it fails."""
    full = [sys.executable, "-W", "ignore::FutureWarning", "-m", "megatron_port", *arguments]
    shown = [repr(a) if set(a) & {" ", "\n"} else a for a in arguments]
    print("$ megatron-port " + " ".join(shown), flush=True)
    done = subprocess.run(full, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def prepare_corpus() -> float:
    """Fetch and tokenize once; the corpus's unigram entropy in nats a token."""
    from megatron_port.data.indexed import unigram_entropy

    prefix = DATA / "quickstart"
    if not prefix.with_name("quickstart.idx").exists():
        phase("fetching Shakespeare's works and writing them as .bin/.idx, a token a byte", "10 s")
        command("data", "fetch", str(DATA / "corpus"))
        command("data", "prepare", str(prefix), "--input", str(DATA / "corpus" / "text"), "--tokenizer", "byte",
                "--blank-lines", "2")
    command("data", "inspect", str(prefix), "--characters", "0")
    return unigram_entropy(prefix)


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def main() -> int:
    """The quick start; 0."""
    os.chdir(ROOT)
    from megatron_port.config.flops import parameter_count
    from megatron_port.config.loader import load
    from megatron_port.errors import PortError
    from megatron_port.telemetry.metrics import read_metrics
    from megatron_port.telemetry.picture import draw_loss

    small = os.environ.get("SMALL", "") not in ("", "0")
    changes = ["layout.data_parallel_size=1"] if small else []
    started = time.perf_counter()
    try:
        entropy = prepare_corpus()
    except PortError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    config = load("runs/quickstart", changes).config
    layout = config.layout
    world = layout.tensor_parallel_size * layout.pipeline_parallel_size * layout.data_parallel_size
    begin = phase(f"training on {world} processes: tensor, pipeline and ZeRO-1 data parallelism", "2 minutes")
    command("train", "runs/quickstart", "--nproc", str(world), *[x for c in changes for x in ("--set", c)])
    training = time.perf_counter() - begin
    folder = Path(config.output_dir) / config.name
    lines = list(read_metrics(folder / "metrics.jsonl"))
    steps = [x for x in lines if "loss" in x]
    done = int(steps[-1]["step"]) if steps else 0
    if done < config.training.steps:
        print(f"\nstopped at step {done} of {config.training.steps}, and saved; the same command goes on from there")
        return 130
    phase("writing a sample of text from the checkpoint, on one process", "10 s")
    sample = command("generate", str(folder), "--prompt", PROMPT, "--tokens", "200", capture=True)
    print(sample)
    (folder / "sample.txt").write_text(sample)
    picture = folder / "loss.png"
    draw_loss(folder / "metrics.jsonl", picture, unigram_entropy=entropy, title="quickstart: loss")
    validation = [float(x["validation_loss"]) for x in lines if "validation_loss" in x]
    rates = sorted(float(x["tokens_per_second"]) for x in steps)
    print("\n== done")
    print(table([
        ("layout", f"tp {layout.tensor_parallel_size} x pp {layout.pipeline_parallel_size} x dp "
                   f"{layout.data_parallel_size}, ZeRO-{layout.zero_stage}, engine {config.engine}, "
                   f"{config.precision.dtype}"),
        ("parameters", f"{parameter_count(config.model):,}"),
        ("tokens", f"{int(steps[-1]['tokens']):,}"),
        ("validation loss", f"{validation[0]:.3f} at the start, {validation[-1]:.3f} at the end (nats a byte)"),
        ("unigram entropy", f"{entropy:.3f} (the best that a model without context can do)"),
        ("tokens/s", f"{rates[len(rates) // 2]:,.0f} (median step)"),
        ("time", f"training {training:.0f} s, all of it {time.perf_counter() - started:.0f} s"),
        ("files", f"{folder}/: metrics.jsonl, loss.png, sample.txt, config.toml, checkpoints/"),
    ]))
    twice = config.training.steps * 2
    print(f"""
  what to try next
    megatron-port train runs/quickstart --nproc {world} --set training.steps={twice}   go on with this run
    megatron-port parity runs/quickstart --layouts tp2pp2dp2 tp1pp1dp8   see that another layout gives the same
    megatron-port generate {folder} --prompt "HAMLET:" --nproc 2 --set layout.tensor_parallel_size=2
    megatron-port doctor   what this machine has
  (each with .venv/bin/ in front, or after `. .venv/bin/activate`)""")
    if validation[-1] > 0.9 * entropy:
        print(f"error: the validation loss {validation[-1]:.3f} is not clearly under {entropy:.3f}", file=sys.stderr)
        return 6
    return 0


if __name__ == "__main__":
    sys.exit(main())
