"""Rollouts as a run's data: sample k of the run is rollout k of the folder, which may grow meanwhile.

So a run that is resumed, on whatever layout, reads the same rollouts at the same steps; its only state is the number of
consumed samples. Advantages are made here, of whole groups, wherever their rollouts go to.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.dataset import Sample
from megatron_port.core.errors import DataError
from megatron_port.ext.objectives.policy_settings import PolicyConfig, policy_of, rollouts_of
from megatron_port.ext.objectives.rollout_files import Rollout, RolloutFile, files_of

SHARE, ADVANTAGES, SAMPLED, OLD, REFERENCE, REWARD = (
    "share", "advantages", "sampled_logprobs", "old_logprobs", "ref_logprobs", "reward")
"""Side tensors of a policy's loss, [batch, seq] by label, 0 where the label was not sampled: its share of its answer
(1 / sampled tokens), and the others as ``rollout_files`` has them, with the answer's reward at each label."""
POLL_SECONDS = 0.2


def group_advantages(rewards: np.ndarray, groups: np.ndarray, settings: PolicyConfig) -> np.ndarray:
    """Return each rollout's advantage, float64 [n]: its reward less its group's mean, which methods other than dr_grpo
    divide by the group's standard deviation (that of a sample, n - 1) plus ``advantage_epsilon``. 0 in groups of one.
    """
    _, place = np.unique(groups, return_inverse=True)
    sizes = np.bincount(place).astype(np.float64)
    centred = rewards - (np.bincount(place, rewards) / sizes)[place]
    if settings.method == "dr_grpo":
        return centred
    deviation = np.sqrt(np.bincount(place, centred**2) / np.maximum(sizes - 1, 1))[place]
    scale = deviation + settings.advantage_epsilon
    found: np.ndarray = np.divide(centred, scale, out=np.zeros_like(centred), where=scale > 0)
    return found


def labels_of(rollout: Rollout, advantage: float, seq_length: int) -> Sample:
    """Return a rollout as a sample, filled up to ``seq_length`` with ids 0 that do not count.

    The label of position i is token i + 1, so that arrays by token lose their first entry. Where the trainer's own
    log-probabilities are not given, those of what sampled stand for them.
    """
    length = len(rollout.tokens) - 1
    tokens = np.zeros(seq_length + 1, dtype=np.int64)
    tokens[: length + 1] = rollout.tokens
    counted = np.zeros(seq_length, dtype=bool)
    counted[:length] = rollout.sampled[1:]

    def by_label(values: np.ndarray | float, dtype: type = np.float32) -> np.ndarray:
        """Return values of tokens, or one value, at the labels that were sampled."""
        found: np.ndarray = np.zeros(seq_length, dtype=dtype)
        found[:length] = values if np.ndim(values) == 0 else np.asarray(values)[1:]
        return np.where(counted, found, 0)

    given, number = rollout.further, int(counted.sum())
    side = {SHARE: by_label(1.0 / max(number, 1), np.float64), SAMPLED: by_label(rollout.logprobs),
            OLD: by_label(given.get(OLD, rollout.logprobs)), REWARD: by_label(rollout.reward, np.float64),
            ADVANTAGES: by_label(given.get("advantages", advantage), np.float64)}
    if REFERENCE in given:
        side[REFERENCE] = by_label(given[REFERENCE])
    return Sample(tokens, counted=counted, side=side)


class RolloutDataset:
    """Rollouts of a folder in order; a ``corpora.plugin_source.PluginDataset``.

    ``seed`` and epochs have no meaning here: each rollout is trained on at one step of the run.
    """

    masked = True

    def __init__(self, run: RunConfig) -> None:
        self.settings, self.policy = rollouts_of(run), policy_of(run)
        self.folder, self.seq_length = Path(self.settings.folder), run.model.seq_length
        self.batch = run.batch.global_batch_size
        self._files: list[Path] = []
        self._open = lru_cache(maxsize=4)(self._read)

    def __len__(self) -> int:
        return 1 << 62

    def _read(self, path: Path) -> tuple[RolloutFile, np.ndarray]:
        found = RolloutFile.open(path)
        return found, group_advantages(found.tensors["rewards"], found.tensors["groups"], self.policy)

    def _file_of(self, number: int) -> tuple[RolloutFile, np.ndarray]:
        """Return the file of a rollout and its advantages, after waiting for it where it is not there yet.

        Raises:
            DataError: a file before it is missing, or it has not come in time.
        """
        until = time.monotonic() + self.settings.wait_seconds
        while True:
            earlier = [path for path in self._files if int(path.stem) <= number]
            end, problem = 0, f"rollouts before {int(self._files[0].stem)} are missing" if self._files else ""
            if earlier:
                found = self._open(earlier[-1])
                end = found[0].first + len(found[0])
                if number < end:
                    return found
                after = self._files[len(earlier)] if len(earlier) < len(self._files) else None
                problem = "" if after is None else f"rollouts {end} to {int(after.stem) - 1} are missing"
            known, self._files = self._files, files_of(self.folder)
            if self._files != known:
                continue
            if time.monotonic() < until:  # another machine's files may be seen one before the other
                time.sleep(POLL_SECONDS)
                continue
            if problem:
                raise DataError(f"{self.folder}: {problem}; copy the folder again, whole")
            raise DataError(
                f"{self.folder}: has {end} rollouts, and training wants rollout {number} (waited "
                f"{self.settings.wait_seconds:g} s); sample more, set training.steps lower, or "
                "rollouts.wait_seconds higher")

    def sample(self, index: int) -> Sample:
        """Return rollout ``index``.

        Raises:
            DataError: it is damaged, missing, too long, too old, or lacks what the policy's settings need.
        """
        file, advantages = self._file_of(index)
        at = index - file.first
        rollout = file.rollout(at)
        if len(rollout.tokens) > self.seq_length + 1:
            raise DataError(f"{file.path}: rollout {index} has {len(rollout.tokens)} tokens, and a sample takes "
                            f"{self.seq_length + 1}; set model.seq_length, or sample shorter answers")
        age, limit = index // self.batch - rollout.version, self.settings.max_staleness
        if limit and age < 0:
            raise DataError(f"{file.path}: rollout {index} was sampled by the policy of step {rollout.version}, and "
                            f"step {index // self.batch} trains on it; these are another run's rollouts")
        if limit and age > limit:
            raise DataError(
                f"{file.path}: rollout {index} was sampled by the policy of step {rollout.version}, {age} steps before "
                f"the one that trains on it; rollouts.max_staleness is {limit}: sample again with newer weights")
        wanted = {REFERENCE: "policy.kl" if self.policy.kl else "", OLD: "policy.correction" if
                  self.policy.correction and self.policy.old == "rollouts" else "",
                  ADVANTAGES: 'policy.method "ppo"' if self.policy.method == "ppo" else ""}
        for name, setting in wanted.items():
            if setting and name not in rollout.further:
                raise DataError(f"{file.path}: rollout {index} has no {name}, which {setting} needs; write them with "
                                "the rollouts, or change the setting")
        return labels_of(rollout, float(advantages[at]), self.seq_length)

    def draw(self, seed: int, k: int) -> Sample:
        """Return sample k of the run."""
        return self.sample(k)


def rollouts(run: RunConfig, split: str) -> RolloutDataset | None:
    """Return a run's rollouts, all of which are trained on."""
    return RolloutDataset(run) if split == "train" else None
