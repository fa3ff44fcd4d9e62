"""Written by one layout, read by another, over ranks that are threads."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import find_latest, open_checkpoint
from megatron_port.core.checkpoint.writer import Peers, save_checkpoint
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError

Shape = tuple[int, ...]


def state(step: int = 1, **extra: object) -> SavedState:
    return SavedState(
        step=step, samples=8 * step, tokens=64 * step, layout={"tp": 2}, config=RunConfig(),
        scalars={"step": step, "loss_scale": 0.1}, extra=extra,
    )


def whole(name: str, tensor: torch.Tensor, kind: str = "weight") -> StatePiece:
    shape = tuple(tensor.shape)
    return StatePiece(name, kind, shape, (0,) * len(shape), shape, 0, tensor.reshape(-1))


class ThreadPeers(Peers):
    """Ranks of one process; each stage ends at a barrier, as an all-reduce does."""

    def __init__(
        self, rank: int, board: list[str | None], barrier: threading.Barrier, sums: list[list[int]]
    ) -> None:
        self.rank, self.world_size, self._board, self._barrier = rank, len(board), board, barrier
        self._sums = sums

    def first_failure(self, message: str | None) -> str | None:
        self._board[self.rank] = message
        self._barrier.wait(30)
        first = next((m for m in self._board if m is not None), None)
        self._barrier.wait(30)
        return first

    def maximum(self, values: Sequence[int]) -> list[int]:
        mine = self._sums[self.rank]
        mine[:] = values
        self._barrier.wait(30)
        most = [max(column) for column in zip(*self._sums)]
        self._barrier.wait(30)
        return most


def over_threads(world: int, action: Callable[[ThreadPeers], Any]) -> list[Any]:
    """Results or exceptions of all ranks."""
    board: list[str | None] = [None] * world
    barrier = threading.Barrier(world)
    sums: list[list[int]] = [[] for _ in range(world)]

    def one(rank: int) -> Any:
        try:
            return action(ThreadPeers(rank, board, barrier, sums))
        except Exception as error:  # handed back for the assertions
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Shape, Shape]]:
    """Boxes that tile ``shape``: repeated cuts of a random box along a random dimension."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        i = draw(st.integers(0, len(boxes) - 1))
        d = draw(st.integers(0, len(shape) - 1))
        offset, size = boxes[i]
        if size[d] < 2:
            continue
        cut = draw(st.integers(1, size[d] - 1))
        low, high = list(size), list(size)
        low[d], high[d] = cut, size[d] - cut
        moved = list(offset)
        moved[d] += cut
        boxes[i] = (offset, tuple(low))
        boxes.append((tuple(moved), tuple(high)))
    return boxes


def pieces_of(
    name: str, kind: str, tensor: torch.Tensor, boxes: Sequence[tuple[Shape, Shape]], draw: Callable[..., Any]
) -> list[StatePiece]:
    """Each box cut into random flat ranges, as ZeRO cuts a rank's slice."""
    out = []
    for offset, size in boxes:
        flat = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size))].reshape(-1)
        cuts = sorted({0, flat.numel(), *draw(st.lists(st.integers(0, flat.numel()), max_size=2))})
        out += [
            StatePiece(name, kind, tuple(tensor.shape), offset, size, a, flat[a:b]) for a, b in pairwise(cuts)
        ]
    return out


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_reads_any_layout(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("c")
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    pieces: list[StatePiece] = []
    for i in range(data.draw(st.integers(1, 2))):
        shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
        moment = data.draw(st.sampled_from([torch.bfloat16, torch.float64]))
        for kind, dtype in (("weight", torch.float32), ("exp_avg", moment)):
            tensor = torch.arange(prod(shape), dtype=dtype).reshape(shape) + 1
            tensors[f"p{i}", kind] = tensor
            pieces += pieces_of(f"p{i}", kind, tensor, data.draw(tilings(shape)), data.draw)
    world = data.draw(st.integers(1, 3))
    owner = [data.draw(st.integers(0, world - 1)) for _ in pieces]
    results = over_threads(
        world,
        lambda peers: save_checkpoint(
            folder, state(), [p for p, o in zip(pieces, owner) if o == peers.rank], peers=peers
        ),
    )
    assert results == [folder / "step-00000001"] * world
    with_hash = open_checkpoint(folder / "step-00000001")
    with_hash.verify()
    for (name, kind), tensor in tensors.items():
        assert with_hash.shape(name, kind) == tuple(tensor.shape)
        for offset, size in data.draw(tilings(tuple(tensor.shape))):
            got = with_hash.read(name, kind, offset, size)
            want = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size))]
            assert got.dtype == want.dtype and torch.equal(got, want)
            place = torch.zeros(size, dtype=want.dtype)
            assert with_hash.read(name, kind, offset, size, out=place) is place and torch.equal(place, want)


