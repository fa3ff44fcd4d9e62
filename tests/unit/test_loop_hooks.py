"""Hooks of the training loop: which a run has, in which order they are asked, and what a plugin's may be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_port import load_config, open_session
from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.errors import ConfigError, NumericsError
from megatron_port.core.registry import LOOP_HOOKS
from megatron_port.core.train.hooks import Ending, LoopHook, LoopState, TakenStep, every
from megatron_port.run.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ["DamageCheck", "Reporting", "Recovery", "SaveInFlight", "Evaluation", "ReplicaCheck", "PeriodicSave",
         "Closing"]


@pytest.fixture
def tiny(tmp_path: Path) -> RunConfig:
    found = load_config(ROOT / "examples" / "tiny.toml")
    return replace(found, output_dir=str(tmp_path), training=replace(found.training, steps=3))


class Listener(LoopHook):
    """Notes what the loop asks; ``heard`` outlives it."""

    heard: list[str]

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        type(self).heard = []
        assert not hasattr(state, "engine")  # hooks are made before the model is

    def begin(self, *, again: bool = False) -> None:
        self.heard.append(f"begin {self.state.progress.step}")
        assert self.state.engine is not None

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        self.heard.append(f"around {step}")
        yield
        self.heard.append(f"left {step}")

    def before_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        self.heard.append(f"before {step} with {sum(len(b.sample_ids) for b in micro_batches)} samples")

    def after_train_step(self) -> None:
        self.heard.append("passes")

    def measure(self, taken: TakenStep) -> Mapping[str, Any]:
        self.heard.append(f"measure {taken.step}")
        return {}

    def after_step(self, taken: TakenStep) -> None:
        self.heard.append(f"after {taken.step} of {taken.first}")

    def due(self, step: int) -> bool:
        return step != 1

    def act(self) -> None:
        self.heard.append(f"act {self.state.progress.step}")

    def before_save(self) -> None:
        self.heard.append("save")

    def finish(self, ending: Ending) -> None:
        self.heard.append(f"finish {ending.stopped}")

    def close(self, ending: Ending | None) -> None:
        self.heard.append(f"close {None if ending is None else ending.exit_code}")


def train(config: RunConfig, monkeypatch: pytest.MonkeyPatch, hook: Any = Listener) -> Trainer:
    """Train in this process with a plugin's hook."""
    monkeypatch.setitem(LOOP_HOOKS._added, "listener", hook)
    config = replace(config, training=replace(config.training, hooks=("listener",)))
    with open_session(config, quiet=True) as session:
        trainer = Trainer(session)
        trainer.run()
        return trainer


def test_a_plain_run_has_few_hooks_and_loads_no_module_of_others() -> None:
    code = (
        "import sys, tempfile\nfrom megatron_port import load_config, open_session, run_training\n"
        "config = load_config('examples/tiny.toml', f'output_dir={tempfile.mkdtemp()}', 'training.steps=2')\n"
        "run_training(config)\n"
        "ours = [m.split('.')[1] for m in sys.modules if m.startswith('megatron_port.')]\n"
        "print(len(ours), sorted({'interop', 'inference', 'compress', 'tune', 'bench', 'preflight'} & set(ours)),"
        " [m for m in sys.modules if m in ('megatron_port.tools.plan.memory', 'megatron_port.ext.telemetry.routes',"
        " 'megatron_port.tools.plan.planner_hook', 'megatron_port.ext.health.profile', 'megatron_port.run.loading')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    count, *rest = done.stdout.splitlines()[-1].split(" ", 1)
    assert rest == ["[] []"] and int(count) < 360


def test_the_loop_asks_in_a_fixed_order(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(tiny, checkpoint=replace(tiny.checkpoint, save_interval=2))
    trainer = train(config, monkeypatch)
    assert [type(hook).__name__ for hook in trainer.state.hooks] == [*PLAIN[:-2], "Listener", *PLAIN[-2:]]

    def step(number: int) -> list[str]:
        return [f"around {number}", f"before {number - 1} with 8 samples", "passes", f"measure {number}",
                f"after {number} of {8 * (number - 1)}", f"left {number}"]

    assert Listener.heard == [
        "begin 0", "act 0", *step(1), *step(2), "act 2", "save", *step(3), "act 3", "finish False", "save",
        "close 0",
    ]


def test_a_resumed_run_is_not_asked_at_its_start(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny, monkeypatch)
    train(replace(tiny, training=replace(tiny.training, steps=4)), monkeypatch)
    assert Listener.heard[:2] == ["begin 3", "around 4"]


def test_a_rewind_skips_what_is_due_and_begins_again(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saves, an anomaly at the third step: back to the second, from which the third is taken again."""
    config = replace(
        tiny, checkpoint=replace(tiny.checkpoint, save_interval=1, asynchronous=False),
        numerics=replace(tiny.numerics, on_anomaly="rewind"),
    )

    class Doubting(Listener):
        def begin(self, *, again: bool = False) -> None:
            super().begin()
            self.heard.append("again" if again else "first")

        def before_rewind(self) -> None:
            self.heard.append("rewind")

        def before_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
            super().before_step(step, micro_batches)
            doubted = step == 2 and "again" not in self.heard
            monkeypatch.setattr(self.state.numerics, "judge", lambda result, limits: "a test's" if doubted else "")

    trainer = train(config, monkeypatch, Doubting)
    heard = Doubting.heard
    at = heard.index("rewind")
    assert heard[at - 2:at + 3] == ["after 3 of 16", "left 3", "rewind", "begin 2", "again"]
    assert heard[at + 3:at + 5] == ["around 3", "before 2 with 8 samples"]
    assert trainer.state.progress.step == 3 and trainer.state.numerics.anomalies_total == 1


def test_an_error_closes_every_hook(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Listener):
        def after_step(self, taken: TakenStep) -> None:
            raise NumericsError("a hook's")

        def close(self, ending: Ending | None) -> None:
            super().close(ending)
            raise ValueError("the closing itself")

    with pytest.raises(ValueError, match="the closing itself") as caught:
        train(tiny, monkeypatch, Failing)
    assert isinstance(caught.value.__context__, NumericsError)
    assert Failing.heard[-3:] == ["passes", "measure 1", "close None"]
    folder = Path(tiny.output_dir) / tiny.name
    assert "finished" not in (folder / "events.jsonl").read_text() and (folder / "metrics.jsonl").read_text()


def test_what_may_be_a_hook(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="loop hook 'listener' makes a list, which is no LoopHook"):
        train(tiny, monkeypatch, lambda state: [])
    monkeypatch.setitem(LOOP_HOOKS._added, "other", Listener)
    for hooks, said in ((("nobody",), "training.hooks has 'nobody', which is unknown; use listener, other"),
                        (("other", "other"), "training.hooks has 'other' twice; leave one out")):
        assert said in problems(replace(tiny, training=replace(tiny.training, hooks=hooks)))


def test_intervals() -> None:
    assert [step for step in range(7) if every(3, step)] == [3, 6] and not any(every(0, step) for step in range(7))
