"""Providers of experts' exchanges: what is refused and with which words, and rows that cannot be told apart."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from contradictions import contradictions

from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.ext.experts.checks import CONFLICTS
from megatron_port.ext.experts.exchanges import DeepEP, arrangement
from megatron_port.ext.experts.experts import Manifest
from megatron_port.ext.kernels.choose_experts import choose_exchange
from megatron_port.ext.kernels.jit_guard import ENTRY_POINTS


def device(kind: str) -> DeviceInfo:
    return SimpleNamespace(kind=kind)  # type: ignore[return-value]  # all that is read


@pytest.mark.parametrize(("asked", "kind", "dtype", "says"), [
    ("deepep", "cpu", torch.bfloat16, "needs a GPU of NVIDIA, not cpu"),
    ("mori", "cuda", torch.bfloat16, "needs a GPU of AMD, not cuda"),
    ("deepep", "cuda", torch.float32, "moves bfloat16, not float32"),
    ("deepep", "cuda", torch.bfloat16, "deep_ep is not installed"),
    ("mori", "rocm", torch.float32, "mori is not installed"),
])
def test_what_cannot_serve_is_refused_by_name(asked: Any, kind: str, dtype: torch.dtype, says: str) -> None:
    with pytest.raises(EnvironmentFault, match=f'experts_exchange = "{asked}" cannot serve: .*{says}; set .* "torch"'):
        choose_exchange(BackendConfig(experts_exchange=asked), device(kind), dtype)
    assert choose_exchange(BackendConfig(), device(kind), dtype)[0] is None


def test_an_installed_package_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("deep_ep")
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    found, row = choose_exchange(BackendConfig(experts_exchange="deepep"), device("cuda"), torch.bfloat16)
    assert isinstance(found, DeepEP) and found.module is package and row.provider == "deepep"


def test_settings_that_have_no_exchange_are_named() -> None:
    run = load("runs/mixtral-h200-8gpu").config
    for ep, words in ((1, "nothing is exchanged"), (3, "settings for 2, 4, 8, 16")):
        config = with_values(run, {"layout.expert_parallel_size": ep, "backend.experts_exchange": "deepep"})
        found = contradictions(CONFLICTS, config)
        assert any(words in problem and "use" in problem for problem in found), found


def test_rows_are_put_in_the_order_of_ranks_and_places() -> None:
    """Two ranks of at most 4 rows; those of rank 1 arrived first, and turned round."""
    counts = torch.tensor([1, 0, 2, 0])
    first, second = (Manifest(None, rank, (1, 2), (3, 2), counts, 4) for rank in (0, 1))
    assert first.expert_of_row().tolist() == [[0], [2], [2]]
    assert first.keys().tolist() == [[0.0], [1.0], [2.0]] and second.keys().tolist() == [[4.0], [5.0], [6.0]]
    assert arrangement(torch.tensor([[6.0], [5.0], [2.0], [1.0], [0.0]]), first).tolist() == [4, 3, 2, 1, 0]
    with pytest.raises(RuntimeError, match="4 rows arrived .* and 5 were announced"):
        arrangement(torch.zeros(4, 1), first)
    with pytest.raises(ValueError, match="2 ranks of 8388609 rows .* lower batch.micro_batch_size"):
        Manifest(None, 0, (1, 2), (3, 2), counts, 2**23 + 1).keys()


def test_moris_compiler_is_closed() -> None:
    closed: dict[str, Any] = {}
    guard: Any = SimpleNamespace(refuse_in=lambda owner, name, refusing: closed.update({name: refusing}))
    ENTRY_POINTS["mori.jit.core"](guard, ModuleType("mori.jit.core"))
    assert set(closed) == {"_hipcc_genco", "_hipcc_device_bc"}
    with pytest.raises(EnvironmentFault, match="MORI's kernel ep_intranode.hip .* MORI_PRECOMPILE=1"):
        closed["_hipcc_genco"](None, "ep_intranode.hip")
