"""Every file that a run leaves behind, with values of other types in it: its readers answer, or say what is wrong.

A case is one key of one file with one wrong value, or a whole file that is none. Readers may refuse it with an error of
``megatron_port.core.errors``; nothing else may leave them, and nothing may wait.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import io
import itertools
import json
import os
import re
import subprocess
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_port.cli import runs as runs_cli
from megatron_port.cli.arguments import print_json
from megatron_port.cli.main import main
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import LaunchConfig, PreflightConfig
from megatron_port.core.data.indexed import CorpusMeta, read_meta, tokenizer_name
from megatron_port.core.errors import PortError
from megatron_port.core.io.typed_json import Natural, WrongContent, typed
from megatron_port.ext.corpora import fetch, prepare
from megatron_port.ext.corpora.index_cache import _whole as cache_is_whole
from megatron_port.ext.corpora.writer import Written
from megatron_port.ext.kernels import attention_choice as attention_table
from megatron_port.ext.kernels import kernels
from megatron_port.ext.objectives import pairs as reference
from megatron_port.ext.telemetry.expert_file import read_rows as read_expert_rows
from megatron_port.ext.telemetry.metrics import read_metrics
from megatron_port.ext.telemetry.route_file import RouteFolder
from megatron_port.run import direct_start as direct
from megatron_port.run import launch_record as records
from megatron_port.run import lease, run_state
from megatron_port.run import run_files as history
from megatron_port.run import sources as snapshot
from megatron_port.run.launch_record import Planned, QueuedJob, Record
from megatron_port.run.launchers import Job
from megatron_port.run.lease import Holder, judge, this_process
from megatron_port.run.provenance import Identity, read_identity
from megatron_port.run.run_files import Attempt, AttemptOutcome, Failure
from megatron_port.tools.launch import attempts, status
from megatron_port.tools.launch import status as control
from megatron_port.tools.launch.submit import chain_command
from megatron_port.tools.live.server import FollowedRun, document
from megatron_port.tools.plan import activation_file, compare
from megatron_port.tools.preflight.verdict import make_report, read_network, read_nodes
from megatron_port.tools.preflight.verdict import render as render_preflight
from megatron_port.tools.report import run_report
from megatron_port.tools.report.run_data import read_run
from megatron_port.tools.tune import tuner as tune_lease
from megatron_port.tools.tune.strategies import Results, Trial, run_key

CONFIG = load("runs/quickstart").config
JOB = Job("12", 1, "12", "n[1-2]")
TIME = 1.7e9
ALWAYS: tuple[Any, ...] = (None, "x", [None])
IN_TURN: tuple[Any, ...] = (-1, {"x": None}, 1e300, True, 1 << 70, "\0\ud800", float("nan"))
"""Two of these at each key, in turn: there are some hundred keys."""
BROKEN = (b"", b"null", b"[]", b"3", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000, b"{}\n{}\n", b"9" * 5000,
    b'{"": ' * 2000)


def no_nodes_down(_: str) -> list[str]:
    return []


def text_of(value: Any) -> str:
    return json.dumps(value)


def line_of(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@dataclass(frozen=True)
class Case:
    """A file of a run's folder: what it holds, and who reads it."""

    name: str
    body: Any
    """The JSON value; of ``.jsonl`` files the last line."""
    readers: tuple[Callable[[Path], Any], ...]
    before: tuple[Any, ...] = ()
    """Lines of the file ahead of that one."""


# Readers. Each takes the run's folder.

def listed(folder: Path) -> None:
    """What ``runs list | show`` and the live page say of a run."""
    state = run_state.run_state(folder)
    print_json(state.body())
    runs_cli._numbers(state)
    state.next_step()


def launched(folder: Path) -> None:
    """What ``launch status | list | logs`` say of a run."""
    for row in status.rows([folder], {}):
        status.cells(row)
        print_json(asdict(row))
    status.attempts_table(folder)
    print_json([asdict(one) for one in history.read_history(folder)])
    [path.exists() for path in control.log_files(folder)]
    direct.only(folder)


def job_end(folder: Path) -> None:
    fate = attempts.after(folder, JOB, LaunchConfig(), code=1, srun_log="", asked="", fate="running",
                          nodes_down=no_nodes_down)
    assert fate.action in ("done", "requeue", "chain", "stop")


