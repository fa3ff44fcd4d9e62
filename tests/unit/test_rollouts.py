"""Rollouts on a disk: what is written comes back, damage is named, and a run reads them in order as they come."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_policy_loss import drawn

from megatron_port.cli.main import main
from megatron_port.core.config.checks import problems
from megatron_port.core.config.loader import load
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.errors import DataError
from megatron_port.ext.objectives import rollout_files
from megatron_port.ext.objectives.policy_settings import PolicyConfig
from megatron_port.ext.objectives.rollout_files import Rollout, RolloutFile, append, files_of, from_json
from megatron_port.ext.objectives.rollout_source import RolloutDataset, group_advantages

SEQ = 12


def run_on(folder: Path, *more: str) -> Any:
    return load(None, [
        'data.source="rollouts"', f'rollouts.folder="{folder}"', 'training.loss="policy"', "training.eval_batches=0",
        f"model.seq_length={SEQ}", "model.vocab_size=11", "batch.global_batch_size=4", "batch.micro_batch_size=2",
        *more]).config


def test_what_is_appended_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    first, second = drawn(5, 1), drawn(3, 2)
    assert [append(folder, rows).name for rows in (first, second)] == [
        "000000000000.safetensors", "000000000005.safetensors"]
    found = [RolloutFile.open(path) for path in files_of(folder)]
    assert [(file.first, len(file)) for file in found] == [(0, 5), (5, 3)]
    for file, rows in zip(found, (first, second), strict=True):
        for i, given_ in enumerate(rows):
            back = file.rollout(i)
            np.testing.assert_array_equal(back.tokens, given_.tokens)
            np.testing.assert_array_equal(back.sampled.astype(bool), given_.sampled)
            np.testing.assert_array_equal(back.logprobs, np.where(given_.sampled, given_.logprobs, 0).astype("f4"))
            assert (back.reward, back.group, back.version) == (given_.reward, given_.group, given_.version)
            assert back.further.keys() == given_.further.keys()


def test_two_processes_append_without_taking_each_others_numbers(tmp_path: Path) -> None:
    threads = [threading.Thread(target=lambda seed=seed: [append(tmp_path, drawn(2, seed)) for _ in range(10)])
               for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(path.stem) for path in files_of(tmp_path)] == list(range(0, 80, 2))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("changes", "message"), [
    ({"tokens": np.array([1.0, 2.0])}, "tokens are at least two ids"),
    ({"tokens": np.array([3, -1])}, "tokens are at least two ids"),
    ({"sampled": np.array([True, True])}, "the first token is sampled"),
    ({"sampled": np.array([False])}, r"sampled has the shape \(1,\) for 2 tokens"),
    ({"logprobs": np.array([0.0, np.nan])}, "logprobs of a sampled token is not finite"),
    ({"logprobs": np.array([0.0, 0.5])}, "which is no log-probability"),
    ({"reward": float("inf")}, "the reward is inf"),
    ({"further": {"values": np.zeros(2)}}, "'values' is unknown"),
])
def test_a_damaged_rollout_is_not_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    good = Rollout(tokens=np.array([3, 4]), sampled=np.array([False, True]), logprobs=np.array([9.0, -1.0]), reward=1.0,
                   group=0)
    append(tmp_path, [good])
    with pytest.raises(DataError, match=f"rollout 1 of 2: .*{message}"):
        append(tmp_path, [good, replace(good, **changes)])
    with pytest.raises(DataError, match="the first one has"):
        append(tmp_path, [good, replace(good, further={"ref_logprobs": np.zeros(2)})])
    assert len(files_of(tmp_path)) == 1


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_named(tmp_path_factory: pytest.TempPathFactory, at: float, bit: int) -> None:
    folder = tmp_path_factory.mktemp("rollouts")
    path = append(folder, drawn(4, 3))
    whole = RolloutFile.open(path)
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path.write_bytes(data)
    try:
        found = RolloutFile.open(path)
    except DataError as error:
        assert path.name in str(error)
    else:  # a blank of the header, a letter of another key
        assert all(np.array_equal(found.tensors[name], whole.tensors[name]) for name in whole.tensors)
        assert found.tensors.keys() == whole.tensors.keys()


def test_files_of_others_and_gaps_are_named(tmp_path: Path) -> None:
    for _ in range(3):
        append(tmp_path, drawn(4, 3))
    source = RolloutDataset(run_on(tmp_path))
    assert len({source.sample(k).tokens.tobytes() for k in range(4)}) == 4
    (tmp_path / "000000000004.safetensors").unlink()
    with pytest.raises(DataError, match="rollouts 4 to 7 are missing"):
        RolloutDataset(run_on(tmp_path)).sample(5)
    with pytest.raises(DataError, match=r"has 12 rollouts, and training wants rollout 12 \(waited 0 s\)"):
        RolloutDataset(run_on(tmp_path)).sample(12)
    (tmp_path / "000000000000.safetensors").unlink()
    with pytest.raises(DataError, match="rollouts before 8 are missing"):
        RolloutDataset(run_on(tmp_path)).sample(0)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"notes.txt is no file of rollouts"):
        RolloutDataset(run_on(tmp_path)).sample(0)
    with pytest.raises(DataError, match="no folder of rollouts"):
        RolloutDataset(run_on(tmp_path / "none")).sample(0)


def test_a_file_that_says_something_else_is_named(tmp_path: Path) -> None:
    path = append(tmp_path, drawn(4, 3))
    tensors = load_file(path)
    about = {"format": "1", "rollouts": "4", "xxh3": "0"}
    for changes, said, message in (({"values": np.zeros(3)}, about, "has changed"), ({}, {}, "not readable")):
        save_file({**tensors, **changes}, path, metadata=said)
        with pytest.raises(DataError, match=message):
            RolloutFile.open(path)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("offsets", np.array([0, 1 << 62, -(1 << 62), 5, 40]), "do not divide 4 rollouts"),
    ("rewards", np.array([0.0, np.nan, 1.0, 1.0]), "a reward is not finite"),
    ("versions", np.array([0, 1, -1, 2]), "a version is below 0"),
    ("sampled", None, "the first token of a rollout is sampled"),
    ("logprobs", None, "no log-probability"),
])
def test_what_no_rollout_can_have_is_named_where_it_is_read(
    tmp_path: Path, name: str, value: np.ndarray | None, message: str
) -> None:
    """Its hash is right: the file is somebody else's."""
    path = append(tmp_path, drawn(4, 3))
    tensors = load_file(path)
    tensors[name] = np.ones_like(tensors[name]) if value is None else value
    about = {"format": "1", "rollouts": "4", "xxh3": rollout_files._digest(tensors)}
    save_file(tensors, path, metadata=about)
    with pytest.raises(DataError, match=message):
        RolloutFile.open(path)
    save_file(tensors, path, metadata={**about, "engine": "x"})
    with pytest.raises(DataError, match=r"metadata is unknown: \['engine'\]"):
        RolloutFile.open(path)
    save_file(tensors, path, metadata={**about, "rollouts": "0"})
    with pytest.raises(DataError, match="not readable"):
        append(tmp_path, drawn(2, 3))


