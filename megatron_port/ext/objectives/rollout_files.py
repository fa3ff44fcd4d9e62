"""Rollouts: sampled answers with what a policy's update needs, in a folder that grows by whole files.

A file is safetensors, named by the number of its first rollout, ``000000000064.safetensors``, with these tensors
(n rollouts of T tokens in all; those marked * may be missing):

    offsets         int64 [n + 1]   where each rollout's tokens start
    tokens          int32 [T]       prompt and answer
    sampled         uint8 [T]       1: the policy sampled the token, which has a loss; 0: prompt, or a tool's output
    logprobs        float32 [T]     log-probability of a sampled token by what sampled it; 0 elsewhere
    old_logprobs*   float32 [T]     the same by the trainer, before its update
    ref_logprobs*   float32 [T]     the same by the frozen reference
    rewards         float64 [n]
    groups          int64 [n]       the same number: answers to one prompt; within one file
    versions        int64 [n]       optimizer steps that the policy had taken when it sampled
    advantages*     float32 [T]     in place of those made from the groups' rewards

and ``{"format": "1", "rollouts": n, "xxh3": …}`` as metadata, the hash (xxh3-128) of all tensors' bytes in the order of
their names. A file is whole or absent, and never changes; files follow one another without a gap.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megatron_port.core.errors import DataError
from megatron_port.core.io.files import fsync_directory

SUFFIX = ".safetensors"
PER_TOKEN = {"tokens": "<i4", "sampled": "|u1", "logprobs": "<f4", "old_logprobs": "<f4", "ref_logprobs": "<f4",
             "advantages": "<f4"}
PER_ROLLOUT = {"rewards": "<f8", "groups": "<i8", "versions": "<i8"}
OPTIONAL = ("old_logprobs", "ref_logprobs", "advantages")
_ROUNDED = 1e-3
"""Log-probabilities may be above 0 by this much, as engines round."""
_MAX_BYTES = 1 << 34
"""More than a file of rollouts has."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled answer with its prompt; arrays are of its tokens, [tokens]."""

    tokens: np.ndarray
    """Integers"""
    sampled: np.ndarray
    """Whether the policy sampled each"""
    logprobs: np.ndarray
    """Log-probability of each sampled token; entries of other tokens are not read"""
    reward: float
    group: int
    version: int = 0
    """Optimizer steps of the policy that sampled"""
    further: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays of ``OPTIONAL``, by name"""

    def problem(self) -> str:
        """Return what is wrong with it; empty: nothing."""
        n = len(self.tokens)
        arrays = {"sampled": self.sampled, "logprobs": self.logprobs, **self.further}
        for name, array in arrays.items():
            if name not in PER_TOKEN:
                return f"{name!r} is unknown; further arrays are {', '.join(OPTIONAL)}"
            if np.shape(array) != (n,):
                return f"{name} has the shape {np.shape(array)} for {n} tokens"
        kinds = np.asarray(self.tokens).dtype.kind
        if n < 2 or kinds not in "iu" or int(np.min(self.tokens)) < 0 or int(np.max(self.tokens)) >= 1 << 31:
            return f"tokens are at least two ids from 0 on, and not {n} of dtype {np.asarray(self.tokens).dtype}"
        if self.sampled[0]:
            return "the first token is sampled, and nothing predicts it; a prompt has one token at least"
        on = np.asarray(self.sampled, dtype=bool)
        for name, array in arrays.items():
            values = np.asarray(array, dtype=np.float64)[on]
            if name != "sampled" and not np.isfinite(values).all():
                return f"{name} of a sampled token is not finite"
            if name.endswith("logprobs") and (values > _ROUNDED).any():
                return f"{name} has {values.max()}, which is no log-probability"
        if self.version < 0:
            return f"the version is {self.version}"
        return "" if np.isfinite(self.reward) else f"the reward is {self.reward}"


def append(folder: str | Path, rollouts: Sequence[Rollout]) -> Path:
    """Add rollouts to a folder, which is made where it is missing; return their file. A group does not continue in
    another file. Several processes may append at the same time.

    Raises:
        DataError: a rollout is damaged, arrays are missing in some, or the folder cannot be written.
    """
    payload = _payload(rollouts)
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".rollouts-", dir=place)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(payload)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, 0o644)
            while True:
                end = _end(place)
                target = place / f"{end:012d}{SUFFIX}"
                try:
                    os.link(name, target)  # unlike a renaming this takes no other's name
                    break
                except FileExistsError:
                    continue
        finally:
            os.unlink(name)
        fsync_directory(place)
    except OSError as error:
        raise DataError(f"{place}: rollouts cannot be written ({error.strerror or error})") from error
    return target


def _payload(rollouts: Sequence[Rollout]) -> bytes:
    if not rollouts:
        raise DataError("no rollouts to write")
    for number, rollout in enumerate(rollouts):
        problem = rollout.problem()
        if not problem and set(rollout.further) != set(rollouts[0].further):
            problem = f"it has {sorted(rollout.further)} and the first one has {sorted(rollouts[0].further)}"
        if problem:
            raise DataError(f"rollout {number} of {len(rollouts)}: {problem}")
    rows = {name: [getattr(r, name) if hasattr(r, name) else r.further[name] for r in rollouts]
            for name in ("tokens", "sampled", "logprobs", *sorted(rollouts[0].further))}
    on = np.concatenate([np.asarray(row, dtype=bool) for row in rows["sampled"]])
    tensors: dict[str, np.ndarray] = {}
    for name, parts in rows.items():
        whole = np.concatenate([np.asarray(part) for part in parts])
        tensors[name] = (whole if name in ("tokens", "sampled") else np.where(on, whole, 0)).astype(PER_TOKEN[name])
    tensors["rewards"] = np.array([r.reward for r in rollouts], dtype="<f8")
    tensors["groups"] = np.array([r.group for r in rollouts], dtype="<i8")
    tensors["versions"] = np.array([r.version for r in rollouts], dtype="<i8")
    tensors["offsets"] = np.cumsum([0, *(len(r.tokens) for r in rollouts)], dtype="<i8")
    about = {"format": "1", "rollouts": str(len(rollouts)), "xxh3": _digest(tensors)}
    payload: bytes = save(tensors, metadata=about)
    return payload


def _digest(tensors: dict[str, np.ndarray]) -> str:
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(f"{name}{tensors[name].shape}".encode())
        state.update(np.ascontiguousarray(tensors[name]).tobytes())
    return state.hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder, in order.

    Raises:
        DataError: the folder is missing, or one of its files has another name.
    """
    try:
        found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: no folder of rollouts ({error.strerror or error})") from error
    for path in found:
        if path.suffix != SUFFIX or not path.stem.isdecimal() or len(path.stem) < 12:
            raise DataError(f"{path} is no file of rollouts, which are named by the number of their first one "
                            f"(000000000064{SUFFIX}); move it away")
    return sorted(found, key=lambda path: int(path.stem))


