"""Stand-ins for packages of GPU kernels that a trainer imports and does not use on a CPU, and torch's own operations in
the place of those of flash-attn that it does use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Absent:
    """Stand-in for any name of an absent package. As a decorator it leaves functions as they are."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Module(ModuleType):
    """An absent module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages that are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Let packages that are not installed be imported within, as :class:`Absent`. They are forgotten after."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    finder = _Finder(missing)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]


class Rotary(torch.nn.Module):
    """Rotary positions as flash-attn's ``layers.rotary.RotaryEmbedding`` has them, of queries [b, s, heads, width] and
    of keys in ``kv`` [b, s, 2, heads, width]."""

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False, **_: Any) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = dim, base, interleaved

    def forward(self, queries: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, turned."""
        keys, values = kv.unbind(2)
        return self._turned(queries), torch.stack([self._turned(keys), values], 2)

    def _turned(self, x: Tensor) -> Tensor:
        speeds = self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speeds
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = x.double().unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        pairs = pairs if self.interleaved else pairs.transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        return (turned if self.interleaved else turned.transpose(-1, -2)).flatten(-2).to(x.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: float | None = None,
    causal: bool = False, **_: Any,
) -> Tensor:
    """Attention within sequences that stand one after the other: [positions, heads, width] → the same."""
    done = []
    for at, to, from_, until in zip(*(c.tolist()[i:] for c in (cu_seqlens_q, cu_seqlens_k) for i in (0, 1)),
                                    strict=False):
        one, keys, values = (x.transpose(0, 1)[None] for x in (q[at:to], k[from_:until], v[from_:until]))
        out = scaled_dot_product_attention(
            one, keys, values, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        done.append(out[0].transpose(0, 1))
    return torch.cat(done)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5, is_rms_norm: bool = False, **_: Any
) -> Tensor:
    """RMS or layer norm over the last dimension."""
    if is_rms_norm:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def flash_attention() -> None:
    """Replace flash-attn, where it is not installed, by torch's own attention, rotary positions and norms."""
    if importlib.util.find_spec("flash_attn") is not None:
        return
    has: dict[str, dict[str, Any]] = {
        "": {"__version__": "2.6.3"}, ".bert_padding": {}, ".layers": {}, ".layers.rotary": {"RotaryEmbedding": Rotary},
        ".modules": {}, ".modules.mha": {}, ".ops": {}, ".ops.triton": {},
        ".ops.triton.layer_norm": {"layer_norm_fn": norm},
        ".flash_attn_interface": {"flash_attn_varlen_func": attention},
    }
    for name, members in has.items():
        module = _Module(f"flash_attn{name}")
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(f"flash_attn{name}", None)
        vars(module).update(members)
        sys.modules[f"flash_attn{name}"] = module