def test_what_a_policy_needs_of_each_rollout_is_named(tmp_path: Path) -> None:
    bare = [replace(r, further={}) for r in drawn(4, 1)]
    append(tmp_path, bare)
    for setting, message in (("policy.kl=0.1", "no ref_logprobs, which policy.kl needs"),
                             ("policy.correction=2.0", "no old_logprobs, which policy.correction needs"),
                             ('policy.method="ppo"', "no advantages, which policy.method")):
        with pytest.raises(DataError, match=message):
            RolloutDataset(run_on(tmp_path, setting)).sample(0)
    side = RolloutDataset(run_on(tmp_path)).sample(0).side
    np.testing.assert_array_equal(side["old_logprobs"], side["sampled_logprobs"])


def test_steps_read_rollouts_in_order_and_the_loss_finds_what_it_needs(tmp_path: Path) -> None:
    rollouts = drawn(8, 5)
    append(tmp_path, rollouts[:6])
    append(tmp_path, rollouts[6:])
    run = run_on(tmp_path)
    batches = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True).train.step(4, 4)
    assert [batch.sample_ids for batch in batches] == [(4, 5), (6, 7)]
    advantages = np.concatenate([
        group_advantages(np.array([r.reward for r in part]), np.array([r.group for r in part]), PolicyConfig())
        for part in (rollouts[:6], rollouts[6:])])
    for batch in batches:
        assert batch.labels is not None and batch.loss_mask is not None
        for row, k in enumerate(batch.sample_ids):
            one, length = rollouts[k], len(rollouts[k].tokens) - 1
            np.testing.assert_array_equal(batch.labels[row, :length].numpy(), one.tokens[1:])
            on = batch.loss_mask[row].numpy().astype(bool)
            np.testing.assert_array_equal(on[:length], one.sampled[1:])
            assert not on[length:].any()
            np.testing.assert_allclose(batch.side["advantages"][row].numpy()[on], advantages[k])
            np.testing.assert_allclose(batch.side["share"][row].numpy().sum(), 1.0)
            np.testing.assert_array_equal(
                batch.side["old_logprobs"][row].numpy()[on], one.further["old_logprobs"][one.sampled].astype("f4"))


