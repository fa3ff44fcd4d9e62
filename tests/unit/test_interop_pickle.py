"""Foreign pickles: refused unless trusted, read by a child that can neither run them nor reach the network."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.errors import CheckpointError
from megatron_port.tools.interop.hf_check import read_inert
from megatron_port.tools.interop.megatron import find_files, model_from_args, name_layers, name_without_pipeline
from megatron_port.tools.interop.run_import import import_checkpoint
from megatron_port.tools.interop.sandbox import forbid_network_and_programs
from megatron_port.tools.interop.universal import megatron_names
from megatron_port.tools.interop.unpickle import Stubbed, check_size, check_torch_file, read_pickles

ARGS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "padded_vocab_size": 32, "max_position_embeddings": 8,
    "consumed_train_samples": 40, "num_experts": [1],
}


class Bomb:
    """Unpickling it the usual way writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (eval, (f"open({str(self.path)!r}, 'w').write('boom')",))


class Method(Bomb):
    """The same by a method, which a pickle looks up by calling ``getattr``."""

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "boom"))


class Setting:
    """An object with attributes."""

    def __init__(self) -> None:
        self.numel, self.start = 3, 4


def test_nothing_of_the_file_runs(tmp_path: Path) -> None:
    """Objects become names and attributes; tensors arrive as they are; what would run does not."""
    value: dict[Any, Any] = {
        "args": argparse.Namespace(**ARGS), "bomb": Bomb(tmp_path / "bomb"), "setting": Setting(),
        "tensors": [torch.arange(6).view(2, 3).t(), torch.tensor(2.5, dtype=torch.bfloat16)],
        3: ("a", None, float("inf")),
        "generator": torch.get_rng_state(), "dtype": torch.bfloat16,
    }
    value["again"] = value["tensors"][0]
    torch.save(value, tmp_path / "file.pt")
    (tmp_path / "scratch").mkdir()
    notes: list[str] = []
    tree = read_pickles([tmp_path / "file.pt"], tmp_path / "scratch", trusted=True, note=notes.append)[
        tmp_path / "file.pt"
    ]
    assert not (tmp_path / "bomb").exists()
    assert isinstance(tree["args"], Stubbed) and tree["args"].name == "argparse.Namespace"
    assert tree["args"].state == ARGS and tree["setting"].get("numel") == 3
    assert tree["bomb"].name == "builtins.eval"
    assert torch.equal(tree["tensors"][0], value["tensors"][0])
    assert torch.equal(tree["again"], value["again"]) and tree["tensors"][1].dtype == torch.bfloat16
    assert tree[3] == ["a", None, "inf"] and tree["dtype"] == "torch.bfloat16"
    torch.save({"bomb": Method(tmp_path / "bomb")}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="file.pt: cannot be read"):
        read_pickles([tmp_path / "file.pt"], tmp_path / "scratch", trusted=True)
    assert not (tmp_path / "bomb").exists()


PROBE = """
import json, socket, subprocess, sys
from megatron_port.tools.interop.sandbox import forbid_network_and_programs, limit
limit(memory=1 << 40, file_bytes=1000, seconds=60)
why = forbid_network_and_programs()
out = {"why": why}
for name, act in {
    "socket": lambda: socket.socket(), "program": lambda: subprocess.run(["/bin/true"]),
    "file": lambda: [f.write(bytes(1000)) for f in [open(sys.argv[1], "wb", 0)] * 2],
}.items():
    try:
        act()
        out[name] = "done"
    except OSError as error:
        out[name] = type(error).__name__
out["sum"] = sum(range(10))
print(json.dumps(out))
"""


def test_the_childs_doors_are_shut(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path / "big")], capture_output=True, text=True, check=True,
    )
    said = json.loads(run.stdout)
    if said["why"] is not None:
        pytest.skip(f"no seccomp here: {said['why']}")
    assert (said["socket"], said["program"]) == ("PermissionError", "PermissionError")
    assert said["file"] == "OSError" and said["sum"] == 45


def test_a_wrong_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in str(forbid_network_and_programs())


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="is a pickle.*--trust-pickle"):
        read_pickles([path], tmp_path, trusted=False)
    with pytest.raises(CheckpointError, match="No such file"):
        read_pickles([tmp_path / "none.pt"], tmp_path, trusted=True)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CheckpointError, match="file.pt: cannot be read"):
        read_pickles([path], tmp_path, trusted=True)


# ---------------------------------------------------------------- what files and layers are called


