"""Other trainers against themselves on one process: healthy ones are equal, and known mistakes are found and named."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_port.cli.main import main
from megatron_port.core.errors import ConfigError
from megatron_port.tools.foreign import fuzz
from megatron_port.tools.foreign.ranks import Ranks
from megatron_port.tools.foreign.session import CaseFailed, Session

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "foreign_adapters"


def module(name: str) -> Any:
    """A file of adapters."""
    spec = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


LOOP = module("loop_mistakes").MISTAKES
TORCH = module("torch_mistakes")
CONTEXT = module("context_mistakes")
ODD = module("odd_trainers")


@pytest.mark.parametrize("mistake", LOOP)
def test_a_mistake_of_a_loop_is_found_and_named(ranks: Ranks, mistake: str) -> None:
    session = Session(f"{FILES / 'loop_mistakes.py'}:Script", ranks)
    verdict = session.compare({"mistake": mistake, "micro_batches": 2}, 2)
    said = "\n".join(verdict.lines())
    assert not verdict.equal
    kinds = [finding.relation.kind for finding in verdict.findings]
    assert LOOP[mistake].kind in [*kinds, ""], said
    assert LOOP[mistake].word in said, said


@pytest.mark.parametrize(("kind", "options", "mistake", "words"), [
    *(("DdpMistakes", {}, *m) for m in TORCH.DDP.items()), *(("FsdpMistakes", {}, *m) for m in TORCH.FSDP.items()),
    *(("PipeliningMistakes", {"micro_batches": 4}, *m) for m in TORCH.PIPELINING.items()),
])
def test_a_mistake_with_a_wrapper_is_found_and_named(
    ranks: Ranks, kind: str, options: dict[str, Any], mistake: str, words: str
) -> None:
    session = Session(f"{FILES / 'torch_mistakes.py'}:{kind}", ranks)
    verdict = session.compare({**options, "mistake": mistake}, 2)
    said = "\n".join(verdict.lines())
    assert not verdict.equal and words in said, said


@pytest.mark.parametrize("way", CONTEXT.HELD)
@pytest.mark.parametrize("mistake", CONTEXT.MISTAKES)
def test_a_mistake_in_the_labels_of_positions_is_named(ranks: Ranks, mistake: str, way: str) -> None:
    session = Session(f"{FILES / 'context_mistakes.py'}:Context", ranks)
    verdict = session.compare({"mistake": mistake, "cp": 2, "way": way}, 2)
    said = "\n".join(verdict.lines())
    assert not verdict.equal and CONTEXT.MISTAKES[mistake].format(*CONTEXT.HELD[way]) in said, said
    assert len(verdict.findings) == (2 if "own labels" in mistake else 1), said  # small tensors are named as large ones
    assert ("a mean of the means of cp ranks" in said) == (mistake.endswith(("labels", "micro-batches"))), said


@pytest.mark.parametrize(("adapter", "size", "options"), [
    ("ddp", 4, {"micro_batches": 2, "fp64": False}),
    ("fsdp2", 4, {"replicas": 2, "micro_batches": 2}),
    ("tensor-parallel", 4, {"tp": 2, "sp": True}),
    ("pipelining", 2, {"micro_batches": 4, "schedule": "InterleavedZeroBubble"}),
    ("transformers-ddp", 2, {"family": "mixtral", "tied": True}),
    (f"{FILES / 'loop_mistakes.py'}:Script", 4, {"micro_batches": 2}),
    (f"{FILES / 'context_mistakes.py'}:Context", 4, {"cp": 2}),
    (str(ROOT / "examples" / "other_trainer" / "adapter.py"), 2, {"micro_batches": 2}),
])
def test_a_healthy_trainer_is_equal(ranks: Ranks, adapter: str, size: int, options: dict[str, Any]) -> None:
    verdict = Session(adapter, ranks).compare(options, size)
    assert verdict.equal, "\n".join(verdict.lines())
    assert verdict.compared["gradients"] >= 20 and verdict.compared["losses"] >= 2


@pytest.mark.parametrize("odd", ODD.RIGHT)
def test_unusual_trainers_raise_no_alarm(ranks: Ranks, odd: str) -> None:
    verdict = Session(f"{FILES / 'odd_trainers.py'}:Odd", ranks).compare({"odd": odd}, 2)
    said = "\n".join(verdict.lines())
    assert verdict.equal, said
    assert "neither one process nor a rank has a gradient of spare.bias, spare.weight" in said


@pytest.mark.parametrize(("mistake", "words"), ODD.WRONG.items())
def test_what_only_ranks_have_or_is_no_number_is_wrong(ranks: Ranks, mistake: str, words: str) -> None:
    verdict = Session(f"{FILES / 'odd_trainers.py'}:Odd", ranks).compare({"mistake": mistake}, 2)
    assert not verdict.equal and words in "\n".join(verdict.lines()), "\n".join(verdict.lines())


def test_an_adapter_that_tells_nothing_passes_nothing(ranks: Ranks) -> None:
    verdict = Session(f"{FILES / 'odd_trainers.py'}:Silent", ranks).compare({}, 2)
    said = "\n".join(verdict.lines())
    assert not verdict.equal and "the adapter has nothing to compare: neither gradients nor updates are told" in said


def test_an_adapter_that_cannot_be_read_is_named(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "adapter.py"
    for text, words in (
        ("import no_such_package\n", r"adapter\.py cannot be imported: line 1: ModuleNotFoundError: No module named"),
        ("x = 1\n", "one subclass of Adapter is needed, there is none"),
        ("from megatron_port.parity import Adapter\nclass A(Adapter):\n    pass\n",
         "A has no method build, step, which an adapter needs"),
        ("from megatron_port.tools.foreign.adapters.ddp import Ddp\nclass A(Ddp):\n    layout = {'seed': 1}\n",
         r"A has an option seed, which is an argument of compare\(\)"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Session(str(file), ranks)
    file.write_text("from megatron_port.tools.foreign.adapters.ddp import Ddp\n"
                    "class A(Ddp):\n    layout = {'kind': int}\n")
    with pytest.raises(ConfigError, match="A's option kind is <class 'int'>; options are numbers, strings"):
        Session(str(file), ranks).compare({}, 2)


def test_weights_that_a_trainer_loads_by_itself_are_found_by_their_values(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "loads.py"
    file.write_text(
        "from megatron_port.tools.foreign.adapters.pipelining import Pipelining\n"
        "class Loads(Pipelining):\n    def load(self, state, weights):\n        for stage in state.stages:\n"
        "            found = stage.load_state_dict(weights, strict=False)\n            assert not found.missing_keys\n"
        "        return True\n"
    )
    verdict = Session(str(file), ranks).compare({"micro_batches": 4}, 2)
    assert verdict.equal and verdict.compared["gradients"] == 69, "\n".join(verdict.lines())


def test_a_draw_that_fails_is_made_smaller_and_reproduced(ranks: Ranks, tmp_path: Path) -> None:
    spec = f"{FILES / 'loop_mistakes.py'}:Script"
    session = Session(spec, ranks)
    case = fuzz.run(session, fuzz.Drawn(7, 4, {"mistake": "SummedTwice", "micro_batches": 2}), seconds=60)
    case = fuzz.minimised(session, case, (4,), seconds=60)
    assert (case.ranks, case.options) == (2, {"mistake": "SummedTwice", "micro_batches": 1})
    script = fuzz.write_reproduction(tmp_path, spec, case)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 6 and re.search(r"is 2 \(the size of dp", done.stdout), done.stdout + done.stderr


def test_a_rank_that_ends_or_hangs_is_named(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "import time\nfrom megatron_port.tools.foreign.adapters.ddp import Ddp\n"
        "class Broken(Ddp):\n    layout = {**Ddp.layout, 'hangs': False}\n"
        "    def step(self, state, batch, world):\n        if world.rank == 1:\n"
        "            time.sleep(60) if world['hangs'] else [][1]\n        return super().step(state, batch, world)\n"
    )
    session = Session(str(file), ranks)
    with pytest.raises(CaseFailed, match=r"layout: .*rank-00001\.log: IndexError: list index out of range"):
        session.compare({}, 2)
    with pytest.raises(CaseFailed, match=r"rank-00000, rank-00001 did not end in time; their stacks are in"):
        session.compare({"hangs": True}, 2, folder=tmp_path / "kept", seconds=8)
    assert "in step" in (tmp_path / "kept" / "layout" / "rank-00001.log").read_text()


def test_the_command_says_what_it_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(FILES / "loop_mistakes.py") + ":Script"
    assert main(["parity", "foreign", file, "--set", "mistak=x"]) == 2
    assert "Script has no option mistak; it has micro_batches, mistake" in capfd.readouterr().err
    drawn = ["parity", "foreign", file, "--fuzz", "2", "--set", "mistake=Rounded", "--out", str(tmp_path)]
    assert main(drawn) == 6
    said = capfd.readouterr().out
    assert "0 of 2 draws equal" in said and "is rounded to bf16" in said
    assert len((tmp_path / "draws.jsonl").read_text().splitlines()) == 2
    assert main([*drawn, "--json"]) == 6  # from the file
    assert [row["equal"] for row in json.loads(capfd.readouterr().out)] == [False, False]
    right = [word.replace("mistake=Rounded", "mistake=") for word in drawn]
    assert main(right) == 0  # other draws, which the file does not have
    assert "2 of 2 draws equal" in capfd.readouterr().out