def job_start(folder: Path) -> None:
    attempts.before(folder, Job("13", 0, "13", "n1"), LaunchConfig(), nodes_down=no_nodes_down)


def launch_record(folder: Path) -> None:
    place = records.newest(folder)
    assert place is not None
    made = records.read_record(place)
    asdict(made)
    snapshot.changed_packages(made.environment.get("packages", {}), {})
    snapshot.check_image(made.image)
    chain_command(place, made, JOB)


def page(folder: Path) -> None:
    run = FollowedRun(folder)
    run.poll()
    document(run)


def report(folder: Path) -> None:
    run_report.render([read_run(folder)])


def leases(folder: Path) -> None:
    lease.refuse_if_held(folder)
    lease.life_of(folder)
    direct.running(folder)
    holder, _ = lease.read_holder(folder, lease.newest_epoch(folder))
    assert holder.silence < 1e5
    judge(lambda: (replace(holder, silence=0.0), object()), this_process(), 0.0)
    holder.describe()


def tune_results(folder: Path) -> None:
    found = Results.open(folder, CONFIG, 3)
    found.ranked()
    [t.starts for t in found.trials.values()]


def routes(folder: Path) -> None:
    found = RouteFolder(folder / "routes")
    found.check(found.identity, 1, 2)


def corpus_tokenizer(folder: Path) -> None:
    meta = read_meta(folder / "c")
    if meta is not None:
        tokenizer_name(folder / "c", meta)


def nodes(folder: Path) -> None:
    found = read_nodes(folder, [], "12.1")
    render_preflight(make_report(found, PreflightConfig(), read_network(folder, "12.1")))


HOLDER = Holder(epoch=3, attempt="12.1", run="ab", host="n1", space="s", pid=4, born=5, job="12", since=TIME)
PROCESS = {"host": "n1", "pid": 4, "born": 5, "space": "s", "epoch": 3}
RECORD = Record(
    number=1, name="a", time=TIME, by="submit", run="a.toml", overrides=("a=1",), options=("-N2",), arguments=("x",),
    code={"version": "1", "commit": "ab+", "files": 1, "digest": "d"}, environment={"python": "p",
        "packages": {"a": "1"}},
    image={"path": "/x", "bytes": 1, "mtime_ns": 2, "digest": "d"}, planned=Planned(steps=100, save_interval=10,
        nodes=2),
)
NODE = {
    "format": 1, "node": "n1", "hostname": "n1", "attempt": "12.1", "time": "", "cpus": 56.0,
    "core": {"gflops": 60.0, "cpu_gflops": 61.0, "share": 0.99, "stopped": 0.0, "conclusive": False, "windows": 2,
             "seconds": 1.1},
    "gpus": [{"index": 0, "name": "MI250X", "memory_total": 64 * 10**9, "memory_free": 63 * 10**9,
    "alone_tflops": 150.0,
              "tflops": 140.0, "fault": ""}],
    "device_counts": {"torch": 1}, "expected_devices": 1, "missing_devices": ["a"], "unmeasured": "",
    "vendor": {"tool": "rocm-smi", "fault": "", "devices": [{
        "index": 0, "temperature_c": 90.0, "ecc_uncorrected": 1, "ecc_corrected": 1, "needs_reset": "x",
        "throttling": ["x"], "clock_mhz": 1.0, "max_clock_mhz": 2.0}]},
    "memory": {"total": 512 * 10**9, "available": 5 * 10**11}, "disk": {"path": "/mnt", "total": 10**12,
    "free": 9 * 10**11},
    "shm": {"path": "/dev/shm", "total": 2**38, "free": 1000}, "versions": {"torch": "2.13.0"},
    "environment": {"missing": {"A": "b"}, "different": {"C": ["d", "e"]}, "set": {}}, "seconds": 6.0,
}
TRIAL = Trial(key="k", world=4, parameters={"tp": 1}, settings={"a": 1}, planned_seconds=1.0, planned_bytes=1.0,
    status="ok",
              seconds=1.0, spread=0.1, runs=(1.0, 2.0), memory_bytes=1, model_tflops=1.0, tokens_per_second=1.0,
                  time=TIME)