def test_a_step_waits_for_rollouts_that_come_in_time(tmp_path: Path) -> None:
    append(tmp_path, drawn(2, 1))
    source = RolloutDataset(run_on(tmp_path, "rollouts.wait_seconds=10"))
    late = threading.Timer(0.6, lambda: append(tmp_path, drawn(2, 2)))
    begun = time.monotonic()
    late.start()
    np.testing.assert_array_equal(source.sample(3).tokens[:4], drawn(2, 2)[1].tokens[:4])
    assert 0.4 < time.monotonic() - begun < 15
    late.join()


def test_a_rollout_that_is_too_old_or_too_long_is_named(tmp_path: Path) -> None:
    append(tmp_path, [replace(r, version=1) for r in drawn(16, 1)])
    source = RolloutDataset(run_on(tmp_path, "rollouts.max_staleness=1"))
    source.sample(11)
    with pytest.raises(DataError, match="rollout 12 was sampled by the policy of step 1, 2 steps before"):
        source.sample(12)
    with pytest.raises(DataError, match=r"rollout \d has \d+ tokens, and a sample takes 6; set model.seq_length"):
        for k in range(4):
            RolloutDataset(run_on(tmp_path, "model.seq_length=5")).sample(k)


def test_lines_of_other_engines_are_read() -> None:
    line = {"prompt_token_ids": [5, 6], "token_ids": [7, 8, 9], "logprobs": [-0.1, -0.2, -0.3], "reward": 1, "group": 4}
    found = from_json(json.dumps({**line, "advantage": 0.5, "version": 3}))
    assert found.tokens.tolist() == [5, 6, 7, 8, 9] and found.sampled.tolist() == [0, 0, 1, 1, 1]
    assert found.problem() == "" and found.version == 3
    np.testing.assert_allclose(found.further["advantages"], [0, 0, 0.5, 0.5, 0.5])
    with pytest.raises(DataError, match=r"keys are missing: \['reward'\]"):
        from_json(json.dumps({k: v for k, v in line.items() if k != "reward"}))
    for wrong, message in (([1], "a list, and no object"), ({**line, "group": 1.7}, "group has 1.7"),
                           ({**line, "token_ids": [7, 8.5, 9]}, "token_ids has 8.5"),
                           ({**line, "group": 1 << 70}, "no whole number of 64 bits")):
        with pytest.raises(DataError, match=message):
            from_json(json.dumps(wrong))
    with pytest.raises(DataError, match="a key is there twice"):
        from_json(json.dumps(line)[:-1] + ', "reward": 0}')
    with pytest.raises(DataError, match=r"keys are unknown: \['finish'\]"):
        from_json(json.dumps({**line, "finish": "stop"}))


@pytest.mark.parametrize(("more", "message"), [
    (['data.source="corpus"', "data.synthetic=true"], 'set data.source = "rollouts"'),
    (['training.loss="cross_entropy"'], "which would learn bad answers as well"),
    (["training.eval_batches=2"], "set training.eval_batches = 0"),
    (['rollouts.folder=""'], "without rollouts.folder"),
    (['training.loss="cross_entropy"', 'data.source="corpus"', "policy.kl=0.1"], "[policy] with training.loss"),
    (["policy.entropy=0.1", "activations.head_chunk=64"], "policy.entropy needs whole logits"),
    (["policy.entropy=0.1", "activations.head_chunk=-1"], "policy.entropy needs whole logits"),
    (["policy.longest_answer=9"], "policy.longest_answer is dr_grpo's"),
    (['policy.method="dr_grpo"', "policy.advantage_epsilon=0.1"], "policy.advantage_epsilon"),
    (["rollouts.wait_seconds=60"], "set watch.data_seconds to as much"),
    (["policy.clip_low=-1"], "policy.clip_low"),
])
def test_settings_that_contradict_one_another_are_named(tmp_path: Path, more: list[str], message: str) -> None:
    assert not problems(run_on(tmp_path))
    assert any(message in text for text in problems(run_on(tmp_path, *more)))


def test_the_command_adds_lines_and_shows_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-0.1, -0.2], "reward": 1.0, "group": 0}
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(json.dumps({**line, "reward": r}) + "\n\n" for r in (1.0, 0.0)))
    bad.write_text(json.dumps(line) + "\n" + json.dumps({**line, "logprobs": [-0.1]}) + "\n")
    folder = str(tmp_path / "rollouts")
    assert main(["data", "rollouts", folder, "--add", str(good), "--json"]) == 0
    (fact,) = json.loads(capsys.readouterr().out)
    assert fact == {"file": "000000000000.safetensors", "rollouts": 2, "groups": 1, "sampled_tokens": 4,
                    "mean_reward": 0.5, "version": "0", "further": ""}
    assert main(["data", "rollouts", folder, "--add", str(bad)]) == 4
    assert f"{bad}:2: logprobs has the shape (3,) for 4 tokens" in capsys.readouterr().err
    assert main(["data", "rollouts", folder]) == 0
    assert "sampled tokens" in capsys.readouterr().out
