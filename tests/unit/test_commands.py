"""What the commands have in common: verbs, names of runs, ``--json``, progress bars, completion, unsupported words."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_checkpoint_cli import save
from test_report import make

from megatron_port.cli.arguments import ProgressBar, confirm
from megatron_port.cli.main import COMMANDS, main
from megatron_port.cli.run_names import run_folder_of
from megatron_port.core.config.loader import load
from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.io.logging import Tally
from megatron_port.ext.advice.elsewhere import COMMANDS as ELSEWHERE
from megatron_port.ext.advice.elsewhere import KEYS, VALUES
from megatron_port.ext.corpora import fetch
from megatron_port.run.run_files import FINISHED, SAVED
from megatron_port.run.run_state import ENDED, FAILED, NEW, run_state

RUN = 'extends = "models/gpt-tiny"\nname = "mine"\noutput_dir = "{out}"\n[training]\nsteps = 7\n'


def said(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> Any:
    """What a command prints with ``--json``."""
    assert main([*map(str, argv), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_run_is_named_by_its_folder_its_file_or_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(RUN.format(out="runs"))
    with pytest.raises(ConfigError, match="has no folder runs/mine yet: nothing was trained there"):
        run_folder_of("mine.toml")
    folder = make(tmp_path / "runs" / "mine", name="mine")
    at = save(folder / "checkpoints", 5, w=torch.ones(30, 40))
    for name in ("mine.toml", "mine", "runs/mine", "runs/mine/", str(folder)):
        assert run_folder_of(name).resolve() == folder.resolve()
        assert said(capsys, "report", name)[0]["name"] == "mine"
        assert said(capsys, "runs", "show", name)["name"] == "mine"
        assert [c["step"] for c in said(capsys, "checkpoint", "list", name)] == [5]
        assert said(capsys, "checkpoint", "verify", name)[0]["faults"] == []
        assert said(capsys, "launch", "list", name) == []
        assert main(["checkpoint", "diff", name, str(at)]) == 0
        capsys.readouterr()
    make(tmp_path / "runs" / "quickstart", name="quickstart")
    assert run_folder_of("runs/quickstart") == Path("runs/quickstart")
    shutil.rmtree(tmp_path / "runs" / "quickstart")
    assert main(["report", "runs/quickstart"]) == 2  # the shipped run, which was not trained here
    assert "nothing was trained there" in capsys.readouterr().err
    assert main(["generate", "nowhere", "--prompt", "x"]) == 2
    assert "neither the folder of a run" in capsys.readouterr().err


def test_a_store_is_never_taken_for_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert local_path("a/b") == Path("a/b")
    for argv in (["report", "s3://b/runs/x"], ["checkpoint", "verify", "s3://b/x"], ["runs", "list", "s3://b/x"],
                 ["generate", "s3://b/x", "--prompt", "x"], ["data", "verify", "s3://b/x"], ["watch", "s3://b/x"],
                 ["checkpoint", "export", "s3://b/x", "out", "--to", "hf"], ["train", "s3://b/run.toml"],
                 ["train", "runs/quickstart", "--dry-run", "--set", "output_dir=s3://b/x"]):
        assert main(argv) == 2, argv
        error = capsys.readouterr().err
        assert "s3://b/" in error and "s3:/b/" not in error and "did you mean" not in error


def test_words_from_elsewhere_are_not_taken_for_misspelt_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for setting, words in (("model.activation=relu", "'relu' is not supported; use gelu"),
                           ("optimizer.name=adam", "is not supported (adamw with optimizer.weight_decay = 0 is Adam)"),
                           ("layout.tp=2", "'layout.tp' is not supported (it is layout.tensor_parallel_size)"),
                           ("backend.device=mps", "'mps' is not supported; use auto")):
        assert main(["config", "check", "runs/quickstart", "--set", setting]) == 2
        error = capsys.readouterr().err
        assert words in error and "did you mean" not in error
    assert main(["config", "check", "runs/quickstart", "--set", "model.activation=swiglo"]) == 2
    assert "did you mean 'swiglu'" in capsys.readouterr().err
    assert main(["config", "check", "runs/quickstart", "--set", "model.activation=celu"]) == 2
    assert "did you mean" not in capsys.readouterr().err  # nothing that begins like it
    assert main(["serve"]) == 2
    assert "command 'serve' is not supported" in capsys.readouterr().err
    assert main(["trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


def test_no_word_from_elsewhere_is_one_of_ours() -> None:
    from megatron_port.core.config.choices import CHOICES
    from megatron_port.core.config.dump import leaves
    from megatron_port.core.config.schema import RunConfig

    names = dict(leaves(RunConfig()))
    assert not set(KEYS) & set(names) and not set(ELSEWHERE) & set(COMMANDS)
    for name, words in VALUES.items():
        assert name in names and not set(words) & set(map(str, CHOICES[name])), name


def test_every_group_has_the_same_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    for group in ("runs", "checkpoint", "data"):
        for verb in ("list", "show", "rm", "ls", "inspect", "remove"):
            assert main([group, verb, "--help"]) == 0, (group, verb)
    for group in ("config", "launch"):
        for verb in ("list", "show"):
            assert main([group, verb, "--help"]) == 0, (group, verb)
    capsys.readouterr()
    assert "runs/quickstart" in said(capsys, "config", "list", "runs")
    assert main(["config", "list", "nothing"]) == 2


def test_rm_asks_and_removes_whole_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    folder = make(tmp_path / "runs" / "mine", name="mine")
    at = save(folder / "checkpoints", 5, w=torch.ones(3))
    other = tmp_path / "important"
    other.mkdir()
    assert main(["runs", "rm", str(folder)]) == 2 and folder.is_dir()
    assert "give --yes" in capsys.readouterr().err
    assert main(["runs", "rm", str(other), "--yes"]) == 2 and other.is_dir()
    assert main(["checkpoint", "rm", str(folder), "--yes"]) == 5 and at.is_dir()
    assert main(["checkpoint", "rm", str(at), "-y"]) == 0 and not at.exists()
    assert main(["runs", "rm", str(folder), "-y"]) == 0 and not folder.exists()
    assert not [p for p in tmp_path.rglob("*") if ".removed" in p.name]
    for name in ("c.bin", "c.idx", "d.idx"):
        (tmp_path / name).write_bytes(b"x")
    assert main(["data", "rm", str(tmp_path / "c"), "-y"]) == 0
    assert sorted(p.name for p in tmp_path.glob("*.idx")) == ["d.idx"] and not (tmp_path / "c.bin").exists()
    assert main(["data", "rm", str(tmp_path / "c"), "-y"]) == 4


def test_confirm_takes_no_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, wanted in (("y\n", True), ("n\n", False), ("\n", False)):
        typed: Any = io.StringIO(answer)
        typed.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", typed)
        assert confirm("remove it", yes=False) is wanted


def test_the_state_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "x", name="x")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = max(r["step"] for r in steps)
    (folder / "config.toml").write_text(f"[training]\nsteps = {last}\n")
    (folder / "events.jsonl").unlink(missing_ok=True)
    (folder / "outcome.json").write_text(json.dumps({"status": "finished", "step": last, "time": 2.0}))
    state = run_state(folder)
    assert (state.status, state.step, state.steps) == (FINISHED, last, last) and "it is finished" in state.next_step()
    (folder / "config.toml").write_text(f"[training]\nsteps = {2 * last}\n")
    assert run_state(folder).status == ENDED
    (folder / "outcome.json").write_text(json.dumps({"status": "saved", "step": last, "signal": "SIGINT", "time": 2.0}))
    assert (run_state(folder).status, run_state(folder).why) == (SAVED, "SIGINT")
    (folder / "events.jsonl").write_text(json.dumps({"event": "failed", "time": 3.0, "message": "boom"}) + "\n")
    assert (run_state(folder).status, run_state(folder).why) == (FAILED, "boom")
    (folder / "metrics.jsonl").write_text("torn {\n")
    for name in ("outcome.json", "events.jsonl"):
        (folder / name).unlink()
    assert run_state(folder).status == NEW
    assert [r["name"] for r in said(capsys, "runs", "list", tmp_path)] == ["x"]
    assert main(["runs", "list", str(tmp_path)]) == 0 and "new" in capsys.readouterr().out


def test_json_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "config", "show", "runs/quickstart")
    assert shown["config"]["training"]["steps"] == load("runs/quickstart").config.training.steps
    assert said(capsys, "config", "check", "runs/quickstart")["ranks"] == 8
    assert {"name", "type", "default"} <= set(said(capsys, "config", "fields")[0])
    folder = make(tmp_path / "nan", name="nan")
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 999, "loss": "NaN"}\n')
    assert main(["runs", "show", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["loss"] == "nan"


def test_a_bar_is_drawn_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, terminal = io.StringIO(), io.StringIO()
    with ProgressBar("verify", stream=plain) as bar:
        bar(5, 10)
    assert plain.getvalue() == ""
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    with ProgressBar("verify", stream=terminal) as bar:
        bar(0, 2_000_000)
        monkeypatch.setattr(bar._bar, "mininterval", 0)
        bar(1_000_000, 2_000_000, "half")
        assert bar._bar is not None
        bar._bar.refresh()
    drawn = terminal.getvalue()
    assert "verify" in drawn and "1.00M/2.00M" in drawn and "half" in drawn and "\x1b[3" not in drawn


def test_a_download_reports_its_bytes_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the other program writes, also its temporary ones; its last line and exit code where it fails."""
    seen: list[tuple[int, int]] = []
    writes = ("head -c 1000 /dev/zero > $TMPDIR/part; sleep 0.3; "
              "for i in $(seq 99); do mkdir -p $TMPDIR/$i/a; rm -r $TMPDIR/$i; done; echo broken >&2; exit 4")
    with pytest.raises(DataError, match=r"ended with 4: broken"):
        fetch._run(["sh", "-c", writes], tmp_path, lambda done, total: seen.append((done, total)))
    assert (1000, fetch.PYPI_BYTES) in seen
    with pytest.raises(DataError, match="no-such-program is not installed"):
        fetch._run(["no-such-program"], tmp_path, lambda done, total: None)
    monkeypatch.setattr(fetch, "TIMEOUT", 0.1)
    with pytest.raises(DataError, match=r"no answer in 0\.1 s"):
        fetch._run(["sleep", "20"], tmp_path, lambda done, total: None)


