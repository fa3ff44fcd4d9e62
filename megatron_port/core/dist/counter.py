"""Counter-based random numbers: a value is a function of (key, position), of nothing else.

There is no generator state to save, no order of draws, and a slice of a tensor
can be drawn without the rest of it. The bits come from a SplitMix64-style mixer
(Steele, Lea & Flood, OOPSLA 2014) on int64 tensors with a second key between its
rounds; normals come from Wichura's inverse of the normal distribution (AS 241,
1988) evaluated with additions, multiplications, divisions and square roots
alone. Each of those is one correctly rounded float64 operation, so the values
are equal to the bit on every device, thread count and vector width, which a
library ``log`` or ``cos`` does not promise.
"""

from __future__ import annotations

import hashlib

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
_U64 = 1 << 64


def _signed(value: int) -> int:
    """The int64 with the same bits as ``value`` modulo 2^64."""
    value %= _U64
    return value - _U64 if value >= _U64 // 2 else value


def key_of(*parts: int | str) -> int:
    """A 64-bit key (as int64) from any mix of integers and strings."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def random_bits(counter: torch.Tensor, key: int | torch.Tensor, key2: int = 0) -> torch.Tensor:
    """64 random bits for each element of ``counter`` (int64, any shape), as int64.

    ``key`` is an int or an int64 tensor that broadcasts against ``counter``.
    """
    z = counter * _GOLDEN + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = z ^ key2
    z = (z ^ _shift(z, 27)) * _MIX2
    z = z ^ _shift(z, 31)
    # One more multiply-xor: neighbouring counters with a small key2 difference stay uncorrelated.
    z = (z ^ _shift(z, 29)) * _MIX1
    return z ^ _shift(z, 32)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """float64 in (0, 1) from 64 random bits; exact: (k + 1/2) / 2^52."""
    return (_shift(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


_A = (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
      4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3)
_B = (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
      2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3)
_C = (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
      1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4)
_D = (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
      1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9)
_E = (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
      2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7)
_F = (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
      7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15)


def _poly(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """Horner's rule with separately rounded multiply and add (a fused one would differ by device)."""
    out = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out.mul_(x).add_(c)
    return out


_LN2 = 0.6931471805599453
_LOG_SERIES = tuple(2.0 / (2 * k + 1) for k in range(12))


def _log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive float64 by exact exponent and an atanh series; error under 1e-15."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < 0.70710678118654752
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = (exponent - low.to(exponent.dtype)).to(torch.float64)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    return exponent * _LN2 + f * _poly(f * f, _LOG_SERIES)


def normal_from_uniform(u: torch.Tensor) -> torch.Tensor:
    """Standard normal quantile of ``u`` in (0, 1), float64, relative error about 1e-16 (AS 241, PPND16)."""
    q = u - 0.5
    r = 0.180625 - q * q
    out = q * _poly(r, _A) / _poly(r, _B)
    tail = q.abs() > 0.425
    if tail.is_meta:
        return out
    # The tails are 15 % of the draws; each element's value does not depend on its neighbours,
    # so computing them on a compacted copy changes no bit.
    ut = u[tail]
    r = torch.sqrt(-_log(torch.minimum(ut, 1.0 - ut)))
    near = r - 1.6
    far = r - 5.0
    z = torch.where(r <= 5.0, _poly(near, _C) / _poly(near, _D), _poly(far, _E) / _poly(far, _F))
    out[tail] = torch.where(ut < 0.5, -z, z)
    return out