STEP = {"step": 2, "loss": 1.0, "seconds": 1.0, "tokens_per_second": 5.0, "time": TIME, "memory_bytes": 5,
    "skipped": False}

CASES = [
    Case("outcome.json", asdict(AttemptOutcome("12.1", "saved", 2, "SIGUSR1", TIME)), (listed, launched, job_end,
        job_start, report)),
    Case("failures/12.1.json", asdict(Failure("12.1", 0, "n1", 3, "m", TIME)), (job_end, job_start)),
    Case("failures/12.1.lost", asdict(Failure("12.1", 0, "n1", 3, "m", TIME)), (job_end, job_start)),
    Case("attempts.jsonl", asdict(Attempt("12.1", "12", "n[1-2]", "failed", 1, "c", TIME, TIME - 9, "0001", "x.log",
        2)),
         (launched, job_end, job_start), before=(asdict(Attempt("12.0", "12", "n1", time=TIME)),)),
    Case("metrics.jsonl", STEP, (listed, launched, job_end, report, lambda f: list(read_metrics(f / "metrics.jsonl")),
                                 lambda f: list(compare._records(f / "metrics.jsonl"))), before=({"step": 1,
                                     "loss": 2.0},)),
    Case("experts.jsonl", {"step": 2, "steps": 2, "top_k": 1, "layers": [1], "tokens": [[1, 2]], "dropped": [0],
        "margin": [0.5]},
         (report, lambda f: list(read_expert_rows(f / "experts.jsonl")))),
    Case("events.jsonl", {"time": TIME, "event": "failed", "step": 2, "message": "m", "run": "ab", "config_hash": "c",
        "host": "n1",
                          "ranks": 1, "rank": 0, "score": 1.0}, (listed, report)),
    Case("ranks.jsonl", {"step": 2, "ranks": 2, "least": 1.0, "median": 1.0, "most": 2.0, "q1": 1.0, "q3": 1.0,
                         "own_seconds": {"0": 1.0}, "time": TIME}, (report,)),
    Case("now.json", {"time": TIME, "world": 2, "connected": 2, "left": 0, "step": 2, "doing": {"a: b": 2},
                      "phase_seconds": {"forward": 1.0}, "ranks": [{"rank": 0, "host": "n1", "coords": "c",
                      "scope": "s",
                      "doing": "d", "step": 2, "idle_seconds": 0.1, "silent": False, "seconds_per_step": 1.0,
                      "phase_seconds": {"forward": 1.0}}]}, (page,)),
    Case("environment.json", {"commit": "ab+", "host": "n1", "ranks": 2, "layout": "l", "device": "d", "providers": "p",
                              "versions": {"torch": "2"}}, (page,)),
    Case("run.json", asdict(Identity(id="ab", name="a", config_hash="c", begun=TIME, origin={"run": "x", "commit": 1,
        "step": 2})),
         (report, read_identity)),
    Case("lease/epoch-00000003.json", HOLDER.to_json(), (listed, launched, leases)),
    Case("launch/0001/record.json", asdict(RECORD), (launched, launch_record)),
    Case("launch/0001/jobs.jsonl", asdict(QueuedJob(job="12", time=TIME, log="x.log", asked={"NumNodes": "2",
        "StdOut": "x"},
                                                    process=PROCESS)), (launched, launch_record, leases)),
    Case("activation_plan.json", {"version": 1, "key": "k", "source": "measured", "layers": ["", ""], "stages": ["s"],
        "step": 1,
                                  "measures": [[1.0]]},
                                  (lambda f: activation_file.parsed(activation_file.text_in(f) or "", num_layers=2),)),
    Case("routes/routes.json", {"schema": 1, "num_experts": 4, "top_k": 1, "layers": [1], "seq_length": 8, "seed": 1,
        "drops": False,
                                "corpora": [["a", 3]]}, (routes,)),
    Case("results.jsonl", asdict(TRIAL), (tune_results,),
         before=({"format": 1, "run": run_key(CONFIG, 3), "name": "quickstart"},)),
    Case("running.json", {"space": "s", "job": "", "tune": [1, 2], "trial": [0, 0]}, (tune_lease.claim,)),
    Case("node-n1.json", NODE, (nodes,)),
    Case("network.json", {"format": 1, "attempt": "12.1", "bad": {"n1": "slow"}, "faults": ["f"]}, (nodes,)),
    Case("c.meta.json", asdict(CorpusMeta(tokenizer="hf:t.json", vocab_size=10, eod_id=1)),
         (corpus_tokenizer,)),
    Case("journal.json", {"recipe": "r", "blocks": 1, "payload_xxh3": "x", "written": asdict(Written(1, 2)),
        "left_out": 0, "repaired": 0,
                          "notes": ["n"]}, (lambda f: prepare._Journal.read(f / "journal.json"),)),
    Case("corpus.json", {"source": "s", "licence": "l", "sha256": "x", "size": 1}, (fetch._cached,)),
    Case("key.json", {"a.npy": "x"}, (lambda f: cache_is_whole(f, "key", [f / "config.toml"]),)),
    Case("c.reference", asdict(reference.ReferenceHeader(bin_xxh3="a", mask_xxh3="b", weights="w", fingerprint="f",
        dtype="d")),
         (lambda f: reference.read_header(f / "c"),)),
    Case("attention.json", {"rows": [{"arch": "sm_90", "dtype": "bf16", "head_dim": 64, "seq": 4, "causal": True,
        "dropout": False,
                                      "milliseconds": {"flash": 1.0}, "source": "s"}]},
         (lambda f: [row.order for row in attention_table.parse((f / "attention.json").read_text(errors="replace"),
             "t")],)),
    Case("manifest.json", {"libmp_cuda.so": {"target": "t", "compiler": "c"}},
        (lambda f: kernels.kernels_status("cuda", f),)),
]


