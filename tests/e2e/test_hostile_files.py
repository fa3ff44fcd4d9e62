"""``data prepare`` on hostile files of real sizes, as a user runs it: a message and an exit code, bounded memory, and
nothing half-written."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

MEMORY_KIB = 300 << 10
"""Peak of one process, its imports included: twice what it is (156 MiB), and less than a bomb."""
PROGRAM = """
import sys
from resource import RUSAGE_CHILDREN, getrusage
from megatron_port.cli.main import main
from megatron_port.ext.telemetry.peak_memory import peak_resident_bytes
code = main(sys.argv[1:])
print("PEAK", max(peak_resident_bytes() >> 10, getrusage(RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""
"""Not RUSAGE_SELF: Linux keeps its peak across exec, so it begins with the memory of the process that started this one,
all that the tests before have imported."""


def prepared(folder: Path, *options: str) -> tuple[int, str, int]:
    """(exit code, output, peak KiB of the largest process) of ``data prepare out/c --input in``."""
    command = [sys.executable, "-c", PROGRAM, "data", "prepare", str(folder / "out" / "c"), "--input",
               str(folder / "in"), "--tokenizer", "byte", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250)
    text, _, peak = done.stdout.rpartition("PEAK ")
    return done.returncode, text, int(peak)


def left(folder: Path) -> list[str]:
    """What is in the folder of the output."""
    return sorted(os.listdir(folder / "out")) if (folder / "out").exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path


def test_a_bomb(place: Path) -> None:
    """1 GiB in one line, 1 MiB packed: refused for its line's length, and where that is passed over, as a bomb."""
    head, piece, tail = b'{"text": "', b"a" * (1 << 20), b'"}\n'
    packer = zlib.compressobj(9, wbits=-15)
    begin = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    middle = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)  # leans on nothing before it: it can be repeated
    end = packer.compress(tail) + packer.flush()
    checksum = zlib.crc32(head)
    for _ in range(1024):
        checksum = zlib.crc32(piece, checksum)
    size = len(head) + 1024 * len(piece) + len(tail)
    with open(place / "in" / "bomb.jsonl.gz", "wb") as out:
        out.write(b"\x1f\x8b\x08" + bytes(6) + b"\xff" + begin + 1024 * middle + end)
        out.write(struct.pack("<II", zlib.crc32(tail, checksum), size))
    for options, reason in (((), ":1: a line of more than 64000000 bytes"), (("--bad-input", "skip"), "300 times")):
        code, text, peak = prepared(place, *options)
        assert code == 4 and "bomb.jsonl.gz" in text and reason in text, text
        assert peak < MEMORY_KIB and left(place) == []


def test_the_peak_is_not_that_of_the_process_that_starts_it(place: Path) -> None:
    (place / "in" / "a.txt").write_text("some text\n")
    held = bytearray(b"x" * (MEMORY_KIB << 10))
    code, text, peak = prepared(place)
    assert code == 0 and len(held) and peak < MEMORY_KIB // 2, (text, peak)


def test_a_line_of_100_mb(place: Path) -> None:
    """Refused; left out when asked; read when the limit is raised."""
    with open(place / "in" / "long.jsonl", "wb") as out:
        out.write(b'{"text": "first"}\n{"text": "' + b"x" * 100_000_000 + b'"}\n{"text": "last"}\n')
    code, text, peak = prepared(place)
    assert code == 4 and "long.jsonl:2: a line of" in text and peak < MEMORY_KIB and left(place) == []
    code, text, peak = prepared(place, "--bad-input", "skip")
    assert code == 0 and peak < MEMORY_KIB and left(place) == ["c.bin", "c.idx", "c.meta.json"], text
    meta = json.loads((place / "out" / "c.meta.json").read_text())
    assert (meta["documents"], meta["left_out"], meta["tokens"]) == (2, 1, 11)
    for file in (place / "out").iterdir():
        file.unlink()
    code, text, _ = prepared(place, "--largest-record", "128")
    assert code == 0, text
    assert json.loads((place / "out" / "c.meta.json").read_text())["tokens"] == 100_000_012


def test_bytes_that_are_no_text(place: Path) -> None:
    """NUL bytes and invalid UTF-8, in JSON lines and in plain text."""
    (place / "in" / "a.jsonl").write_bytes(b'{"text": "a\\u0000b"}\n{"text": "caf\xe9"}\n{"text": "good"}\n')
    (place / "in" / "b.txt").write_bytes(b"se\0cond\xff")
    code, text, _ = prepared(place)
    assert code == 4 and "a.jsonl:1: a NUL character" in text and left(place) == []
    code, text, _ = prepared(place, "--bad-input", "repair")
    meta = json.loads((place / "out" / "c.meta.json").read_text())
    assert code == 0 and (meta["documents"], meta["repaired"], meta["left_out"]) == (4, 3, 0), text