def test_a_place_that_does_not_fit_is_left_alone(tmp_path: Path) -> None:
    """Another dtype or shape, strides, another device: the box comes in a tensor of its own."""
    w = torch.arange(12.0).reshape(3, 4)
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, state(), [whole("w", w)]))
    row = torch.nn.Parameter(torch.zeros(3, 4))
    assert checkpoint.read("w", "weight", (0, 0), (3, 4), out=row) is row and torch.equal(row.detach(), w)
    for place in (
        torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, 3), torch.zeros(12), torch.zeros(4, 3).t(),
        torch.zeros(1, 1).expand(3, 4), torch.zeros(3, 4, device="meta"),
    ):
        got = checkpoint.read("w", "weight", (0, 0), (3, 4), out=place)
        assert got is not place and torch.equal(got, w) and got.dtype == w.dtype
        assert place.is_meta or not place.any()


def test_experts_of_predictions_have_the_names_of_before_0_3(tmp_path: Path) -> None:
    """Saved as layers after the last; read by the names that they have now. Nothing else is renamed."""
    now = {
        "layers.2.mlp.up.weight": "mtp.0.layer.mlp.up.weight",
        "layers.3.mlp.router.weight": "mtp.1.layer.mlp.router.weight",
        "layers.1.mlp.up.weight": "layers.1.mlp.up.weight", "layers.4.mlp.up.weight": "layers.4.mlp.up.weight",
    }
    values = {name: torch.full((3,), float(i)) for i, name in enumerate(now)}
    for modules, names in ((2, now), (0, dict(zip(now, now)))):
        config = {"model": {"num_layers": 2, "mtp_layers": modules}}
        folder = tmp_path / str(modules)
        save_checkpoint(folder, replace(state(), config=config), [whole(name, value) for name, value in values.items()])
        checkpoint = open_checkpoint(folder / "step-00000001")
        for old, new in names.items():
            assert torch.equal(checkpoint.read(new, "weight", (0,), (3,)), values[old])


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    tensor = torch.randn(3, 5)
    at = save_checkpoint(tmp_path, state(), [whole("w", tensor), whole("b", tensor[0].to(torch.bfloat16))])
    loaded = load_file(at / "rank-00000.safetensors")
    assert torch.equal(loaded["weight/w@0"], tensor.reshape(-1))
    assert torch.equal(loaded["weight/b@0"], tensor[0].to(torch.bfloat16))


