"""An interrupted ``prepare`` goes on, and gives the bytes that an unbroken one gives."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest

from megatron_port.core.errors import DataError, EnvironmentFault
from megatron_port.core.io.files import write_bytes
from megatron_port.ext.corpora import prepare as preparing
from megatron_port.ext.corpora import sources
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.tokenizer import ByteTokenizer

BYTE = ByteTokenizer()


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(preparing, "SAVE_BYTES", 5000)
    (tmp_path / "in").mkdir()
    r = random.Random(1)
    for name in ("a", "b", "c"):
        rows = [json.dumps({"text": "é" * r.randrange(1, 300)}) for _ in range(150)]
        (tmp_path / "in" / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    prepare([tmp_path / "in"], tmp_path / "whole", tokenizer=BYTE)
    return tmp_path


def same(folder, name):
    for suffix in ("bin", "idx", "meta.json"):
        assert (folder / f"{name}.{suffix}").read_bytes() == (folder / f"whole.{suffix}").read_bytes()


def left(folder):
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


class Stop(Exception):
    pass


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("after", [1, 7, 30, 60])
def test_an_interruption_costs_what_came_after_the_journal(corpus, after, workers):
    calls = []

    def stop(at):
        calls.append(at)
        if len(calls) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, workers=workers, progress=stop)
    assert not list(corpus.glob("c.*")) and left(corpus) == [".c.prepare"]
    lines, again = [], []
    done = prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, workers=workers, log=lines.append,
                   progress=again.append)
    same(corpus, "c")
    assert left(corpus) == [] and len(calls) + len(again) == len_of(corpus)
    assert done.resumed_documents > 0 and f"resuming after {done.resumed_documents} documents" in lines[1]


def len_of(corpus):
    steps = []
    prepare([corpus / "in"], corpus / "count", tokenizer=BYTE, progress=steps.append)
    return len(steps)


@pytest.mark.parametrize("seed", range(4))
def test_kills(corpus, seed):
    """SIGKILL of the whole process at a random block, again and again, until it gets through."""
    r = random.Random(seed)
    starts = 0
    while not (corpus / "c.idx").exists():
        starts += 1
        die_at = r.randrange(1, 40)
        child = os.fork()
        if not child:
            count = [0]

            def dying(at, count=count, die_at=die_at):
                count[0] += 1
                if count[0] == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, progress=dying)
            os._exit(0)
        os.waitpid(child, 0)
        assert starts < 200
    assert starts > 1
    same(corpus, "c")
    assert left(corpus) == []


def interrupt(corpus, at=40):
    steps = []

    def stop(progress):
        steps.append(progress)
        if len(steps) == at:
            raise Stop

    with pytest.raises(Stop):
        prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, progress=stop)


def test_changed_inputs_start_afresh(corpus):
    interrupt(corpus)
    path = corpus / "in" / "a.jsonl"
    path.write_text(path.read_text().replace("00e9", "00f6", 1))
    lines = []
    prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, log=lines.append)
    assert any("starting afresh" in line for line in lines)
    prepare([corpus / "in"], corpus / "whole", tokenizer=BYTE)
    same(corpus, "c")


def test_other_options_start_afresh(corpus):
    interrupt(corpus)
    done = prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, append_eod=False)
    assert done.resumed_documents == 0
    interrupt(corpus)
    assert prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, fresh=True).resumed_documents == 0
    same(corpus, "c")


def test_a_journal_ahead_of_its_files_is_not_trusted(corpus):
    interrupt(corpus)
    with open(corpus / ".c.prepare" / "tokens", "r+b") as stream:
        stream.truncate(10)
    assert prepare([corpus / "in"], corpus / "c", tokenizer=BYTE).resumed_documents == 0
    same(corpus, "c")
    interrupt(corpus)
    write_bytes(corpus / ".c.prepare" / "journal.json", b"{")
    assert prepare([corpus / "in"], corpus / "c", tokenizer=BYTE).resumed_documents == 0
    same(corpus, "c")


@pytest.mark.parametrize("name", ["tokens", "lengths"])
def test_a_flipped_bit_of_the_unfinished_files_is_not_resumed(corpus, name):
    """It would get hashes that are right for the wrong bytes."""
    r = random.Random(name)
    for _ in range(5):
        interrupt(corpus)
        journal = json.loads((corpus / ".c.prepare" / "journal.json").read_text())
        held = journal["written"]["tokens"] * 2 if name == "tokens" else journal["written"]["documents"] * 4
        with open(corpus / ".c.prepare" / name, "r+b") as stream:
            at = r.randrange(held)
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ 1 << r.randrange(8)]))
        lines = []
        done = prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, log=lines.append)
        assert done.resumed_documents == 0 and any("their hashes differ" in line for line in lines)
        same(corpus, "c")


def test_a_fault_in_the_input_keeps_what_was_good(corpus):
    path = corpus / "in" / "c.jsonl"
    good = path.read_text()
    path.write_text(good + '{"text": "unfinished')
    lines = []
    with pytest.raises(DataError, match=r"c\.jsonl:151"):
        prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, log=lines.append)
    assert "--fresh begins anew" in lines[-1] and not list(corpus.glob("c.*"))
    path.write_text(good)
    assert prepare([corpus / "in"], corpus / "c", tokenizer=BYTE).resumed_documents > 100
    same(corpus, "c")


def test_one_at_a_time(corpus):
    child_ready, child_go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        def wait(progress):
            os.write(child_ready[1], b"x")
            os.read(child_go[0], 1)
            os._exit(0)

        prepare([corpus / "in"], corpus / "c", tokenizer=BYTE, progress=wait)
    os.read(child_ready[0], 1)
    with pytest.raises(DataError, match="another process"):
        prepare([corpus / "in"], corpus / "c", tokenizer=BYTE)
    os.write(child_go[1], b"x")
    os.waitpid(child, 0)
    prepare([corpus / "in"], corpus / "c", tokenizer=BYTE)
    same(corpus, "c")


class Dying(ByteTokenizer):
    def encode_array(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_named(corpus):
    with pytest.raises(EnvironmentFault, match="SIGKILL.*fewer --workers"):
        prepare([corpus / "in"], corpus / "c", tokenizer=Dying(), workers=2)
    assert left(corpus) == [] and not list(corpus.glob("c.*"))
