"""On AMD GPUs: whose attention by name, and products by a frozen table of algorithms."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.ext.kernels import attention_choice
from megatron_port.ext.kernels.attention_choice import AttentionNeeds, AttentionShape, OwnAttention, choose_attention
from megatron_port.ext.kernels.settings import MaskNeeds
from megatron_port.ext.kernels.tuned_products import freeze, read_validators

OWN = OwnAttention("not built", lambda: "")
TABLE = """Validator,PT_VERSION,2.11.0
Validator,ROCM_VERSION,7.1.1.0-38-abc
Validator,HIPBLASLT_VERSION,100000-def
Validator,GCN_ARCH_NAME,gfx90a:sramecc+:xnack-
GemmTunableOp_BFloat16_TN,tn_6400_8192_1600,Gemm_Hipblaslt_TN_572,0.0983
GemmTunableOp_BFloat16_NN,nn_1600_8192_6400,Default,0.1011
"""
HERE = {"PT_VERSION": "2.11.0", "ROCM_VERSION": "7.1.1.0-38-abc", "HIPBLASLT_VERSION": "100000-def",
        "GCN_ARCH_NAME": "gfx90a:sramecc+:xnack-"}


def device(kind: str) -> DeviceInfo:
    return DeviceInfo(kind, torch.device("cuda", 0), "nccl", "a GPU", 0, "asked for")


def no_softmax(scores: torch.Tensor, *, scale: float, dropout: Any = None) -> torch.Tensor:
    return scores


def chosen(which: Any, kind: str = "rocm", dtype: torch.dtype = torch.bfloat16, arch: str = "gfx942",
           mask: MaskNeeds | None = None) -> str:
    needs = AttentionNeeds(dtype, head_size=64, shape=AttentionShape(arch, "bf16", 64, 2048), mask=mask or MaskNeeds())
    row = choose_attention(BackendConfig(attention=which), device(kind), needs, no_softmax, OWN)[1]
    return f"{row.provider}: {row.why}"


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch with both libraries; what it was told."""
    told: list[str] = []

    def prefer(name: str | None = None) -> str:
        told.append(str(name))
        return f"_ROCmFABackend.{str(name).capitalize()}"

    monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", prefer, raising=False)
    return told


def test_composable_kernel_is_torchs_flash_attention_alone(
    preferred: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Any] = []
    monkeypatch.setattr(attention_choice, "sdpa_attention", lambda order=None: orders.append(order))
    assert chosen("ck").startswith("ck: asked for; torch's flash attention from Composable Kernel alone")
    assert preferred == ["ck"] and orders == [[SDPBackend.FLASH_ATTENTION]]


def test_a_torch_without_composable_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", lambda name: "_ROCmFABackend.AOTriton",
                        raising=False)
    with pytest.raises(EnvironmentFault, match="built without Composable Kernel; set backend.attention = \"sdpa\""):
        chosen("ck")


def test_aiter_is_called_as_flash_attention_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        seen.append((tuple(q.shape), causal))
        return q

    package = types.ModuleType("aiter")
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", package)
    needs = AttentionNeeds(torch.bfloat16, head_size=64, shape=AttentionShape("gfx950", "bf16", 64, 2048))
    attend, row = choose_attention(BackendConfig(attention="aiter"), device("rocm"), needs, no_softmax, OWN)
    q = torch.zeros(8, 2, 4, 64, dtype=torch.bfloat16)
    assert row.provider == "aiter" and attend(q, q, q).shape == (8, 2, 256) and seen == [((1, 8, 8, 64), True)]


@pytest.mark.parametrize(("which", "changes", "says"), [
    ("aiter", {"arch": "gfx90a"}, "AITER has no kernels for gfx90a; set backend.attention = \"flash_attn\""),
    ("aiter", {"kind": "cuda"}, "aiter is for AMD GPUs, not cuda"),
    ("ck", {"kind": "cuda"}, "ck is for AMD GPUs, not cuda"),
    ("ck", {"dtype": torch.float32}, "ck takes fp16 and bf16, not float32"),
    ("ck", {"mask": MaskNeeds(window=True)}, "window"),
])
def test_refusals(which: str, changes: dict[str, Any], says: str, preferred: list[str]) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        chosen(which, **changes)
    assert not preferred


class Tunable:
    """Stand-in for torch.cuda.tunable, with what it was told."""

    def __init__(self, validators: dict[str, str], accepts: bool = True) -> None:
        self.validators, self.accepts, self.told = validators, accepts, list[tuple[str, Any]]()

    def get_validators(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.validators.items())

    def get_results(self) -> tuple[str, ...]:
        return ("a", "b")

    def read_file(self, name: str) -> bool:
        self.told.append(("read_file", Path(name).name))
        return self.accepts

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.told.append((name, value))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "gfx90a.csv"
    path.write_text(TABLE)
    return path


def test_a_table_is_read_and_nothing_is_tuned(table: Path) -> None:
    tunable = Tunable(HERE)
    assert freeze(table, tunable=tunable).startswith("products: 2 shapes from gfx90a.csv")
    assert tunable.told == [("enable", True), ("tuning_enable", False), ("record_untuned_enable", False),
                            ("read_file", "gfx90a.csv")]


def test_a_table_of_another_library_is_refused_by_name(table: Path) -> None:
    tunable = Tunable({**HERE, "HIPBLASLT_VERSION": "100001-xyz"})
    with pytest.raises(EnvironmentFault, match="HIPBLASLT_VERSION 100000-def there, 100001-xyz here; make it again"):
        freeze(table, tunable=tunable)
    assert tunable.told == []
    with pytest.raises(EnvironmentFault, match="torch refuses the table"):
        freeze(table, tunable=Tunable(HERE, accepts=False))


@pytest.mark.parametrize("text", ["", "Validator,PT_VERSION,2.11.0\n", TABLE[TABLE.index("Gemm"):]])
def test_a_table_needs_validators_and_products(table: Path, text: str) -> None:
    table.write_text(text)
    with pytest.raises(EnvironmentFault, match="lines of validators and"):
        read_validators(table)


def test_other_torches_and_missing_tables_are_named(table: Path) -> None:
    with pytest.raises(EnvironmentFault, match="is for AMD GPUs, and this torch is built for CPUs"):
        freeze(table)
    with pytest.raises(EnvironmentFault, match="No such file"):
        freeze(table.with_name("none.csv"), tunable=Tunable(HERE))