def test_layers_are_told_by_what_they_hold() -> None:
    """Both numberings: microsoft's, and BigScience's with its two transposes."""
    inside = ["input_layernorm.weight", "self_attention.query_key_value.bias", "mlp.dense_h_to_4h.weight"]
    embedding = ["word_embeddings.weight", "position_embeddings.weight"]
    for first, norm in ((2, 4), (3, 6)):
        keys = {1: embedding, first: inside, first + 1: [*inside, "self_attention.rotary_emb.inv_freq"],
                norm: ["weight", "bias"], norm + 1: embedding}
        named = name_layers(keys, Path("x"))
        assert named[first + 1, "self_attention.query_key_value.bias"] == "layers.1.attention.qkv.bias"
        assert named[norm, "bias"] == "final_norm.bias" and not any(layer == norm + 1 for layer, _ in named)
        assert len(named) == 2 + 6 + 2
    with pytest.raises(CheckpointError, match="deepspeed_moe"):
        name_layers({1: embedding, 2: [*inside, "mlp.deepspeed_moe.gate.wg.weight"]}, Path("x"))
    assert name_without_pipeline("language_model.transformer.layers.3.attention.dense.bias") == (
        "layers.3.attention.output.bias"
    )


def test_every_file_is_needed(tmp_path: Path) -> None:
    names = ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]
    names += [f"layer_{i:02d}-model_{t:02d}-model_states.pt" for i in (1, 2) for t in (0, 1)]
    names += [f"bf16_zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt" for d in (0, 1) for m in (0, 1)]
    for name in names:
        (tmp_path / name).touch()
    found = find_files(tmp_path)
    assert (found.tp, len(found.layers), len(found.optimizer)) == (2, 2, 4)
    for lost, message in (
        (names[0], "mp_rank_00_model_states.pt is missing"),
        (names[3], "layer_01-model_01-model_states.pt is missing"),
        (names[-2], "replica 1, model-parallel rank 0 is missing.*--weights-only"),
    ):
        (tmp_path / lost).unlink()
        with pytest.raises(CheckpointError, match=message):
            find_files(tmp_path)
        (tmp_path / lost).touch()


# ---------------------------------------------------------------- arguments and a model without a pipeline


def test_the_model_in_the_arguments() -> None:
    model = model_from_args(ARGS, "x", vocab_size=29)
    assert (model.vocab_size, model.seq_length, model.ffn_size, model.activation) == (29, 8, 64, "gelu_tanh")
    llama = {**ARGS, "swiglu": True, "use_rotary_position_embeddings": True, "normalization": "rmsnorm",
             "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "num_key_value_heads": 1,
             "rope_theta": 5e5, "ffn_hidden_size": 40, "add_position_embedding": False}
    model = model_from_args(llama, "x")
    assert (model.activation, model.position_embedding) == ("swiglu", "rope")
    assert (model.kv_heads, model.tie_embeddings) == (1, False)
    assert (model.vocab_size, model.rope_theta, model.ffn_size) == (32, 5e5, 40)
    for change, message in (
        ({"num_experts": [8]}, "mixture of experts"),
        ({"position_embedding_type": Stubbed("megatron.enums.PositionEmbeddingType", [3], None)}, "ALiBi"),
        ({"apply_layernorm_1p": True}, "minus one"),
        ({"hidden_size": None}, "args.hidden_size is None"),
        ({"use_rotary_position_embeddings": True, "rotary_percent": 0.25}, "rotary_percent"),
        ({"add_position_embedding": False}, "without positions"),
    ):
        with pytest.raises(CheckpointError, match=message):
            model_from_args({**ARGS, **change}, "x")
    with pytest.raises(CheckpointError, match="--vocab-size 33, but the embedding has 32 rows"):
        model_from_args(ARGS, "x", vocab_size=33)


def no_pipeline(folder: Path, tp: int = 2, version: float = 3.0) -> dict[str, torch.Tensor]:
    """Files of a run with ``--no-pipeline-parallel``; the whole tensors in our names."""
    folder.mkdir()
    model = model_from_args(ARGS, "x", vocab_size=29)
    generator = torch.Generator().manual_seed(3)
    table = megatron_names(model)
    whole = {n: torch.randn(f.local_shape(1, 32), generator=generator) for n, f in table.items()}
    for rank in range(tp):
        encoder: dict[str, torch.Tensor] = {}
        embedding: dict[str, dict[str, torch.Tensor]] = {}
        for name, f in table.items():
            part = whole[name] if f.cat_dim is None else whole[name].chunk(tp, f.cat_dim)[rank].clone()
            number, _, rest = f.name.partition(".")
            if number == "tied_modules":
                embedding[rest.split(".")[1]] = {"weight": part}
            elif name.startswith("final_norm"):
                encoder[f"final_layernorm.{rest}"] = part
            else:
                encoder[f"layers.{int(number) - 2}.{rest}"] = part
        state = {
            "module": {"language_model": {"embedding": embedding, "encoder": encoder}}, "iteration": 5,
            "args": argparse.Namespace(**ARGS), "checkpoint_version": version,
        }
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return whole


def test_a_run_without_a_pipeline(tmp_path: Path) -> None:
    whole = no_pipeline(tmp_path / "global_step5")
    (tmp_path / "latest").write_text("global_step5")
    path = import_checkpoint(tmp_path, tmp_path / "ours", trusted=True, vocab_size=29, note=lambda _: None)
    checkpoint = open_checkpoint(path)
    assert checkpoint.step == 0 and set(checkpoint.names()) == set(whole)
    for name, tensor in whole.items():
        tensor = tensor[:29] if name == "embedding.word.weight" else tensor
        mine = checkpoint.read(name, "weight", (0,) * tensor.dim(), tuple(tensor.shape))
        assert torch.equal(mine, tensor), name


