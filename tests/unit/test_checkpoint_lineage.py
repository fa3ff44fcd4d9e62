"""The order of commits, whose temporaries are whose, and what an attempt that was taken over may not do any more."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from test_checkpoint_roundtrip import state, whole

from megatron_port.cli.main import main
from megatron_port.core.checkpoint import writer
from megatron_port.core.checkpoint.format import Lineage, Parent, encode_manifest, read_manifest
from megatron_port.core.checkpoint.reader import checkpoints_in, find_latest, open_checkpoint
from megatron_port.core.checkpoint.writer import Committer, Peers, save_checkpoint
from megatron_port.core.dist.rank import Fence, LeaseLost
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint
from megatron_port.ext.storage.background import BackgroundSave


class Attempt(Fence):
    """A fence whose attempt is taken over when the test says so."""

    def __init__(self, epoch: int, run: str = "r1") -> None:
        super().__init__(epoch, f"{epoch}.0")
        self.run, self.over, self.checks = run, False, 0
        self.allowed = 1 << 30
        """Looks that still find nothing."""

    @property
    def lost(self) -> bool:
        return self.over

    def check(self) -> None:
        self.checks += 1
        if self.over or self.checks > self.allowed:
            self.over = True
            raise LeaseLost("taken over by epoch 9")


def save(folder: Path, step: int, committer: Committer | None = None, keep: int = 0, value: float = 0.0) -> Path:
    return save_checkpoint(folder, state(step), [whole("w", torch.full((4,), value))], keep=keep, committer=committer)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "latest")


def older_version(at: Path, **changes: object) -> None:
    """Rewrite a manifest as a version without commit numbers wrote it."""
    body = json.loads((at / "manifest.json").read_text())["manifest"] | changes
    del body["lineage"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    (at / "manifest.json").write_text(f'{{"hash":"{digest}",\n"manifest":{text}}}\n')


def test_a_clock_that_is_set_back_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three resumes after the clock went back an hour: each begins at the newest commit, which retention keeps."""
    now = [1_800_000_000.0]
    monkeypatch.setattr(writer.time, "time", lambda: now[0])  # type: ignore[attr-defined]
    save(tmp_path, 10, Committer(Attempt(1)), keep=2)
    now[0] -= 3600
    for epoch, step in ((2, 20), (3, 30), (4, 40)):
        committer = Committer(Attempt(epoch))
        found = open_checkpoint(find_latest(tmp_path) or "")
        assert found.step == step - 10
        committer.resumed(found.manifest.lineage, found.step)
        save(tmp_path, step, committer, keep=2)
        now[0] -= 1
        made = read_manifest(tmp_path / f"step-{step:08d}").lineage
        assert made == Lineage(
            run="r1", commit=epoch, epoch=epoch, attempt=f"{epoch}.0",
            parent=Parent(run="r1", commit=epoch - 1, step=step - 10),
        )
    assert names(tmp_path) == ["step-00000030", "step-00000040"]
    assert (tmp_path / "latest").read_text() == "step-00000040\n"


def test_numbers_rise_within_an_attempt_and_over_going_back(tmp_path: Path) -> None:
    """A run that went back to step 10 commits after, not before, the step 30 that is still there."""
    committer = Committer(Attempt(1))
    for step in (10, 20, 30):
        save(tmp_path, step, committer)
    again = Committer(Attempt(2))
    again.resumed(read_manifest(tmp_path / "step-00000010").lineage, 10)
    save(tmp_path, 20, again, value=1.0)
    assert find_latest(tmp_path) == tmp_path / "step-00000020"
    lineage = read_manifest(tmp_path / "step-00000020").lineage
    assert lineage.commit == 4 and lineage.parent == Parent(run="r1", commit=1, step=10)
    save(tmp_path, 25, again)
    assert read_manifest(tmp_path / "step-00000025").lineage.parent == Parent(run="r1", commit=4, step=20)
    assert [path.name for path, _ in checkpoints_in(tmp_path)] == [f"step-{n:08d}" for n in (25, 20, 30, 10)]


def test_of_two_with_one_number_the_later_epoch_is_newer(tmp_path: Path) -> None:
    """An attempt that was taken over slipped a commit in before it looked."""
    save(tmp_path, 50, Committer(Attempt(1)))
    save(tmp_path, 40, Committer(Attempt(2)))
    at = tmp_path / "step-00000040"
    manifest = read_manifest(at)
    twin = replace(manifest, lineage=replace(manifest.lineage, commit=1))
    (at / "manifest.json").write_text(encode_manifest(twin))
    assert find_latest(tmp_path) == at


def test_checkpoints_without_numbers_come_before_all_others_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (30, 10, 20):
        save(tmp_path, step)
        older_version(tmp_path / f"step-{step:08d}", saved_at=1e9 - step)
    assert [path.name[-2:] for path, _ in checkpoints_in(tmp_path)] == ["30", "20", "10"]
    save(tmp_path, 15, Committer(Attempt(1)), keep=3)
    assert [path.name[-2:] for path, _ in checkpoints_in(tmp_path)] == ["15", "30", "20"]
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0][-2:] for line in lines if line.startswith("step-")] == ["15", "30", "20"]


