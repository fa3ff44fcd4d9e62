"""Folders that contradict themselves are read as transformers reads them, with a line, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
from safetensors.torch import load_file, save_file
from test_published import apart

from megatron_port.core.errors import CheckpointError
from megatron_port.core.registry import PARTS
from megatron_port.ext.families import family_named, family_names
from megatron_port.tools.interop import hf_check
from megatron_port.tools.interop.hf_files import SAMPLED_ROWS, HFFolder, Shards
from megatron_port.tools.interop.run_import import import_checkpoint

transformers = pytest.importorskip("transformers")


def edited(folder: Path, **changes: Any) -> None:
    """Change fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_another_head(folder: Path, family: str) -> tuple[str, str]:
    """Write a model whose head has one row that the token table has not, and a configuration that ties the two; return
    their names."""
    hf.reference(hf.small(family, tie_word_embeddings=False)).save_pretrained(str(folder))
    names, path = family_named(family).names, folder / "model.safetensors"
    tensors = load_file(path)
    head = next(name for name in (names.head, "lm_head.weight") if name in tensors)
    table = f"{names.prefix}{names.outside['embedding.word']}.weight"
    tensors[head] = tensors[table].clone()
    tensors[head][50] *= -1
    save_file(tensors, path, metadata={"format": "pt"})
    edited(folder, tie_word_embeddings=True)
    return head, table


UNTIED = ("nemotron_h", "kimi_linear")
"""Families whose tables transformers never ties."""


@pytest.mark.parametrize("family", family_names())
def test_a_head_of_its_own_is_kept(family: str, tmp_path: Path) -> None:
    """Whatever config.json ties; transformers 5 keeps it."""
    head, table = with_another_head(tmp_path / "it", family)
    folder = HFFolder(tmp_path / "it")
    said = "ties no tables of this family" if family in UNTIED else f"the files have another {head}"
    assert not folder.model.tie_embeddings and said in " ".join(folder.notes)
    assert apart(folder, 32) <= 1e-6
    if family in UNTIED:
        return
    tensors = load_file(folder.path / "model.safetensors")
    save_file({**tensors, head: tensors[table].clone()}, folder.path / "model.safetensors", metadata={"format": "pt"})
    same = HFFolder(folder.path)
    assert same.model.tie_embeddings and not same.notes


class Counted:
    """A tensor of a file that counts the bytes read of it."""

    def __init__(self, view: Any, read: dict[str, int], name: str) -> None:
        self.view, self.read, self.name = view, read, name

    def __getitem__(self, box: Any) -> Any:
        found = self.view[box]
        self.read[self.name] = self.read.get(self.name, 0) + found.nbytes
        return found


