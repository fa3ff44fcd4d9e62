"""Files from elsewhere that would fill the memory, or reach out of their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_port.core.errors import CheckpointError, DataError
from megatron_port.ext.corpora import columns as table_limit
from megatron_port.ext.corpora.chat_template import find_template, settings_of
from megatron_port.ext.corpora.hf_tokenizer import copy_companions
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.tokenizer import get_tokenizer
from megatron_port.run.provenance import read_identity


@pytest.mark.parametrize("kind", ["parquet", "dictionary", "arrow"])
def test_a_table_that_unpacks_to_too_much(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the metadata of Parquet before anything is read; where a dictionary hides it, or in Arrow, while reading."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(table_limit, "EXPANSION_FREE", 1 << 20)
    text = "a" * 100_000
    table = pyarrow.table({"text": [text] * 200})
    path = tmp_path / f"a.{'arrow' if kind == 'arrow' else 'parquet'}"
    if kind == "arrow":
        with pyarrow.ipc.new_file(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(table)
    else:
        parquet.write_table(table, path, compression="zstd", use_dictionary=kind == "dictionary")
    assert path.stat().st_size < 40_000
    with pytest.raises(DataError, match=r"bytes unpack to \d+ or more, more than 300 times"):
        prepare([path], tmp_path / "c", tokenizer=get_tokenizer("byte"))
    parquet.write_table(pyarrow.table({"text": [os.urandom(50_000).hex()] * 2}), tmp_path / "b.parquet")
    assert prepare([tmp_path / "b.parquet"], tmp_path / "c", tokenizer=get_tokenizer("byte")).documents == 2


@pytest.mark.parametrize("run", ["../../x", "/elsewhere/x", "..", ".", "a/b", "x" * 300])
def test_a_run_s_id_is_a_name(run: str, tmp_path: Path) -> None:
    """It names the folder that the records of that run are moved to."""
    (tmp_path / "run.json").write_text(json.dumps({"id": run}))
    with pytest.raises(CheckpointError, match="which is no name of a folder; nothing was moved"):
        read_identity(tmp_path)
    for known, text in ((True, "0f3a"), (False, "a\0b")):  # no text of ours has that byte: not read at all
        (tmp_path / "run.json").write_text(json.dumps({"id": text}))
        assert (read_identity(tmp_path) is not None) is known


def test_links_out_of_a_model_s_folder(tmp_path: Path) -> None:
    """A linked template or tokenizer would copy what it points to; links to files of the hub's cache are read."""
    secret, model = tmp_path / "secret", tmp_path / "model"
    secret.write_text('{"chat_template": "key"}')
    model.mkdir()
    calls: list[tuple[str, type[Exception], Any]] = [
        ("chat_template.jinja", DataError, lambda: find_template("", model, {})),
        ("tokenizer_config.json", DataError, lambda: settings_of(model)),
        ("generation_config.json", CheckpointError, lambda: copy_companions(model, tmp_path / "kept")),
        ("chat_template.jinja", CheckpointError, lambda: copy_companions(model, tmp_path / "kept")),
    ]
    for name, error, call in calls:
        (model / name).symlink_to(secret)
        with pytest.raises(error, match="is a link to .*secret, outside of its folder"):
            call()
        (model / name).unlink()
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "blobs").mkdir()
    (snapshot.parent.parent / "blobs" / "1a").write_text("{{ messages }}")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/1a")
    (model / "own.jinja").write_text("{{ messages }}")
    (model / "chat_template.jinja").symlink_to("own.jinja")
    downloaded = tmp_path / "local_dir"
    downloaded.mkdir()
    (downloaded / "chat_template.jinja").symlink_to(snapshot.parent.parent / "blobs" / "1a")
    for folder in (snapshot, model, downloaded):
        assert find_template("", folder, {}).text == "{{ messages }}"