@pytest.mark.parametrize("wrong", [[], "x", {"commit": -1}, {"commit": True}, {"run": 3}, {"parent": 1},
                                   {"parent": {"step": "a"}}, {"run": "x" * 300}])
def test_a_lineage_of_the_wrong_type_is_damage(tmp_path: Path, wrong: object) -> None:
    at = save(tmp_path, 1)
    body = json.loads((at / "manifest.json").read_text())["manifest"] | {"lineage": wrong}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    (at / "manifest.json").write_text(f'{{"hash":"{digest}",\n"manifest":{text}}}\n')
    with pytest.raises(DamagedCheckpoint, match="lineage"):
        read_manifest(at)


def test_only_temporaries_of_dead_attempts_are_removed(tmp_path: Path) -> None:
    """A second start used to remove the live ``step-*.tmp`` of the first."""
    for name in ("step-00000001.tmp", "step-00000002.e2.tmp", "step-00000003.e3.tmp", "step-00000004.e4.tmp",
                 "mine.tmp", "step-00000005.e.tmp"):
        (tmp_path / name).mkdir()
    save(tmp_path, 9)  # without a lease: no attempt's
    assert {"step-00000002.e2.tmp", "step-00000003.e3.tmp", "step-00000004.e4.tmp"} <= set(names(tmp_path))
    assert "step-00000001.tmp" not in names(tmp_path)
    save(tmp_path, 10, Committer(Attempt(3)))
    assert names(tmp_path) == ["mine.tmp", "step-00000004.e4.tmp", "step-00000005.e.tmp", "step-00000009",
                               "step-00000010"]


def test_the_temporary_carries_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = writer.commit
    monkeypatch.setattr(writer, "commit", lambda work, *rest: (seen.append(work.name), real(work, *rest))[1])
    save(tmp_path, 10, Committer(Attempt(7)))
    assert seen == ["step-00000010.e7.tmp"]


def test_an_attempt_that_was_taken_over_changes_nothing(tmp_path: Path) -> None:
    """At whichever look it learns of it: no commit after it, no deletion, and the other's work is left alone."""
    committed = 0
    for allowed in range(12):
        folder = tmp_path / str(allowed)
        for step in (10, 20):
            save(folder, step, Committer(Attempt(1)), keep=2)
        other = folder / "step-00000030.e9.tmp"
        other.mkdir()
        attempt = Attempt(2)
        attempt.allowed = allowed
        try:
            save(folder, 30, Committer(attempt), keep=2)
            committed += 1
        except CheckpointError as error:
            assert "taken over by epoch 9" in str(error)
            assert names(folder) == ["step-00000010", "step-00000020", "step-00000030.e9.tmp"]
            assert (folder / "latest").read_text() == "step-00000020\n"
            continue
        assert other.is_dir() and (folder / "step-00000030").is_dir()
        if attempt.over:  # learned of it after the commit: retention may not follow
            assert {"step-00000010", "step-00000020"} <= set(names(folder))
        else:
            assert "step-00000010" not in names(folder) and attempt.checks >= 5
            break
    else:
        raise AssertionError("it never got through")
    assert committed >= 2


def test_a_commit_fails_in_the_file_system_once_a_later_attempt_has_cleaned_up(tmp_path: Path) -> None:
    """Also where the old attempt's look is answered from a cache that knows nothing of the new one."""
    save(tmp_path, 10, Committer(Attempt(1)))
    stale, real = Committer(Attempt(1)), os.rename

    def takes_over(a: Path, b: Path) -> None:
        if str(a).endswith(".e1.tmp"):
            os.rename = real  # type: ignore[assignment]
            save(tmp_path, 15, Committer(Attempt(2)))
        real(a, b)

    os.rename = takes_over  # type: ignore[assignment]
    try:
        with pytest.raises(CheckpointError, match="No such file"):
            save(tmp_path, 20, stale)
    finally:
        os.rename = real  # type: ignore[assignment]
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_retention_leaves_other_runs_alone(tmp_path: Path) -> None:
    save(tmp_path, 10, Committer(Attempt(1, run="other")))
    committer = Committer(Attempt(2, run="mine"))
    for step in (20, 30, 40):
        save(tmp_path, step, committer, keep=1)
    assert names(tmp_path) == ["step-00000010", "step-00000040"]


def test_a_save_in_the_background_is_fenced_too(tmp_path: Path) -> None:
    attempt = Attempt(3)
    saver = BackgroundSave(Peers(), tmp_path, keep=1, committer=Committer(attempt))
    saver.start(state(1), [whole("w", torch.ones(4))])
    done = saver.finish()
    assert done is not None and done.failure is None and read_manifest(done.path).lineage.epoch == 3
    attempt.over = True
    saver.start(state(2), [whole("w", torch.ones(4))])
    done = saver.finish()
    assert done is not None and "taken over by epoch 9" in (done.failure or "")
    assert names(tmp_path) == ["step-00000001"]