@pytest.fixture
def large_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, int]]:
    """A tied model of 4,096 tokens whose files have its head too, and what is read of each tensor."""
    config = hf.llama(tie_word_embeddings=True, vocab_size=4096)
    hf.reference(config).save_pretrained(str(tmp_path / "it"))
    path, read = tmp_path / "it" / "model.safetensors", {}
    tensors = load_file(path)
    save_file({**tensors, HEAD: tensors[TABLE].clone()}, path, metadata={"format": "pt"})
    slice_of = Shards.slice_of
    monkeypatch.setattr(Shards, "slice_of", lambda self, name: Counted(slice_of(self, name), read, name))
    return path.parent, read


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def test_a_rank_reads_its_slice_of_a_tied_head(large_tables: tuple[Path, dict[str, int]]) -> None:
    """And what of it is to be the token table's is compared there: all of it, over all ranks."""
    folder, read = large_tables
    table = load_file(folder / "model.safetensors")[TABLE]
    rows, width = table.shape
    for rank in range(4):
        read.clear()
        opened = PARTS.function("Hugging Face folder")(folder)
        assert opened.model.tie_embeddings and not opened.notes
        assert read == dict.fromkeys((HEAD, TABLE), SAMPLED_ROWS * width * table.itemsize)
        found = opened.read("embedding.word.weight", "weight", (rank * rows // 4, 0), (rows // 4, width))
        assert found.equal(table[rank * rows // 4 : (rank + 1) * rows // 4])
        assert read == dict.fromkeys((HEAD, TABLE), (SAMPLED_ROWS + rows // 4) * width * table.itemsize)
    read.clear()
    assert HFFolder(folder).model.tie_embeddings and read == dict.fromkeys((HEAD, TABLE), table.nbytes)


@pytest.mark.parametrize("row", [0, 1, 4094, 4095])
def test_a_row_that_differs_is_found_when_a_rank_opens_or_reads(
    large_tables: tuple[Path, dict[str, int]], row: int
) -> None:
    folder, _ = large_tables
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD][row, 3] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert not HFFolder(folder).model.tie_embeddings  # all rows
    opened = HFFolder(folder, sampled=True)
    assert opened.model.tie_embeddings is (row in (1, 4094))
    if row in (1, 4094):
        half, width = row // 2048 * 2048, tensors[TABLE].shape[1]
        opened.read("embedding.word.weight", "weight", (2048 - half, 0), (2048, width))
        with pytest.raises(CheckpointError, match=rf"but not rows {half} to {half + 2047}; set tie_word_embeddings"):
            opened.read("embedding.word.weight", "weight", (half, 0), (2048, width))


def test_an_import_is_compared_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own loader. A head that is dropped is seen, and where nothing can be compared a line says it."""
    with_another_head(tmp_path / "it", "llama")
    said: list[str] = []
    import_checkpoint(tmp_path / "it", tmp_path / "ours", note=said.append)
    assert "is kept and the model is untied" in said[0]
    assert "logits against transformers" in said[1] and "max|Δ|" in said[1], said
    with monkeypatch.context() as patch:
        patch.setattr(HFFolder, "_untie_head", lambda self: None)
        with pytest.raises(CheckpointError, match=r"computes other logits from it .* = \d.*Nothing was imported"):
            import_checkpoint(tmp_path / "it", tmp_path / "wrong", note=said.append)
        assert not list((tmp_path / "wrong").glob("step*"))
        import_checkpoint(tmp_path / "it", tmp_path / "wrong", check=False, note=said.append)
    unchecked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "transformers", None)
        import_checkpoint(tmp_path / "it", tmp_path / "alone", note=unchecked.append)
    with monkeypatch.context() as patch:
        patch.setattr(hf_check, "parameter_count", lambda model: 10**15)
        assert hf_check.check_import(HFFolder(tmp_path / "it"), unchecked.append) is None
    assert "not installed here" in unchecked[1] and "takes 4000000.0 GB in fp32" in unchecked[-1]


def test_a_jobs_limit_counts_as_memory(tmp_path: Path) -> None:
    """A job may have less memory than its machine; what it may still take is its limit less what is no file's."""
    (tmp_path / "proc").write_text("1:name=x:/y\n0::/job/step\n")
    for folder, limit in (("job", "5000"), ("job/step", "max")):
        (tmp_path / "cgroup" / folder).mkdir(parents=True)
        (tmp_path / "cgroup" / folder / "memory.max").write_text(limit)
        (tmp_path / "cgroup" / folder / "memory.stat").write_text("anon 1500\nfile 900\n")
    assert hf_check.free_memory(tmp_path / "proc", tmp_path / "cgroup") == 3500
    assert hf_check.free_memory(tmp_path / "none", tmp_path / "cgroup") > 10**6


def test_a_head_alone_is_the_token_table_too(tmp_path: Path) -> None:
    """Of a tied model; transformers ties what is missing to what is there."""
    hf.reference(hf.llama(tie_word_embeddings=True)).save_pretrained(str(tmp_path / "it"))
    path = tmp_path / "it" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    folder = HFFolder(path.parent)
    assert folder.model.tie_embeddings and "lm_head.weight is read for it" in folder.notes[0]
    assert apart(folder, 32) <= 1e-9


def test_one_file_comes_before_an_index(tmp_path: Path) -> None:
    """As in transformers; the index may be an older upload's."""
    folder = hf.saved(hf.reference(hf.llama()), tmp_path / "it", shard="40KB")
    whole = hf.saved(hf.reference(hf.llama(), seed=1), tmp_path / "whole")
    shutil.copy(whole / "model.safetensors", folder)
    found = HFFolder(folder)
    assert "model.safetensors is read" in found.notes[0] and apart(found, 32) <= 1e-9
    assert apart(HFFolder(whole), 32) <= 1e-9


def test_a_tensor_in_two_shards_is_one_or_refused(tmp_path: Path) -> None:
    folder = hf.saved(hf.reference(hf.llama()), tmp_path / "it", shard="40KB")
    files = sorted(folder.glob("model-*"))
    first, last = load_file(files[0]), load_file(files[-1])
    name = next(iter(first))
    save_file({**last, name: first[name]}, files[-1], metadata={"format": "pt"})
    assert apart(HFFolder(folder), 32) <= 1e-9
    first[name].view(-1)[7] += 1
    save_file({**last, name: first[name]}, files[-1], metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} is in {files[0].name} and, with other values, in model"):
        HFFolder(folder)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3_moe", "starcoder2"])
@pytest.mark.parametrize("window", [16, 20])
def test_a_window_counts_however_long_it_is(family: str, window: int, tmp_path: Path) -> None:
    """Texts may be longer than max_position_embeddings, and the window is then what bounds attention."""
    changes = {"use_sliding_window": True, "max_window_layers": 3} if family.startswith("qwen") else {}
    changes |= {"max_window_layers": 1} if family == "qwen2" else {}
    config = hf.small(family, length=16, **{**changes, "sliding_window": window})
    folder = HFFolder(hf.saved(hf.reference(config), tmp_path / "it"))
    assert folder.model.sliding_window == window and apart(folder, 40) <= 1e-9


def test_names_that_are_one_field_must_agree(tmp_path: Path) -> None:
    folder = hf.saved(hf.reference(hf.gpt2()), tmp_path / "it")
    edited(folder, num_hidden_layers=3)
    assert HFFolder(folder).model.num_layers == 3
    edited(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="n_layer 3 and num_hidden_layers 2 are one field by two names"):
        HFFolder(folder)
    edited(folder, num_hidden_layers=None, layer_norm_epsilon=None)
    with pytest.raises(CheckpointError, match="layer_norm_epsilon is null, which is not its default 1e-05"):
        HFFolder(folder)


def test_deepseeks_default_is_imported(tmp_path: Path) -> None:
    """As transformers saves it: one module of multi-token prediction in the configuration, none in the files."""
    config = hf.deepseek(num_nextn_predict_layers=1, first_k_dense_replace=3)
    said: list[str] = []
    import_checkpoint(hf.saved(hf.reference(config), tmp_path / "it"), tmp_path / "ours", note=said.append)
    assert "and the files have no such modules; it is read as 0" in said[0] and "logits against" in said[1]


