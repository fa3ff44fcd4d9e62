"""Memory that a step frees is there for the next one: counted in page faults of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_port.core.config.loader import load
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.run import session

# 20 blocks of 4 MiB, written and freed, as activations of one pass and the next.
CODE = """\
import resource, sys, torch
from megatron_port.run.device import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    blocks = [torch.empty(1 << 20).zero_() for _ in range(20)]
for _ in range(3):
    step()
before = faults()
for _ in range(5):
    step()
print(kept, faults() - before)
"""


def _run(what: str, **environment: str) -> tuple[str, int]:
    found = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", CODE, what], env={**found, "OMP_NUM_THREADS": "1", **environment},
                          capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_steps_meet_no_new_pages() -> None:
    left = _run("leave")[1]
    kept, faults = _run("keep")
    if kept == "False":
        pytest.skip("no glibc here")
    assert faults < 200, faults
    if left < 2000:
        pytest.skip("something lies at the end of the heap here, so that glibc returns nothing anyway")


def test_settings_of_the_environment_stay() -> None:
    assert _run("keep", MALLOC_TRIM_THRESHOLD_="200000")[0] == "False"


def test_a_session_on_a_cpu_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(session, "keep_freed_memory", lambda: asked.append(True))
    config = load("runs/quickstart", overrides=["backend.device=cpu"]).config
    session._choose_device(config, ProcessInfo(0, 1, 0, 1, 0, 1, "localhost", 0, "single", "here"))
    assert asked == [True]
