"""Logging by rank, stop requests, agreement without a group, and the list of groups of a topology."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading

import numpy
import pytest
import torch

from megatron_port.core.dist.agree import agree
from megatron_port.core.dist.groups import ParallelContext, planned
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.process import EXIT_CODES, StopRequest, name_of
from megatron_port.core.errors import DataError, EnvironmentFault
from megatron_port.core.io.logging import Logger, ranks_text


def test_a_configuration_is_read_without_what_versions_are_read_with() -> None:
    """importlib.metadata parses with ``email`` and ``zipfile``: a sixth of the import. Versions are what the
    packages say."""
    code = """if True:
        import sys
        before = set(sys.modules)  # of which this interpreter's site may have imported some
        import megatron_port.core.config.loader
        late = {"importlib.metadata", "email", "zipfile"} & (set(sys.modules) - before)
        from megatron_port.core.package import package_versions
        print(sorted(late), package_versions(["numpy", "no-such-package"]))"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == f"[] {{'numpy': '{numpy.__version__}'}}", ran.stderr


def test_only_rank_0_speaks_unless_a_rank_must() -> None:
    out = io.StringIO()
    for rank in range(3):
        Logger(rank, 3, "n1", stream=out).log("step 1\nstep 2")
    Logger(2, 3, "n1", stream=out).log_any("lost")
    assert out.getvalue() == "step 1\nstep 2\n[rank 2 of 3 on n1] lost\n"


@pytest.mark.parametrize(("number", "level"), [(signal.SIGINT, 3), (signal.SIGTERM, 2), (signal.SIGUSR1, 1)])
def test_a_signal_sets_the_level(number: int, level: int) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.level == 0
        os.kill(os.getpid(), number)
        assert stop.level == level
        assert stop.signal_name == signal.Signals(number).name
        stop.request(signal.SIGUSR1)
        assert stop.level == level  # nothing that ends a job for good is taken back
        assert (signal.getsignal(signal.SIGINT) == signal.SIG_DFL) is (number == signal.SIGINT)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("numbers", "level", "code"),
    [((), 0, 0), ((signal.SIGUSR1,), 1, 85), ((signal.SIGUSR1, signal.SIGTERM), 2, 0),
     ((signal.SIGTERM, signal.SIGUSR1), 2, 0), ((signal.SIGUSR1, signal.SIGINT), 3, 130)],
)
def test_a_cancelled_job_does_not_ask_to_come_back(numbers: tuple[int, ...], level: int, code: int) -> None:
    with StopRequest() as stop:
        for number in numbers:
            os.kill(os.getpid(), number)
        assert stop.level == level and EXIT_CODES[stop.level] == code
        assert (stop.signal_name or "") == name_of(level)


def test_peak_memory_is_this_programs_not_its_parents() -> None:
    """A parent with 300 MB more than the program needs; ru_maxrss would give them to it."""
    ballast = bytearray(b"x") * (300 << 20)
    program = (
        "import resource\nfrom megatron_port.ext.telemetry.peak_memory import peak_resident_bytes\n"
        "before = peak_resident_bytes()\n"
        "held = bytearray(b'x') * (64 << 20)\ndel held\n"
        "print(before, peak_resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)"
    )
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    before, after, inherited = map(int, done.stdout.split())
    assert before < 100 << 20 and 60 << 20 < after - before < 80 << 20, done.stdout
    assert inherited > len(ballast), "the measure that this one replaces"


def test_handlers_need_the_main_thread() -> None:
    raised: list[Exception] = []

    def install() -> None:
        try:
            with StopRequest():
                pass
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert raised


def test_agreement_of_one() -> None:
    agree(None)
    with pytest.raises(DataError, match="gone"):
        agree(DataError("gone"))


def test_ranges_of_ranks_are_short() -> None:
    assert ranks_text([1, 4, 5, 6, 9]) == "ranks 1, 4-6, 9" and ranks_text([3]) == "rank 3"
    assert ranks_text(list(range(0, 100, 2))).endswith("30 …")


def test_a_single_context_has_no_groups() -> None:
    ctx = ParallelContext.single("cpu")
    assert ctx.named_groups() == {} and ctx.over("tp") is None and ctx.over("dp", "cp") is None
    assert ctx.is_first_stage and ctx.is_last_stage and ctx.device == torch.device("cpu")
    ctx.close()


def test_a_context_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"1 process is running.*tp 2 × pp 1 × dp 1 needs 2"):
        ParallelContext.create(Topology(tp=2), "cpu")


def test_groups_cover_every_rank_once_an_axis_and_skip_single_ranks() -> None:
    topology = Topology(tp=2, pp=3, dp=2)
    groups = {c.names[0]: c.groups for c in planned(topology)}
    assert {name: len(g) for name, g in groups.items()} == {"tp": 6, "dp": 6, "pp": 4, "embedding": 4, "world": 1}
    for axis in ("tp", "dp", "pp"):
        assert sorted(r for g in groups[axis] for r in g) == list(range(12))
    assert list(groups["embedding"]) == [(g[0], g[-1]) for g in groups["pp"]]
    assert planned(Topology()) == []
    assert [c.names for c in planned(Topology(dp=4))] == [
        ("dp", "dp+cp", "dp_shard+cp", "expert_shard", "world")
    ]
    divided = [name for c in planned(Topology(dp=2, cp=2)) for name in c.names]
    assert divided == ["cp", "dp+cp", "dp_shard+cp", "expert_shard", "world"]  # none of dp alone: asking raises


@pytest.mark.parametrize("arguments,kept", [
    (["train", "run.toml"], True), (["train", "run.toml", "--nproc", "2"], False),
    (["train", "run.toml", "--nproc=2"], False), (["train", "run.toml", "--dry-run"], False), (["plan"], False),
])
def test_a_rank_keeps_a_schedulers_signals_before_it_imports_anything(arguments, kept):
    """A SIGUSR1 while torch is imported makes the run save and stop, once it can; by default it would kill the rank."""
    program = (
        "import os, signal, sys, types\n"
        f"sys.argv = ['megatron-port', *{arguments!r}]\n"
        "held = lambda: signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "class Imports:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'megatron_port.cli.main':\n"
        "            print(held(), 'torch' in sys.modules, flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Imports())\n"
        "from megatron_port.__main__ import entry\n"
        "entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(kept), "False"]