def test_old_versions_and_other_models_are_refused(tmp_path: Path) -> None:
    no_pipeline(tmp_path / "old", version=1.0)
    with pytest.raises(CheckpointError, match="checkpoint_version 1.0"):
        import_checkpoint(tmp_path / "old", tmp_path / "ours", trusted=True)
    no_pipeline(tmp_path / "new")
    other = model_from_args({**ARGS, "ffn_hidden_size": 48}, "x")
    with pytest.raises(CheckpointError, match=r"dense_h_to_4h.*\(32, 16\); the model needs \(24, 16\)"):
        import_checkpoint(tmp_path / "new", tmp_path / "ours", trusted=True, model=other)
    assert not (tmp_path / "ours").exists() and not list(tmp_path.glob(".*"))


def _twice(empty: bytes, fill: bytes, levels: int = 60) -> bytes:
    """A value of ``levels`` levels, each of which holds the one below it twice. ``%i``: the one below."""
    out = empty + b"q\x00"
    for i in range(levels):
        out += fill.replace(b"%i", b"h" + bytes([i])) + b"q" + bytes([i + 1])
    return out


LISTS = b"\x80\x02" + _twice(b"]", b"](%i%ie") + b"."
KEY = b"\x80\x02" + _twice(b")", b"%i%i\x86") + b"}h\x3cK\x01s."
NAME = b"\x80\x04" + _twice(b"]", b"](%i%ie") + b"h\x3ch\x3c\x93."
BOMBS = {
    "lists": (LISTS, "values, shared ones counted"), "a key": (KEY, "values, shared ones counted"),
    "a name": (NAME, "values, shared ones counted"),
    "deep": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "nested 100000 deep"),
    "a deep key": (b"\x80\x02})" + b"\x85" * 50_000 + b"K\x01s.", "nested 50002 deep"),
    "in itself": (b"\x80\x02]q\x00h\x00a.", "contains itself"),
    "no memo": (b"\x80\x02h\x07.", "memo 7 is not there"),
    "no stack": (b"\x80\x02a.", "stack"), "no mark": (b"\x80\x02]e.", "mark"), "no end": (b"\x80\x02]", "exhausted"),
    "nothing": (b"", "exhausted"),
}


@pytest.mark.parametrize(("data", "says"), BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_measured_before_it_is_read(data: bytes, says: str) -> None:
    """A few bytes that would take 2^60 steps to walk, hash or print, or overflow the stack: refused in no time."""
    with pytest.raises(ValueError, match=says):
        check_size(data)
    with pytest.raises(CheckpointError, match="damaged, or no metadata"):
        read_inert(data, "f")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_is_no_bomb_is_measured_right(protocol: int) -> None:
    shared = [1, 2, 3]
    value = {"a": (shared, shared), "b": [None, 2.5, {"c": "text"}], 3: b"x"}
    data = pickle.dumps(value, protocol)
    # Counted by hand: the dict, 3 keys, a tuple, two lists of 3, a list of 3, a dict of 2, bytes. Protocol 2 makes
    # bytes by a call: a name and two arguments in a tuple more.
    check_size(data, values=23 if protocol > 2 else 30)
    with pytest.raises(ValueError, match="at most 15"):
        check_size(data, values=15)
    assert read_inert(data, "f")["a"] == (shared, shared)


def test_the_child_measures_first(tmp_path: Path) -> None:
    """In a zip file and in one of old: one error, and no ten minutes of CPU. Real files pass (the tests above)."""
    files = {}
    for name, zipped in (("new.pt", True), ("old.pt", False)):
        files[name] = tmp_path / name
        torch.save({"x": torch.zeros(2)}, files[name], _use_new_zipfile_serialization=zipped)
        check_torch_file(files[name])
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w") as archive:
        archive.writestr("archive/data.pkl", LISTS)
        archive.writestr("archive/version", "3\n")
    old = files["old.pt"].read_bytes()
    start = old.rindex(b"\x80\x02", 0, old.index(b"X\x01\x00\x00\x00x"))  # of the object, fourth of five pickles
    (tmp_path / "old-bomb.pt").write_bytes(old[:start] + LISTS)
    # torch looks at the first bytes of a file: a zip file behind an old one's pickles hides nothing.
    (tmp_path / "both-bomb.pt").write_bytes((tmp_path / "old-bomb.pt").read_bytes() + files["new.pt"].read_bytes())
    for name in ("old-bomb.pt", "both-bomb.pt"):
        with pytest.raises(ValueError, match="values, shared ones counted"):
            check_torch_file(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"bomb\.pt: cannot be read: ValueError: .*values, shared ones counted"):
        read_pickles([tmp_path / "bomb.pt"], tmp_path, trusted=True)
