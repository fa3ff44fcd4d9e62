"""What `make quickstart` runs: fetch a corpus, train on it with every parallelism, and show what came of it.

Each phase says what it does and how long it should take on two cores; a phase
whose result is there already is not done again, and a run that was interrupted
resumes from its last checkpoint. Start afresh with `rm -r runs/quickstart`.

DEVICE=cuda (or rocm) trains on GPUs, and on nothing else; `quickstart_plan` says
on how many. ENGINE=deepspeed trains with the other engine. docs/troubleshooting.md lists the
exit codes; 6: the loss rose above its start, is not finite, or is no better than a model
without context.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quickstart_plan import COMPARED, Choice, choose, compare_losses, faults, on_or_off, other_layout

PROMPT = "KING HENRY:\n"
DATA = Path("data")
ROOT = Path(__file__).resolve().parent.parent


def phase(text: str, about: str = "") -> float:
    """Announce a phase and how long it takes on two cores, where that was measured; its start."""
    print(f"\n== {text}" + (f" (about {about} on two cores)" if about else ""), flush=True)
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
    """Fetch and tokenize once; the corpus's unigram entropy in nats per token."""
    from megatron_port.ext.corpora.corpus_facts import unigram_entropy

    prefix = DATA / "quickstart"
    if not prefix.with_name("quickstart.idx").exists():
        phase("fetching Shakespeare's works and writing them as .bin/.idx, one token per byte", "10 s")
        command("data", "fetch", str(DATA / "corpus"))
        command("data", "prepare", str(prefix), "--input", str(DATA / "corpus" / "text"), "--tokenizer", "byte",
                "--blank-lines", "2")
    command("data", "inspect", str(prefix), "--characters", "0")
    return unigram_entropy(prefix)


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def chosen() -> Choice:
    """The run for DEVICE, ENGINE, SMALL, SHARE_GPU, SHARD, MOE and LONG of the environment, and the GPUs here.

    Raises:
        EnvironmentFault: a GPU was asked for, and torch cannot use one; the message says why.
    """
    from megatron_port.core.errors import EnvironmentFault
    from megatron_port.run.device import choose_device, installed_accelerators

    device = os.environ.get("DEVICE", "") or "cpu"
    names = "SMALL", "SHARE_GPU", "SHARD", "MOE", "LONG"
    small, share, shard, moe, long = (on_or_off(os.environ.get(name, "")) for name in names)
    gpus = installed_accelerators()
    try:
        if device in ("cuda", "rocm"):
            choose_device(device, gpus=gpus)
        engine = os.environ.get("ENGINE", "") or "native"
        return choose(device, gpus.count, small=small, share=share, shard=shard, moe=moe, long=long, engine=engine)
    except (EnvironmentFault, ValueError) as error:
        raise EnvironmentFault(f"DEVICE={device}: {error}. Nothing was trained; `DEVICE=cpu make quickstart` trains on "
                               "the CPU") from None


def main(folder: Path = ROOT, extra: Sequence[str] = ()) -> int:
    """The quick start in ``folder``, with ``extra`` overrides of the run; its exit code."""
    os.chdir(folder)
    from megatron_port.core.config.loader import load
    from megatron_port.core.errors import PortError

    started = time.perf_counter()
    try:
        choice = chosen()
        print(f"training on {choice.says}", flush=True)
        entropy = prepare_corpus()
    except PortError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    changes = [*choice.overrides, *extra]
    config = load(choice.run, changes).config
    layout = config.layout
    text = (f"training on {choice.says}: tp {layout.tensor_parallel_size} x pp {layout.pipeline_parallel_size} x dp "
            f"{layout.data_parallel_size}")
    begin = phase(text, "2 minutes" if choice.run == "runs/quickstart" else "")
    command("train", choice.run, "--nproc", str(choice.ranks), *[x for c in changes for x in ("--set", c)])
    return conclude(choice, changes, entropy, training=time.perf_counter() - begin, started=started)


