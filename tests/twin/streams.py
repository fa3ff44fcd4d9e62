"""Random numbers of evidence/definitions.md, written with numpy's uint64 and scipy's normal quantile out of torch."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

MASK = (1 << 64) - 1


def key(*parts: int | str) -> int:
    """64 bits that name a stream, as an unsigned integer."""
    text = "\x1f".join(f"{'int' if isinstance(p, int) else 'str'}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def bits(counter: np.ndarray, first: int, second: int) -> np.ndarray:
    """64 random bits for each counter (uint64, any shape)."""
    with np.errstate(over="ignore"):
        z = counter.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(first)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = z ^ np.uint64(second)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        z = (z ^ (z >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        return z ^ (z >> np.uint64(32))


def initial_normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
    """Initial values of a parameter, float32."""
    counter = np.arange(int(np.prod(shape)), dtype=np.uint64)
    drawn = bits(counter, key("weight", seed, name), key("weight2", seed, name))
    uniform = ((drawn >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return (torch.special.ndtri(torch.from_numpy(uniform)) * std).float().reshape(shape)


def dropped_below(p: float) -> int:
    """Of 65536 values of an element's field, how many mean that it is dropped."""
    return min(round(p * 65536), 65535)


def dropout_factors(
    seed: int, step: int, samples: list[int], op: str, shape: tuple[int, ...], p: float
) -> torch.Tensor:
    """What each element [sample, *shape] is multiplied by: 0, or the scale of what is kept. float64."""
    position = np.arange(int(np.prod(shape)), dtype=np.uint64)
    rows = []
    for sample in samples:
        drawn = bits(position // np.uint64(4), key("sample", seed, step, sample), key("dropout", op))
        field = (drawn >> (np.uint64(16) * (position % np.uint64(4)))) % np.uint64(65536)
        rows.append(field >= np.uint64(dropped_below(p)))
    kept = torch.from_numpy(np.stack(rows)).reshape(len(samples), *shape)
    return kept.double() * (65536 / (65536 - dropped_below(p)))


def derive(*values: int) -> int:
    """64 bits from integers, for the order of samples."""
    state = 0
    for value in values:
        state = ((state ^ (value & MASK)) + 0x9E3779B97F4A7C15) & MASK
        state = splitmix(state)
    return state


def splitmix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