HISTORY = next(case for case in CASES if case.name == history.HISTORY)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of the value and of everything in it."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    out = copy.deepcopy(body)
    at = out
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return out


def variants(case: Case) -> Iterator[tuple[str, bytes]]:
    """Yield (what is wrong, content of the file)."""
    ahead = line_of(*case.before).encode()
    body = json.loads(json.dumps(case.body))
    turn = itertools.cycle(IN_TURN)
    for path in places(body):
        for value in (*ALWAYS, next(turn), next(turn)):
            yield f"{'.'.join(map(str, path))} = {value!r}", ahead + json.dumps(changed(body, path,
                value)).encode() + b"\n"
        if path and isinstance(path[-1], str):
            lacking = copy.deepcopy(body)
            at = lacking
            for key in path[:-1]:
                at = at[key]
            del at[path[-1]]
            yield f"no {'.'.join(map(str, path))}", ahead + json.dumps(lacking).encode() + b"\n"
    for data in BROKEN:
        yield f"{data[:9]!r} of {len(data)} bytes", data


def make_run(folder: Path) -> None:
    """A run's folder with all the files of ``CASES``."""
    folder.mkdir()
    (folder / "config.toml").write_text('name = "run"\n[training]\nsteps = 5\n')
    for name in ("libmp_cuda.so", kernels.BINDING):
        (folder / name).write_bytes(b"")
    for case in CASES:
        write(folder / case.name, (line_of(*case.before) + json.dumps(case.body) + "\n").encode())


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def restore(folder: Path, case: Case) -> None:
    write(folder / case.name, (line_of(*case.before) + json.dumps(case.body) + "\n").encode())


