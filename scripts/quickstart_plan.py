"""What `make quickstart` trains on, and whether the result is sound: decisions without a process or a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

DEVICES = ("cpu", "cuda", "rocm")
ENGINES = ("native", "deepspeed")
LAYOUTS = {1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}
"""Ranks → (tp, pp, dp)."""


@dataclass(frozen=True)
class Choice:
    """A run of the quick start."""

    run: str
    """Name of the shipped run file."""
    ranks: int
    overrides: tuple[str, ...]
    """``a.b=value``, for ``--set``."""
    says: str
    """Which devices it trains on, and why so many."""


def on_or_off(value: str) -> bool:
    """``SMALL``, ``SHARE_GPU``, ``SHARD``, ``MOE``, ``LONG``: anything but nothing and 0 switches it on."""
    return value not in ("", "0")


def choose(
    device: str, gpus: int, *, small: bool = False, share: bool = False, shard: bool = False, moe: bool = False,
    long: bool = False, engine: str = "native",
) -> Choice:
    """The run for ``DEVICE=device`` on a machine where torch can use ``gpus`` GPUs of that kind.

    One rank per GPU, on as many GPUs as there is a layout for. ``small``: at most 4 ranks. ``share``: all ranks even
    on fewer GPUs than that. ``shard``, ``moe``, ``long``: another run, of :func:`_another_run`. ``engine``: deepspeed
    takes the usual run alone.

    Raises:
        ValueError: no such device or engine, another run on a GPU, two of them, one that the engine cannot do, or
            ``device`` is a GPU and there is none. Training on the CPU instead would not be what was asked for.
    """
    if engine not in ENGINES:
        raise ValueError(f"ENGINE={engine} is not one of {', '.join(ENGINES)}")
    if engine != "native":
        native = [n for n, on in (("SHARD", shard), ("MOE", moe), ("LONG", long), ("SHARE_GPU", share)) if on]
        if native:
            raise ValueError(f"{native[0]}=1 is for the native engine; leave it out, or ENGINE={engine}")
        choice = choose(device, gpus, small=small)
        return replace(choice, overrides=(*choice.overrides, f"engine={engine}"))
    if device not in DEVICES:
        raise ValueError(f"{device!r} is not one of {', '.join(DEVICES)}")
    most = 4 if small else 8
    asked = [name for name, on in (("SHARD", shard), ("MOE", moe), ("LONG", long)) if on]
    if asked and device != "cpu":
        raise ValueError(f"{asked[0]}=1 is a run for the CPU; leave it out, or DEVICE")
    if len(asked) > 1:
        raise ValueError(f"{'=1 and '.join(asked)}=1 are {len(asked)} runs; leave all but one out")
    if asked:
        return _another_run(asked[0], most)
    if device == "cpu":
        more = f" ({gpus_here(gpus)} not used; for that: DEVICE=cuda, or rocm, make quickstart)" if gpus else ""
        return Choice("runs/quickstart", most, overrides(most), f"the CPU: {most} ranks{more}")
    name = device.upper() if device == "cuda" else "ROCm"
    if gpus < 1:
        raise ValueError("torch sees no GPU")
    changed = [f"backend.device={device}"]
    if share and gpus < most:
        # NCCL refuses two ranks on one GPU; over gloo a run without ZeRO needs the fewest collectives.
        changed += ["layout.zero_stage=0"]
        says = f"{gpus} {name} GPU{'s' * (gpus > 1)} that {most} ranks share (SHARE_GPU=1): over gloo, slow"
        return Choice("runs/quickstart-gpu", most, (*overrides(most), *changed), says)
    ranks = max(n for n in LAYOUTS if n <= min(gpus, most))
    says = f"{ranks} {name} GPU{'s' * (ranks > 1)}, one rank per GPU"
    if gpus > ranks:
        why = "SMALL=1" if ranks == most == 4 else f"layouts are for {', '.join(map(str, LAYOUTS))} GPUs"
        says += f" ({gpus - ranks} of {gpus} not used: {why})"
    if ranks == 1:
        says += "; one rank is not split: SHARE_GPU=1 lets 8 ranks share the GPU and shows every parallelism, slowly"
    return Choice("runs/quickstart-gpu", ranks, (*overrides(ranks), *changed), says)


def _another_run(name: str, ranks: int) -> Choice:
    """A run for the CPU beside the usual one. ``SHARD``: replicas alone, with weights and state sharded and the state
    in host memory; ``MOE``: a model with experts, divided over the replicas of each of two stages; ``LONG``: longer
    sequences, each shared by four ranks."""
    half = ranks // 2
    if name == "MOE":
        sizes = tuple(f"layout.{axis}_parallel_size={half}" for axis in ("data", "expert"))
        says = f"the CPU: {ranks} ranks, two stages of {half}, 8 experts in each layer divided over {half} ranks"
        return Choice("runs/quickstart-moe", ranks, sizes, says)
    if name == "LONG":
        replicas = ranks // 4
        says = f"the CPU: {ranks} ranks, sequences of 512 shared by four, attention within documents"
        return Choice("runs/quickstart-long", ranks, (f"layout.data_parallel_size={replicas}",), says)
    says = f"the CPU: {ranks} ranks, weights and optimizer state sharded (ZeRO-3), the state in host memory"
    return Choice("runs/quickstart-shard", ranks, (f"layout.data_parallel_size={ranks}",), says)


def gpus_here(count: int) -> str:
    """``1 GPU is``, ``2 GPUs are``."""
    return f"{count} GPU{'s are' if count > 1 else ' is'}"


def overrides(ranks: int) -> tuple[str, ...]:
    """The layout of so many ranks, for ``--set``."""
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return tuple(f"layout.{name}={size}" for name, size in zip(names, LAYOUTS[ranks], strict=True))


def faults(losses: Mapping[int, float], validation: Sequence[float], entropy: float) -> list[str]:
    """Why a finished run is not one to show: each with its numbers; empty if it is.

    Args:
        losses: step → training loss, from metrics.jsonl.
        validation: losses before training and after each evaluation.
        entropy: of single tokens of the corpus; like all losses in nats per token.
    """
    found = []
    first = losses[min(losses)]
    lost = [step for step, loss in sorted(losses.items()) if not isfinite(loss)]
    if lost:
        found.append(f"the training loss is not finite at step {lost[0]} ({len(lost)} of {len(losses)} steps)")
    step = max((s for s in losses if isfinite(losses[s])), key=lambda s: losses[s], default=None)
    if step is not None and losses[step] > first:
        found.append(f"the training loss rose to {losses[step]:.3f} at step {step}, above its start {first:.3f}")
    if not validation[-1] <= 0.9 * entropy:
        found.append(f"the validation loss {validation[-1]:.3f} is not clearly under the unigram entropy {entropy:.3f}")
    return found


COMPARED = 10
"""Steps of the run that another layout takes again."""
BOUND = 1e-5
"""Of the loss, relative: what docs/parity.md allows a step that begins at equal weights. Here each begins at those that
the steps before it made, and 5e-8 was measured."""
PLAIN_RUN = "runs/quickstart"


def other_layout(choice: Choice, changes: Sequence[str], folder: str) -> tuple[str, ...]:
    """Overrides of the run that shows the layout to be no hyperparameter: one process, its first ``COMPARED`` steps, no
    evaluation and no checkpoint. ``folder``: name of the run. Empty: another run than the plain one on a CPU.
    """
    if choice.run != PLAIN_RUN or choice.ranks == 1:
        return ()
    kept = [c for c in changes if not c.startswith("layout.")]
    sizes = [f"layout.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "data")]
    return (*kept, *sizes, f"name={folder}", f"training.steps={COMPARED}", "training.eval_interval=0",
            "training.eval_batches=0", "checkpoint.save_interval=0", "checkpoint.save_final=false",
            "checkpoint.resume=never")


def compare_losses(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[str, list[str]]:
    """Return a line on how far two layouts' training losses are apart, and what is wrong with that.

    Args:
        one, other: step → training loss; the steps that both have are compared.
    """
    steps = sorted(one.keys() & other.keys())
    if not steps:
        return "no step in common", ["the two layouts have no step in common"]
    apart = {step: abs(one[step] - other[step]) / abs(other[step]) for step in steps}
    worst = max(steps, key=lambda step: apart[step])
    line = f"the loss of each of {len(steps)} steps equal within {apart[worst]:.1e}, relative (bound {BOUND:.0e})"
    bad = [step for step in steps if not apart[step] <= BOUND]
    return line, [f"the losses of the two layouts differ by {apart[step]:.1e} at step {step}" for step in bad[:1]]