def _end(folder: Path) -> int:
    """Return the number of rollouts in a folder, by the last file's header."""
    found = files_of(folder)
    return int(found[-1].stem) + _header(found[-1])[0] if found else 0


def _header(path: Path) -> tuple[int, str]:
    """Return the number of rollouts of a file and its hash."""
    try:
        with safe_open(path, framework="numpy") as stream:
            about = stream.metadata() or {}
        if about.get("format") != "1" or int(about["rollouts"]) < 1:
            raise ValueError(f"format {about.get('format')!r:.20}, {about.get('rollouts')!r:.20} rollouts")
        if about.keys() - {"format", "rollouts", "xxh3"}:
            raise ValueError(f"metadata is unknown: {sorted(about.keys() - {'format', 'rollouts', 'xxh3'})}")
        return int(about["rollouts"]), about["xxh3"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{path}: not readable as rollouts ({error})") from error


@dataclass(frozen=True)
class RolloutFile:
    """The rollouts of one file, verified."""

    path: Path
    first: int
    tensors: dict[str, np.ndarray]

    @classmethod
    def open(cls, path: Path) -> RolloutFile:
        """Read a file. Raises DataError: it is damaged."""
        count, digest = _header(path)
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes; a file has at most {_MAX_BYTES}")
            with safe_open(path, framework="numpy") as stream:
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118  # no mapping
        except (OSError, SafetensorError, ValueError, TypeError) as error:  # TypeError: a dtype that numpy lacks
            raise DataError(f"{path}: not readable as rollouts ({error})") from error
        actual = _digest(tensors)
        if actual != digest:
            raise DataError(f"{path} has changed since it was written: its hash is {actual}, and not {digest}")
        problem = _malformed(tensors, count) or _senseless(tensors)
        if problem:
            raise DataError(f"{path}: {problem}")
        return cls(path, int(path.stem), tensors)

    def __len__(self) -> int:
        return len(self.tensors["rewards"])

    def rollout(self, index: int) -> Rollout:
        """Return one of its rollouts."""
        start, stop = self.tensors["offsets"][index : index + 2]
        own = {name: self.tensors[name][start:stop] for name in PER_TOKEN if name in self.tensors}
        base = {name: own.pop(name) for name in ("tokens", "sampled", "logprobs")}
        return replace(_EMPTY, **base, further=own, reward=float(self.tensors["rewards"][index]),
                       group=int(self.tensors["groups"][index]), version=int(self.tensors["versions"][index]))


_EMPTY = Rollout(tokens=np.zeros(0, np.int32), sampled=np.zeros(0, np.uint8), logprobs=np.zeros(0, np.float32),
                 reward=0.0, group=0)


def _malformed(tensors: dict[str, np.ndarray], count: int) -> str:
    """Return what is wrong with a file's tensors; empty: nothing."""
    kinds = {**PER_TOKEN, **PER_ROLLOUT, "offsets": "<i8"}
    missing = [name for name in kinds if name not in tensors and name not in OPTIONAL]
    unknown = sorted(tensors.keys() - kinds.keys())
    if missing or unknown:
        return f"tensors are missing: {missing}" if missing else f"tensors are unknown: {unknown}"
    offsets = tensors["offsets"]
    size = len(tensors["tokens"])
    if offsets.shape != (count + 1,) or offsets[0] != 0 or offsets.max() > size or offsets.min() < 0 or (
            np.diff(offsets) < 2).any():
        return f"offsets {offsets.shape} do not divide {count} rollouts"
    for name, kind in kinds.items():
        expected = (count,) if name in PER_ROLLOUT else (int(offsets[-1]),) if name in PER_TOKEN else (count + 1,)
        array = tensors.get(name)
        if array is not None and (array.dtype != np.dtype(kind) or array.shape != expected):
            return f"{name} is {array.dtype} {array.shape}; expected {np.dtype(kind)} {expected}"
    return ""


def _senseless(tensors: dict[str, np.ndarray]) -> str:
    """Return what no rollout can have; empty: nothing. As :meth:`Rollout.problem`, of all at once."""
    on = tensors["sampled"] == 1
    if (tensors["sampled"] > 1).any() or on[tensors["offsets"][:-1]].any() or (tensors["tokens"] < 0).any():
        return "the first token of a rollout is sampled, or an id is below 0"
    for name in ("logprobs", *OPTIONAL):
        values = tensors.get(name, np.zeros(1))
        if not np.isfinite(values).all() or (name.endswith("logprobs") and (values > _ROUNDED).any()):
            return f"{name} has {values.max()}, which is not finite or no log-probability"
    if not np.isfinite(tensors["rewards"]).all() or (tensors["versions"] < 0).any():
        return "a reward is not finite, or a version is below 0"
    return ""


def from_json(line: str) -> Rollout:
    """Return a rollout of a line of JSON: ``prompt_token_ids``, ``token_ids`` and ``logprobs`` of the answer, as vLLM
    and SGLang return them, ``reward``, ``group``, perhaps ``version``, ``ref_logprobs`` and ``advantage``.

    Raises:
        DataError: keys are missing or unknown, or lengths differ.
    """
    raw: Any = json.loads(line, object_pairs_hook=_once)
    if not isinstance(raw, dict):
        raise DataError(f"a {type(raw).__name__}, and no object with keys")
    needed, optional = ("prompt_token_ids", "token_ids", "logprobs", "reward", "group"), (
        "version", "old_logprobs", "ref_logprobs", "advantage")
    missing, unknown = [key for key in needed if key not in raw], sorted(raw.keys() - {*needed, *optional})
    if missing or unknown:
        raise DataError(f"keys are missing: {missing}" if missing else f"keys are unknown: {unknown}")
    prompt, answer = ([_integer(token, name) for token in raw[name]] for name in ("prompt_token_ids", "token_ids"))
    zeros = np.zeros(len(prompt), dtype=np.float32)

    def padded(values: Sequence[float]) -> np.ndarray:
        return np.concatenate([zeros, np.asarray(values, dtype=np.float32)])

    further: dict[str, np.ndarray] = {}
    further.update({name: padded(raw[name]) for name in ("old_logprobs", "ref_logprobs") if name in raw})
    if "advantage" in raw:
        further["advantages"] = padded([raw["advantage"]] * len(answer))
    return Rollout(
        tokens=np.asarray(prompt + answer, dtype=np.int64), reward=float(raw["reward"]),
        group=_integer(raw["group"], "group"),
        sampled=np.concatenate([np.zeros(len(prompt), np.uint8), np.ones(len(answer), np.uint8)]),
        logprobs=padded(raw["logprobs"]), version=_integer(raw.get("version", 0), "version"), further=further,
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises DataError: it has a key twice, of which a reader would take one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DataError(f"a key is there twice, among {', '.join(key for key, _ in pairs)}")
    return found


def _integer(value: Any, name: str) -> int:
    """Return a number that is whole and fits int64. Raises DataError."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise DataError(f"{name} has {value!r:.40}, which is no whole number of 64 bits")
    return value