def faults(folder: Path, case: Case, what: str) -> list[str]:
    out = []
    for reader in case.readers:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                reader(folder)
        except PortError:
            pass
        except OSError:
            assert reader.__name__ == "<lambda>", (case.name, what)  # a function that says so
        except Exception as error:
            at = [f for f in traceback.extract_tb(error.__traceback__) if "megatron_port/" in f.filename]
            where = f"{at[-1].filename.rpartition('megatron_port/')[2]}:{at[-1].lineno}" if at else "?"
            out.append(f"{case.name}: {what}: {type(error).__name__}: {error!s:.80} at {where} by {reader.__name__}")
    return out


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No question to a scheduler, no wait for a disk: thousands of cases ask."""
    monkeypatch.setattr(subprocess, "run", _no_tool)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def _no_tool(*_: Any, **__: Any) -> Any:
    raise FileNotFoundError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_of_other_types(run: Path, case: Case) -> None:
    found = []
    for what, data in variants(case):
        write(run / case.name, data)
        found += faults(run, case, what)
        restore(run, HISTORY)  # which the readers of a job's end append to
    restore(run, case)
    assert not found, f"{len(found)} errors:\n" + "\n".join(found[:40])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_something_else_in_the_place_of_a_file(run: Path, make: Callable[[Path], None]) -> None:
    """A pipe has no end until somebody writes into it: to open one is to wait for ever."""
    found = []
    faulthandler.dump_traceback_later(60, exit=True)
    for case in CASES:
        path = run / case.name
        path.unlink(missing_ok=True)
        make(path)
        if not case.name.endswith("attention.json"):  # its path is the package's own
            found += faults(run, case, make.__name__)
        path.rmdir() if path.is_dir() else path.unlink()
        restore(run, case)
        restore(run, HISTORY)
    faulthandler.cancel_dump_traceback_later()
    assert not found, "\n".join(found)


def test_a_bad_line_costs_that_line_and_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [asdict(Attempt(f"{n}.0", "12", "n1", "failed", n, "why", TIME, TIME)) for n in (1, 2)]
    bad = [good[0] | {"step": None}, good[0] | {"time": "x"}, good[0] | {"attempt": 3}, [], good[1] | {"new": 1}]
    write(run / "attempts.jsonl", line_of(good[0], *bad[:4], bad[4]).encode())
    write(run / "outcome.json", b'{"attempt": "1.0", "status": "saved", "step": null}')
    read = history.history_rows(run)
    assert [a.attempt for a in read.rows] == ["1.0", "2.0"] and read.bad == 4
    says = ("attempts.jsonl: 4 lines left out (line 2: step is null; expected an integer of less than 64 bits; line 3: "
            'time is "x"; expected a finite number; line 4: attempt is 3; expected a text; and 1 more)')
    assert read.note() == says
    assert main(["launch", "status", str(run.parent)]) == 0 and says in capsys.readouterr().err
    assert main(["launch", "list", str(run)]) == 0 and says in capsys.readouterr().out
    assert main(["runs", "list", str(run.parent)]) == 0
    assert "outcome.json left out: step is null; expected an integer" in capsys.readouterr().err
    assert attempts.faults(run, "1.0")[1].startswith("outcome.json left out: step is null")
    restore(run, HISTORY)


@dataclass(frozen=True)
class Inner:
    b: bool
    pair: tuple[int, float]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    kind: Literal["x", "y"] = "x"
    names: dict[str, list[str]] = field(default_factory=dict)
    maybe: Natural | None = None
    free: Any = None


GOOD = {"inner": {"b": True, "pair": [1, 2]}, "kind": "y", "names": {"a": ["b"]}, "maybe": 3, "free": [{"x": 1.5}],
    "other": 1}


@pytest.mark.parametrize(("change", "says"), [
    ({"inner": None}, "inner is null; expected a table"), ({"inner": {"b": True}}, "inner.pair is missing"),
    ({"inner": {"b": 1, "pair": [1, 2]}}, "inner.b is 1; expected true or false"),
    ({"inner": {"b": True, "pair": [1]}}, "inner.pair is a list of 1; expected a list of 2"),
    ({"inner": {"b": True, "pair": [True, 2]}}, "inner.pair.0 is true; expected an integer"),
    ({"kind": "z"}, 'kind is "z"; expected x or y'), ({"names": {"a": "b"}}, 'names.a is "b"; expected a list'),
    ({"maybe": -1}, "maybe is -1; expected at least 0"), ({"maybe": 1 << 70}, "maybe is an integer of 71 bits"),
    ({"free": {"a": [float("inf")]}}, "free.a.0 is Infinity; expected a finite number"), ({"free": "\0"}, "free is"),
])
def test_the_reader_by_types(change: dict[str, Any], says: str) -> None:
    assert typed(Outer, GOOD) == Outer(Inner(True, (1, 2.0)), "y", {"a": ["b"]}, 3, [{"x": 1.5}])
    with pytest.raises(WrongContent, match="^" + re.escape(says)):
        typed(Outer, GOOD | change)
