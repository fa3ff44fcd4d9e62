"""torch.distributed.checkpoint exports: torch's own reader in another process, and the way back."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interop_cases import EXPERTS, GPT2, KINDS, LLAMA, random_state, same, saved

from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.checkpoint.slices import slabs
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.tools.interop.dcp import _Planner, building, dcp_key, export_dcp
from megatron_port.tools.interop.hf_check import Inert, read_inert
from megatron_port.tools.interop.run_import import find_format, import_checkpoint

READER = """
import json, sys, torch, torch.distributed.checkpoint as dcp
source, out, shapes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model, state = {}, {}
for name, shape in shapes.items():
    model[name] = torch.empty(shape)
    state[name] = {"exp_avg": torch.empty(shape), "exp_avg_sq": torch.empty(shape), "step": torch.empty(())}
dcp.load({"model": model, "optimizer": {"state": state}}, checkpoint_id=source, no_dist=True)
flat = {f"{n}/weight": t for n, t in model.items()}
flat |= {f"{n}/{k}": t for n, s in state.items() for k, t in s.items()}
torch.save(flat, out)
"""


@pytest.mark.parametrize("model", [LLAMA], ids=["llama"])
def test_torch_reads_it_in_another_process(tmp_path: Path, model: ModelConfig) -> None:
    """Bit-equal, chunk by chunk: 512 bytes make every matrix a tensor of several chunks."""
    checkpoint = saved(tmp_path / "ours", model)
    export_dcp(checkpoint, tmp_path / "dcp", chunk_bytes=512)
    truth = random_state(model)
    shapes = json.dumps({n: list(t.shape) for (n, kind), t in truth.items() if kind == "weight"})
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READER, str(tmp_path / "dcp"), str(tmp_path / "read.pt"), shapes],
        check=True,
    )
    read = torch.load(tmp_path / "read.pt", weights_only=True)
    for (name, kind), tensor in truth.items():
        assert torch.equal(read[f"{name}/{kind}"], tensor), (name, kind)
    assert {float(t) for k, t in read.items() if k.endswith("/step")} == {11.0}


@pytest.mark.parametrize("model", [GPT2, EXPERTS], ids=["gpt2", "experts"])
def test_it_comes_back(tmp_path: Path, model: ModelConfig) -> None:
    checkpoint = saved(tmp_path / "ours", model)
    export_dcp(checkpoint, tmp_path / "dcp", chunk_bytes=512)
    assert find_format(tmp_path / "dcp") == "dcp"
    back = open_checkpoint(import_checkpoint(tmp_path / "dcp", tmp_path / "back"))
    same(checkpoint, back)
    mine, theirs = checkpoint.manifest.state, back.manifest.state
    assert (mine.step, mine.samples, mine.tokens) == (theirs.step, theirs.samples, theirs.tokens)
    assert mine.scalars == theirs.scalars and mine.config == theirs.config
    assert theirs.extra == {**mine.extra, "imported_from": str(tmp_path / "dcp")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "dcp", "ours"]


def test_weights_alone(tmp_path: Path) -> None:
    """Without moments, or when they are not wanted, the import is step 0 of a new run."""
    bare = saved(tmp_path / "bare", GPT2, kinds=("weight",))
    export_dcp(bare, tmp_path / "dcp")
    notes: list[str] = []
    back = open_checkpoint(import_checkpoint(tmp_path / "dcp", tmp_path / "back", note=notes.append))
    assert back.kinds() == ("weight",) and back.step == 0 and "no optimizer state" in notes[0]
    whole = saved(tmp_path / "whole", GPT2)
    export_dcp(whole, tmp_path / "dcp2")
    back = open_checkpoint(import_checkpoint(tmp_path / "dcp2", tmp_path / "back2", weights_only=True))
    assert back.kinds() == ("weight",) and back.step == 0


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensors that torch's writer was given, one at a time owns memory, although it keeps them."""
    seen: list[torch.Tensor] = []
    resolve = _Planner.resolve_data

    def watched(self: _Planner, item: Any) -> torch.Tensor:
        tensor = resolve(self, item)
        assert 0 < tensor.untyped_storage().nbytes() <= 512
        assert not any(t.untyped_storage().nbytes() for t in seen)
        seen.append(tensor)
        return tensor

    monkeypatch.setattr(_Planner, "resolve_data", watched)
    export_dcp(saved(tmp_path / "ours", GPT2), tmp_path / "dcp", chunk_bytes=512)
    assert len(seen) > 500


