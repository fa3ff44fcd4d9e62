"""Training and resuming with the tokens that were meant; the sample index is built once; blends."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_port.cli.main import main
from megatron_port.core.config.loader import load
from megatron_port.core.data.indexed import IndexedDataset, changes, data_fingerprint, meta_path
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.corpus_facts import as_toml, blend
from megatron_port.ext.corpora.index_cache import IndexCache, cached_arrays
from megatron_port.ext.corpora.megatron_order import build_sample_index
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.source_files import ReadOptions
from megatron_port.ext.corpora.tokenizer import ByteTokenizer
from megatron_port.ext.corpora.train_tokenizer import train_bpe
from megatron_port.run.changes import check_data_fingerprint


def corpus(folder, name, text, tokenizer=None):
    (folder / f"{name}.txt").write_text(text)
    prepare([folder / f"{name}.txt"], folder / name, tokenizer=tokenizer or ByteTokenizer(),
            options=ReadOptions(blank_lines=1))
    return folder / name


def run_config(folder, *prefixes, **data):
    pairs = {"train": [str(p) for p in prefixes], "split": [1.0, 0.0, 0.0], **data}
    return load(None, [f"output_dir={folder}/runs", "model.seq_length=8", "model.vocab_size=400", "training.steps=4",
                       *(f"data.{k}={json.dumps(v)}" for k, v in pairs.items())]).config


def loaders(run):
    return build_loaders(run, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True)


def test_an_exchanged_tokenizer_is_noticed(tmp_path):
    pytest.importorskip("tokenizers")
    from megatron_port.ext.corpora.tokenizer import get_tokenizer, identity_of

    (tmp_path / "t.txt").write_text("the cat and the other cat " * 40)
    train_bpe([tmp_path / "t.txt"], tmp_path / "t.json", vocab_size=270)
    tokenizer = get_tokenizer(str(tmp_path / "t.json"))
    a = corpus(tmp_path, "a", "the cat\n\n" * 30, tokenizer)
    b = corpus(tmp_path, "b", "the other cat\n\n" * 30, tokenizer)
    made = loaders(run_config(tmp_path, a, b))
    assert made.tokenizer_name == f"hf:{a}.tokenizer.json#<|endoftext|>" and made.eod_id == tokenizer.eod_id
    assert made.tokenizer["hash"] == identity_of(tokenizer)["hash"] and len(made.data_fingerprint) == 2
    assert loaders(run_config(tmp_path, a, tokenizer=f"hf:{tmp_path}/t.json")).eod_id == tokenizer.eod_id
    with pytest.raises(DataError, match="data.tokenizer is gpt2"):
        loaders(run_config(tmp_path, a, tokenizer="gpt2"))
    train_bpe([tmp_path / "t.txt"], tmp_path / "a.tokenizer.json", vocab_size=265)
    with pytest.raises(DataError, match="its ids mean other text"):
        loaders(run_config(tmp_path, a))
    c = corpus(tmp_path, "c", "the cat\n\n" * 30, get_tokenizer(str(tmp_path / "a.tokenizer.json")))
    with pytest.raises(DataError, match="different tokenizers"):
        loaders(run_config(tmp_path, b, c))


def checkpoint(made):
    state = SimpleNamespace(data={"corpora": json.loads(json.dumps(made.data_fingerprint))}, tokenizer=made.tokenizer)
    return SimpleNamespace(manifest=SimpleNamespace(state=state), path=SimpleNamespace(name="step-00000002"))


def test_a_run_goes_on_with_the_same_tokens_only(tmp_path):
    a = corpus(tmp_path, "a", "first text\n\n" * 40)
    run = run_config(tmp_path, a)
    saved = checkpoint(loaders(run))
    assert check_data_fingerprint(saved, run, loaders(run)) == []
    corpus(tmp_path, "a", "other text\n\n" * 40)
    with pytest.raises(DataError, match="bin_xxh3 was .*data.pinned = false"):
        check_data_fingerprint(saved, run, loaders(run))
    for free in (replace(run, data=replace(run.data, pinned=False)),
                 replace(run, checkpoint=replace(run.checkpoint, resume="elsewhere"))):
        (line,) = check_data_fingerprint(saved, free, loaders(free))
        assert "other data than when step-00000002" in line
    b = corpus(tmp_path, "b", "another corpus\n\n" * 40)
    assert check_data_fingerprint(saved, run, loaders(run_config(tmp_path, b))) == []  # another blend is a choice


def test_checkpoints_of_before_pins_load(tmp_path):
    run = run_config(tmp_path, corpus(tmp_path, "a", "text\n\n" * 40))
    old: Any = SimpleNamespace(manifest=SimpleNamespace(state=SimpleNamespace(data={}, tokenizer={})),
                          path=SimpleNamespace(name="step-1"))
    assert check_data_fingerprint(old, run, loaders(run)) == []
    meta_path(tmp_path / "a").unlink()
    bare = data_fingerprint([IndexedDataset(tmp_path / "a")])
    assert set(bare[0]) == {"prefix", "tokens", "documents"}
    assert changes([{**bare[0], "tokens": 1}], bare) == [f"{tmp_path}/a: tokens was 1, is {bare[0]['tokens']}"]


def test_an_index_is_built_once_by_whoever_is_first(tmp_path):
    """Several processes at once: one builds, the others get its files."""
    children = []
    for _ in range(5):
        child = os.fork()
        if not child:
            def build(make):
                with open(tmp_path / "built", "ab") as stream:
                    stream.write(b"x")
                make("a", np.int64, (5,))[:] = np.arange(5)
                time.sleep(0.3)

            got = cached_arrays(IndexCache(tmp_path / "cache"), "k", ["a"], build)
            os._exit(0 if got[0].tolist() == [0, 1, 2, 3, 4] else 1)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    assert (tmp_path / "built").read_bytes() == b"x"


def test_a_builder_that_dies_leaves_the_next_one_free(tmp_path):
    child = os.fork()
    if not child:
        cached_arrays(IndexCache(tmp_path), "k", ["a"], lambda make: (make("a", np.int64, (5,)), os._exit(9)))
    os.waitpid(child, 0)
    assert not list(tmp_path.glob("*.npy"))

    def build(make):
        make("a", np.int64, (3,))[:] = 7

    assert cached_arrays(IndexCache(tmp_path), "k", ["a"], build)[0].tolist() == [7, 7, 7]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="data.index_cache"):
        cached_arrays(IndexCache(tmp_path / "file" / "x"), "k", ["a"], lambda make: None)


def test_index_ahead_of_time(tmp_path, capsys):
    a, b = (corpus(tmp_path, n, f"{n} text\n\n" * 60) for n in "ab")
    run = run_config(tmp_path, a, b, order="megatron", index_cache=str(tmp_path / "index"), split=[0.5, 0.5, 0.0])
    (tmp_path / "run.toml").write_text(
        f'output_dir = "{tmp_path}/runs"\n[model]\nseq_length = 8\nvocab_size = 400\n[training]\nsteps = 4\n'
        f'[data]\ntrain = ["{a}", "{b}"]\norder = "megatron"\n'
        f'index_cache = "{tmp_path}/index"\nsplit = [0.5, 0.5, 0.0]\n')
    assert main(["data", "index", str(tmp_path / "run.toml")]) == 0
    out = capsys.readouterr().out
    assert f"train {a}: " in out and f"valid {b}: " in out
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "index").glob("*.npy")}
    loaders(run).train.step(0, 8)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "index").glob("*.npy")} == files
    assert len(files) == 8  # blend 2, train 3, valid 3: the corpora's lengths are equal, and so are their indices
    path = next(iter(files))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # a bit that numpy does not see
    build_sample_index(run)
    assert path.read_bytes() == content
    assert build_sample_index(run_config(tmp_path, a))[0].startswith('data.order = "stateless" keeps no index')


def test_blends(tmp_path, capsys):
    a, b = corpus(tmp_path, "a", "a" * 99 + "\n\n"), corpus(tmp_path, "b", "b" * 399 + "\n\n" + "c" * 399)
    data = [IndexedDataset(p) for p in (a, b)]
    total = sum(d.num_tokens for d in data)
    assert [s.weight for s in blend(data, {})] == [d.num_tokens / total for d in data]
    assert [s.weight for s in blend(data, {}, by="documents")] == [1 / 3, 2 / 3]
    assert [s.weight for s in blend(data, {}, by="equal")] == [0.5, 0.5]
    flat = blend(data, {}, temperature=3.0)
    assert 0.5 > flat[0].weight > data[0].num_tokens / total
    given = blend(data, {str(a): 3, str(b): 1})
    assert given[0].weight == 0.75 and given[0].epochs(1000) == 750 / data[0].num_tokens
    for wrong, message in (({str(a): 1.0}, "no weight for"), ({str(a): 0.0, str(b): 1.0}, "above 0")):
        with pytest.raises(DataError, match=message):
            blend(data, wrong)
    with pytest.raises(DataError, match="named twice"):
        blend([data[0], data[0]], {})
    assert main(["data", "blend", f"{a}=3", f"{b}=1", "--tokens", "1e4", "--out", str(tmp_path / "blend.toml")]) == 0
    out = capsys.readouterr().out
    assert "0.750000" in out and f"note: {a} is gone through" in out
    assert (tmp_path / "blend.toml").read_text() == as_toml(given)
    (tmp_path / "run.toml").write_text('extends = "blend.toml"\n[data]\nsplit = [1.0, 0.0, 0.0]\n')
    assert load(tmp_path / "run.toml").config.data.weights == (0.75, 0.25)