def test_state_comes_back(tmp_path: Path) -> None:
    at = save_checkpoint(tmp_path, state(12, loader={"epoch": 1, "at": [3, 4]}), [whole("w", torch.ones(2))])
    checkpoint = open_checkpoint(at)
    assert at.name == "step-00000012" and checkpoint.step == 12
    assert checkpoint.scalars == {"step": 12, "loss_scale": 0.1}
    assert checkpoint.extra == {"loader": {"epoch": 1, "at": [3, 4]}}
    saved = checkpoint.manifest.state
    assert (saved.samples, saved.tokens, saved.layout) == (96, 768, {"tp": 2})
    assert saved.config["model"]["hidden_size"] == RunConfig().model.hidden_size
    assert "torch" in checkpoint.manifest.versions
    assert sorted(p.name for p in at.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert (tmp_path / "latest").read_text() == "step-00000012\n"


def test_vocabulary_padding_is_not_saved(tmp_path: Path) -> None:
    """A 10-row table cut over 4 ranks of 4 padded rows (the last has none) and over one: the same content."""
    table = torch.randn(10, 3)
    cut = [
        StatePiece("e", "weight", (10, 3), (min(4 * r, 10), 0), (max(0, min(4, 10 - 4 * r)), 3), 0,
                   table[4 * r : 4 * r + 4].reshape(-1))
        for r in range(4)
    ]
    over_threads(4, lambda peers: save_checkpoint(tmp_path / "a", state(), [cut[peers.rank]], peers=peers))
    save_checkpoint(tmp_path / "b", state(), [whole("e", table)])
    a, b = (open_checkpoint(find_latest(tmp_path / d) or "") for d in "ab")
    assert torch.equal(a.read("e", "weight", (0, 0), (10, 3)), b.read("e", "weight", (0, 0), (10, 3)))
    assert sum(p.numel for p in a.manifest.pieces) == 30
    assert len(a.manifest.files) == 3


def test_a_failing_rank_fails_all_with_one_message(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), [whole("w", torch.ones(4))])

    def act(peers: ThreadPeers) -> object:
        dtype = torch.int64 if peers.rank == 1 else torch.float32
        half = StatePiece("w", "weight", (4,), (2 * peers.rank,), (2,), 0, torch.ones(2, dtype=dtype))
        return save_checkpoint(tmp_path, state(2), [half], peers=peers)

    errors = over_threads(2, act)
    assert all(isinstance(e, CheckpointError) for e in errors)
    assert str(errors[0]) == str(errors[1]) and "rank 1 on" in str(errors[0]) and "int64" in str(errors[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_a_bug_on_one_rank_does_not_hang_the_others(tmp_path: Path) -> None:
    def act(peers: ThreadPeers) -> object:
        if peers.rank == 1:
            return save_checkpoint(tmp_path, state(), iter(int, 1), peers=peers)  # type: ignore[arg-type]
        return save_checkpoint(tmp_path, state(), [whole("w", torch.ones(4))], peers=peers)

    errors = over_threads(2, act)
    assert isinstance(errors[0], CheckpointError) and "AttributeError" in str(errors[0])
    assert isinstance(errors[1], AttributeError)


def test_disks_that_are_not_shared(tmp_path: Path) -> None:
    def act(peers: ThreadPeers) -> object:
        return save_checkpoint(
            tmp_path / f"node{peers.rank}", state(), [whole("w", torch.ones(4))], peers=peers, visible_seconds=0
        )

    for error in over_threads(2, act):
        assert isinstance(error, CheckpointError) and "share" in str(error) and "output_dir" in str(error)


def test_a_stale_directory_on_another_disk_is_seen_through(tmp_path: Path) -> None:
    (tmp_path / "node1" / "step-00000001.tmp").mkdir(parents=True)

    def act(peers: ThreadPeers) -> object:
        half = StatePiece("w", "weight", (4,), (2 * peers.rank,), (2,), 0, torch.ones(2))
        return save_checkpoint(tmp_path / f"node{peers.rank}", state(), [half], peers=peers, visible_seconds=0)

    for error in over_threads(2, act):
        assert isinstance(error, CheckpointError) and "1 of 2 ranks (first: rank 1)" in str(error)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([StatePiece("w", "weight", (4,), (0,), (4,), 0, torch.ones(3))], "3 of 4"),
        ([whole("w", torch.ones(4)), whole("w", torch.ones(4))], "overlap"),
        ([whole("w", torch.ones(4)), *(whole("v", torch.ones(4), k) for k in ("weight", "m"))], "w lacks m"),
        ([StatePiece("w", "weight", (4,), (0,), (5,), 0, torch.ones(5))], "leaves the tensor"),
    ],
)
def test_an_incomplete_state_is_not_committed(tmp_path: Path, pieces: list[StatePiece], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        save_checkpoint(tmp_path, state(), pieces)
    assert find_latest(tmp_path) is None


def test_expected_parameters(tmp_path: Path) -> None:
    pieces = [whole("w", torch.ones(4))]
    with pytest.raises(CheckpointError, match=r"no rank saved v \(1 of 2"):
        save_checkpoint(tmp_path, state(), pieces, expected={"w": (4,), "v": (4,)})
    with pytest.raises(CheckpointError, match=r"\(4,\); the model has \(5,\)"):
        save_checkpoint(tmp_path, state(), pieces, expected={"w": (5,)})
    save_checkpoint(tmp_path, state(), pieces, expected={"w": (4,)})


def test_state_that_json_does_not_hold(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rng.*Tensor"):
        save_checkpoint(tmp_path, state(rng=torch.ones(1)), [whole("w", torch.ones(4))])


def test_disk_full_names_path_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, state(1), [whole("w", torch.ones(4))])

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        save_checkpoint(tmp_path, state(2), [whole("w", torch.ones(1000))])
    monkeypatch.undo()
    assert "step-00000002" in str(caught.value) and "free " in str(caught.value)
    assert find_latest(tmp_path) == tmp_path / "step-00000001"


def test_retention_and_leftovers(tmp_path: Path) -> None:
    (tmp_path / "step-00000003.tmp").mkdir()
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / ".latest.0123456789abcdef.tmp").write_text("step-000")  # killed before it had its name
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, state(step), [whole("w", torch.ones(4))], keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "mine.tmp", "step-00000003", "step-00000004"]
    # Resumed from an older step: what was saved last stays and is the newest, whatever its number.
    save_checkpoint(tmp_path, state(2), [whole("w", torch.ones(4))], keep=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert find_latest(tmp_path) == tmp_path / "step-00000002"


def test_saving_a_step_again_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, state(1), [whole("w", torch.zeros(4))])
    at = save_checkpoint(tmp_path, state(1), [whole("w", torch.ones(4))])
    assert torch.equal(open_checkpoint(at).read("w", "weight", (0,), (4,)), torch.ones(4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]

    # Killed between the two renames: the old one is still found.
    rename = os.rename

    def killed(a: Path, b: Path) -> None:
        if str(a).endswith(".tmp"):
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, state(1), [whole("w", torch.full((4,), 2.0))])
    monkeypatch.undo()
    kept = find_latest(tmp_path)
    assert kept is not None and torch.equal(open_checkpoint(kept).read("w", "weight", (0,), (4,)), torch.ones(4))
    save_checkpoint(tmp_path, state(1), [whole("w", torch.full((4,), 3.0))])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the save at its n-th durable call, for every n: what is found is whole, and old or new."""
    calls = ("fsync", "rename", "replace")
    real = {name: getattr(os, name) for name in calls}
    for stop in range(100):
        folder = tmp_path / str(stop)
        save_checkpoint(folder, state(1), [whole("w", torch.zeros(4))])
        allowed = iter(range(stop))

        def call(name: str, *args: object, allowed: Iterator[int] = allowed) -> object:
            if next(allowed, None) is None:
                raise SystemExit
            return real[name](*args)

        for name in calls:
            monkeypatch.setattr(os, name, partial(call, name))
        # The tidying after a failure does not run when a process is killed.
        monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        ended = False
        try:
            save_checkpoint(folder, state(2), [whole("w", torch.ones(4))])
            ended = True
        except SystemExit:
            pass
        monkeypatch.undo()
        at = find_latest(folder)
        assert at is not None
        checkpoint = open_checkpoint(at)
        assert checkpoint.read("w", "weight", (0,), (4,)).unique().tolist() == [float(checkpoint.step - 1)]
        if ended:
            assert checkpoint.step == 2 and stop > 5
            return
    raise AssertionError("the save never ended")