def test_damage_is_found(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "ours", GPT2)
    for number, (harm, what) in enumerate([
        (lambda d: (d / "__0_0.distcp").write_bytes((d / "__0_0.distcp").read_bytes()[:-70000]), "the file has"),
        (lambda d: (d / "__0_0.distcp").unlink(), "No such file"),
        (lambda d: (d / ".metadata").write_bytes((d / ".metadata").read_bytes()[:-100]), "damaged"),
        (lambda d: (d / "megatron_port.json").write_text("{"), "megatron_port.json: damaged"),
        (lambda d: (d / "megatron_port.json").unlink(), "--model FILE.toml"),
    ]):
        folder = tmp_path / f"dcp{number}"
        export_dcp(checkpoint, folder)
        harm(folder)
        with pytest.raises(CheckpointError, match=what):
            import_checkpoint(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".*"))


def test_another_model_is_refused(tmp_path: Path) -> None:
    export_dcp(saved(tmp_path / "ours", GPT2), tmp_path / "dcp")
    wrong = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=54, seq_length=16)
    with pytest.raises(CheckpointError, match=r"shape \(53, 32\).*\(54, 32\)"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "back", model=wrong)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "ours", GPT2)
    export_dcp(checkpoint, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="exists"):
        export_dcp(checkpoint, tmp_path / "dcp")
    import_checkpoint(tmp_path / "dcp", tmp_path / "back")
    with pytest.raises(CheckpointError, match="exists"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "back")


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), building(tmp_path / "x", 1) as part:
        (part / "a").write_text("half")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="are free"), building(tmp_path / "x", 1 << 62):
        pass


@given(shape=st.lists(st.integers(1, 9), max_size=4).map(tuple), elements=st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_slabs_tile(shape: tuple[int, ...], elements: int) -> None:
    count = torch.zeros(shape)
    for offset, size in slabs(shape, elements):
        count[tuple(slice(o, o + n) for o, n in zip(offset, size))] += 1
        assert torch.Size(size).numel() <= elements
    assert bool((count == 1).all())


class Bomb:
    """Unpickling it would call a function."""

    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("bomb"), "boom"))


def test_a_pickle_is_read_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value: dict[Any, Any] = {
        "a": [1, -5, 2**70, 1.5, None, True, "ü", b"x"], ("t", 2): {3: Bomb()}, "size": torch.Size((2, 3)),
    }
    for protocol in range(2, 6):
        found = read_inert(pickle.dumps(value, protocol=protocol), "x")
        assert found["size"].args == ((2, 3),) and found["size"].name == "torch.Size"
        bomb = found["t", 2][3]
        assert isinstance(bomb, Inert) and found["a"][:7] == value["a"][:7]
    assert not list(tmp_path.iterdir())


@given(data=st.binary(max_size=200), cut=st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_read(data: bytes, cut: int) -> None:
    good = pickle.dumps({"k": [Inert("a.b", (1, 2)), {"x": (1, 2, 3)}]})
    for raw in (data, good[:cut] + data, good[:cut]):
        try:
            read_inert(raw, "x")
        except CheckpointError:
            continue


def test_keys() -> None:
    assert dcp_key("layers.0.mlp.up.bias", "weight") == "model.layers.0.mlp.up.bias"
    assert [dcp_key("w", k) for k in KINDS[1:]] == ["optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq"]
