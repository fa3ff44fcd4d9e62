"""Names of files and manifests on a terminal: none is a command to it, none looks like a line of ours."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.io.logging import Logger, SafeStream, one_line, printable, safe_output, trusted

CLEAR = "\x1b[2J\x1b[Hstep-00000009: whole"
TITLE = "\x9d0;owned\x9c"
BACKWARDS = "\u202egnp.exe\u2066"


@given(st.text())
def test_what_is_printed_is_seen(text: str) -> None:
    """Against Unicode's own classes: controls, formats that turn text round, surrogates; letters stay as they are."""
    safe = printable(text)
    assert not [c for c in safe if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"]
    assert not [c for c in safe if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI",
                                                                    "FSI", "PDI")]
    assert printable(safe) == safe and "\n" not in one_line(text) and "\t" not in one_line(text)
    if text.isprintable():
        assert safe == text


@pytest.mark.parametrize("text", ["日本 e\u0301 ß", "a\tb\n", "שלום", "👩\u200d🔬", r"C:\x1b"])
def test_what_people_write_stays(text: str) -> None:
    assert printable(text) == text


def test_streams() -> None:
    """What draws writes to the stream itself; a terminal without UTF-8 gets escapes, not an error."""
    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, "ascii", newline="\n")
    stream = SafeStream(narrow)
    assert stream.write("é\x1b[0m\n") == 6 and trusted(stream) is narrow and trusted(narrow) is narrow
    stream.writelines(["x\x07", "y\n"])
    stream.flush()
    assert raw.getvalue() == b"\\xe9\\x1b[0m\nx\\x07y\n" and not stream.isatty()


def test_output_is_safe_within_and_as_before_after(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with safe_output(), safe_output():
        print(CLEAR)
        print(TITLE, file=sys.stderr)
    assert sys.stdout is before
    out = capsys.readouterr()
    assert out.out == "\\x1b[2J\\x1b[Hstep-00000009: whole\n" and out.err == "\\x9d0;owned\\x9c\n"
    stream = io.StringIO()
    Logger(stream=stream).log(f"a {CLEAR}\nb {BACKWARDS}")
    assert stream.getvalue() == "a \\x1b[2J\\x1b[Hstep-00000009: whole\nb \\u202egnp.exe\\u2066\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_no_character_ends_a_run_in_a_narrow_locale(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """As with PYTHONIOENCODING=ascii: what draws, warns or logs writes to the stream itself."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors="strict"))
    Logger(stream=sys.stdout).log("a · é 漢")  # a library's user has no safe_output
    with safe_output():
        print("b · é 漢")
        trusted(sys.stdout).write("c · é 漢\n")
        Console(file=trusted(sys.stdout), force_terminal=True).print(Table("d · 漢"))
    sys.stdout.flush()
    assert [raw.getvalue().count(b"\\u6f22"), *(x in raw.getvalue() for x in (b"a ", b"b ", b"c ", b"d "))] == [
        4, True, True, True, True]


def _save(folder: Path) -> Path:
    state = SavedState(
        step=1, samples=1, tokens=1, layout={}, config={"engine": "native", "x": 1}, scalars={}, extra={}
    )
    return save_checkpoint(folder, state, [StatePiece("w", "weight", (4,), (0,), (4,), 0, torch.ones(4))])


def _forge(at: Path, where: str, text: str) -> None:
    """A hostile text in a manifest whose hash is right."""
    body = json.loads((at / "manifest.json").read_text())["manifest"]
    if where in ("name", "kind", "key"):
        body["pieces"][0][where] = text
    elif where == "file":
        body["files"][text] = body["files"]["rank-00000.safetensors"]
    elif where == "version":
        body["version"] = text
    elif where == "setting":
        body["config"] = {text: 1}
    else:
        body["config"][where] = text
    dumped = json.dumps(body, sort_keys=True, separators=(",", ":"))
    outer = {"hash": xxhash.xxh3_128_hexdigest(dumped.encode()), "manifest": body}
    (at / "manifest.json").write_text(json.dumps(outer))


@pytest.mark.parametrize("text", [CLEAR, TITLE, BACKWARDS, "w\nstep-00000001: whole: every hash matches", "\ud800"])
@pytest.mark.parametrize("where", ["name", "kind", "key", "file", "version", "engine", "setting"])
def test_a_manifest_s_texts(
    tmp_path: Path, where: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every field that a command prints: refused or escaped, never obeyed, and no line begins with it."""
    at = _save(tmp_path / "a")
    _save(tmp_path / "b")
    _forge(at, where, text)
    if where != "setting":  # such a checkpoint is not opened, and what is said of it is one line
        assert main(["checkpoint", "ls", str(at)]) == 5 and main(["checkpoint", "verify", str(at)]) == 5
    main(["checkpoint", "ls", str(tmp_path / "a")])
    main(["checkpoint", "diff", str(at), str(tmp_path / "b" / "step-00000001")])
    printed = capsys.readouterr()
    for output in (printed.out, printed.err):
        assert printable(output) == output
        assert not [line for line in output.splitlines() if line == "step-00000001: whole: every hash matches"]


@pytest.mark.parametrize("bad", ["x" * 300, "é" * 101, "a\x1b[2J", "a\nb", "a\0b", " ", "..", "a/b", "\u202ea"])
def test_names_that_no_folder_should_have(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One error before anything starts, without a traceback; 200 bytes are fine."""
    assert main(["train", "runs/quickstart", "--set", f"name={json.dumps(bad)}", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("error:") == 1 and "name is " in printed.err
    assert "Traceback" not in printed.err and printable(printed.err) == printed.err
    assert main(["config", "check", "runs/quickstart", "--set", f"name={'x' * 200}"]) == 0