def test_a_tally_of_threads_reports_sums() -> None:
    seen: list[tuple[int, int]] = []
    tally = Tally(lambda done, total: seen.append((done, total)), 10)
    tally.add(3)
    tally.add(7)
    assert seen == [(3, 10), (10, 10)]


def completions(line: str, cwd: Path) -> set[str]:
    """What the shell is told for a line, by the protocol of argcomplete."""
    pytest.importorskip("argcomplete")
    read, write = os.pipe()
    # argcomplete writes to descriptor 8.
    environment = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
                   "_ARGCOMPLETE_IFS": "\n", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "-c", f'exec 8>&{write}; exec "$0" -m megatron_port', sys.executable], env=environment, cwd=cwd,
        pass_fds=(write,), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
    )
    os.close(write)
    with open(read, encoding="utf-8") as stream:
        found = stream.read()
    assert done.returncode == 0, done.stderr
    return {word.strip() for word in found.split("\n") if word.strip()}


def test_a_shell_completes(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert {"train", "tune"} <= completions("megatron-port t", tmp_path)
    assert {"runs/mine/", "runs/quickstart"} <= completions("megatron-port train runs/", tmp_path)
    assert completions("megatron-port train runs/quickstart --set layout.tensor", tmp_path) == {
        "layout.tensor_parallel_size="}
    assert "--tolerance" in completions("megatron-port checkpoint diff --t", tmp_path)


def test_the_shell_code_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(shellcode=lambda names, shell: f"{shell} {names}"))
    assert main(["completion", "bash"]) == 0
    assert "bash ['megatron-port']" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 3
    assert "pip install argcomplete" in capsys.readouterr().err
