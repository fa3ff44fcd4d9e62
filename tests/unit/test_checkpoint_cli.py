"""``checkpoint list | show | rm | verify | diff``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch

from megatron_port.cli import checkpoint as checkpoint_diff
from megatron_port.cli import checkpoint as command
from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import LayoutConfig, OptimizerConfig, RunConfig
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError, ConfigError


def save(folder: Path, step: int, config: RunConfig | None = None, **tensors: torch.Tensor) -> Path:
    config = config or RunConfig()
    state = SavedState(
        step=step, samples=step * 8, tokens=step * 512, layout=config.layout, config=as_dict(config), scalars={},
        extra={},
    )
    return save_checkpoint(folder, state, [
        StatePiece(name, kind, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), 0, t.reshape(-1) * scale)
        for name, t in tensors.items()
        for kind, scale in (("weight", 1.0), ("exp_avg", 0.5))
    ])


def call(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["checkpoint", *map(str, argv)])
    return int(args.act(args))


def test_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "checkpoints", 5, w=torch.ones(30, 40))
    broken = save(tmp_path / "checkpoints", 6, w=torch.ones(30, 40))
    (broken / "rank-00000.safetensors").unlink()
    assert call("ls", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:5] == ["step-00000005", "40", "2,560", "1,200", "1"]
    assert lines[2].startswith("step-00000006") and "broken" in lines[2]
    assert call("ls", broken) == 5
    with pytest.raises(ConfigError, match="neither the folder of a run, nor a run file, nor the name of a shipped"):
        call("ls", tmp_path / "elsewhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        call("ls", tmp_path / "empty")


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = save(tmp_path, 5, w=torch.ones(3))
    assert call("verify", at) == 0
    assert call("verify", tmp_path) == 0
    data = bytearray((at / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (at / "rank-00000.safetensors").write_bytes(data)
    assert call("verify", tmp_path) == 5
    out = capsys.readouterr().out
    assert "DAMAGED" in out and "block 0 (bytes 0 to " in out and "damaged is exp_avg of w\n" in out, out


def test_ls_says_layout_and_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(layout=LayoutConfig(tensor_parallel_size=2, data_parallel_size=4))
    save(tmp_path, 5, config=config, w=torch.ones(3))
    assert call("ls", tmp_path) == 0
    out = capsys.readouterr().out
    assert "whole   tp 2 pp 1 dp 4 zero 1 native bf16" in out and re.search(r" \d s  20\d\d-", out), out


def test_diff_names_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a", 5, w=torch.ones(3))
    save(tmp_path / "b", 5, config=RunConfig(seed=7, optimizer=OptimizerConfig(lr=0.5)), w=torch.ones(3))
    assert call("diff", tmp_path / "a", tmp_path / "b") == 0  # the tensors are equal
    out = capsys.readouterr().out
    assert re.search(r"config\.seed +1234 in A, 7 in B", out) and re.search(r"config\.optimizer\.lr +0\.0003 in A", out)
    assert "config.model" not in out


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_diff, "_SLAB", 8)
    w = torch.arange(20.0).reshape(5, 4)
    save(tmp_path / "a", 5, w=w, v=torch.tensor([1.0, float("nan"), float("inf")]))
    save(tmp_path / "b", 6, w=w, v=torch.tensor([1.0, float("nan"), float("inf")]))
    assert call("diff", tmp_path / "a", tmp_path / "b") == 0
    assert "0 of 2 tensors differ" in capsys.readouterr().out
    assert call("diff", tmp_path / "a", tmp_path / "b", "--kind", "all") == 0

    changed = w.clone()
    changed[4, 3] += 0.25
    c = save(tmp_path / "c", 5, w=changed, v=torch.tensor([1.0, 2.0, float("inf")]), u=torch.ones(1))
    capsys.readouterr()
    assert call("diff", tmp_path / "a", c) == 1
    out = capsys.readouterr().out
    assert "max |a - b| 2.500e-01 (1 of 20 elements)" in out
    assert "max |a - b| inf (1 of 3 elements)" in out
    assert "only in B" in out and "3 of 3 tensors differ" in out

    d = save(tmp_path / "d", 5, w=changed, v=torch.tensor([1.0, float("nan"), float("inf")]))
    assert call("diff", tmp_path / "a", d, "--tolerance", "0.25") == 0
    assert call("diff", tmp_path / "a", d, "--tolerance", "0.2") == 1
    e = save(tmp_path / "e", 5, w=w.reshape(4, 5), v=torch.ones(3))
    assert call("diff", tmp_path / "a", e) == 1
    assert "shape (5, 4) in A, (4, 5) in B" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="neither"):
        call("diff", tmp_path / "a", d, "--kind", "exp_avg_sq")
    with pytest.raises(ConfigError, match="neither the folder of a run"):
        call("diff", tmp_path / "a", tmp_path / "none")