def conclude(choice: Choice, changes: list[str], entropy: float, *, training: float, started: float) -> int:
    """Sample, picture and table of a run that was trained; the exit code."""
    from megatron_port.core.config.loader import load
    from megatron_port.ext.telemetry.flops import counted
    from megatron_port.ext.telemetry.metrics import read_metrics
    from megatron_port.tools.report.picture import draw_loss

    config = load(choice.run, changes).config
    layout, folder = config.layout, Path(config.output_dir) / config.name
    more = f" (ep {layout.expert_parallel_size})" if config.model.moe.enabled else ""
    more += f" x cp {layout.context_parallel_size}" if layout.context_parallel_size > 1 else ""
    lines = list(read_metrics(folder / "metrics.jsonl"))
    steps = [x for x in lines if "loss" in x]
    done = int(steps[-1]["step"]) if steps else 0
    if done < config.training.steps:
        print(f"\nstopped at step {done} of {config.training.steps}, and saved; the same command resumes from there")
        return 130
    device = [c for c in changes if c.startswith("backend.device=")]
    phase("writing a sample of text from the checkpoint, on one process", "10 s")
    sample = command("generate", str(folder), "--prompt", PROMPT, "--tokens", "200",
                     *[x for c in device for x in ("--set", c)], capture=True)
    print(sample)
    (folder / "sample.txt").write_text(sample)
    compared, different = second_layout(choice, changes, folder)
    draw_loss(folder / "metrics.jsonl", folder / "loss.svg", unigram_entropy=entropy, title=f"{config.name}: loss")
    validation = [float(x["validation_loss"]) for x in lines if "validation_loss" in x]
    losses = {int(x["step"]): float(x["loss"]) for x in steps}
    highest = max(losses, key=lambda s: losses[s])
    rates = sorted(float(x["tokens_per_second"]) for x in steps)
    print("\n== done")
    print(table([
        ("trained on", choice.says),
        ("layout", f"tp {layout.tensor_parallel_size} x pp {layout.pipeline_parallel_size} x dp "
                   f"{layout.data_parallel_size}{more}, ZeRO-{layout.zero_stage}, engine {config.engine}, "
                   f"{config.precision.dtype}"),
        ("model", counted(config.model, config.fine_tuning)),
        ("tokens", f"{int(steps[-1]['tokens']):,}"),
        ("training loss", f"{losses[min(losses)]:.3f} at the start, highest {losses[highest]:.3f} at step {highest}, "
                          f"{losses[max(losses)]:.3f} at the end (nats per byte)"),
        ("validation loss", f"{validation[0]:.3f} at the start, {validation[-1]:.3f} at the end"),
        ("unigram entropy", f"{entropy:.3f} (the best that a model without context can do)"),
        ("tokens/s", f"{rates[len(rates) // 2]:,.0f} (median step)"),
        *([("two layouts", compared)] if compared else []),
        ("time", f"training {training:.0f} s, all of it {time.perf_counter() - started:.0f} s"),
        ("files", f"{folder}/: metrics.jsonl, loss.svg, sample.txt, config.toml, checkpoints/"),
        ("report", f"{(folder / 'report.html').resolve()}" + (", with the curves of both layouts" if compared else "")),
    ]))
    print(next_commands(choice, folder, config.training.steps))
    found = faults(losses, validation, entropy) + different
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    return 6 if found else 0


def second_layout(choice: Choice, changes: Sequence[str], folder: Path) -> tuple[str, list[str]]:
    """Take the first steps again on one process, and write the report of both; (a line that compares them, faults)."""
    from megatron_port.tools.report.picture import read_curves

    other = folder.with_name(f"{folder.name}-one-process")
    sets = other_layout(choice, changes, other.name)
    if not sets:
        command("report", str(folder), capture=True)
        return "", []
    phase(f"the first {COMPARED} steps again, on one process: a layout is not a hyperparameter", "20 s")
    command("train", choice.run, "--nproc", "1", *[x for c in sets for x in ("--set", c)], capture=True)
    command("report", str(folder), str(other), "--out", str(folder / "report.html"), capture=True)
    return compare_losses(*(read_curves(f / "metrics.jsonl").training for f in (folder, other)))


def next_commands(choice: Choice, folder: Path, steps: int) -> str:
    """What to try next."""
    usual = choice.run == "runs/quickstart"
    sets = "".join(f" --set {c}" for c in choice.overrides if not usual or c.startswith("engine="))
    small = " --set layout.data_parallel_size=1" if not sets and choice.ranks == 4 else ""
    layouts = "tp2pp2dp2 tp1pp1dp8" if choice.ranks == 8 else "tp2pp2dp1 tp1pp1dp4"
    return f"""
  what to try next
    megatron-port train {choice.run} --nproc {choice.ranks}{sets}{small} --set training.steps={2 * steps}   train on
    megatron-port parity runs/quickstart --layouts {layouts}   see that another layout gives the same, on the CPU
    megatron-port generate {folder} --prompt "HAMLET:" --nproc 2 --set layout.tensor_parallel_size=2
    megatron-port watch {folder}   the same as a live page, while a run trains
    megatron-port doctor   what this machine has
  (each with .venv/bin/ in front, or after `. .venv/bin/activate`)"""


if __name__ == "__main__":
    sys.exit(main())
