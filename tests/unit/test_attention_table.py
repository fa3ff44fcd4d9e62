"""Attention's provider on a GPU: by measured times where there are some, else in a written order that is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import attention_providers
from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.layers.fused import torch_causal_softmax
from megatron_port.ext.kernels import attention_choice as choice
from megatron_port.ext.kernels.attention_choice import AttentionShape, lookup, parse, shipped_table
from megatron_port.ext.kernels.settings import CAUSAL, MaskNeeds

GPU = DeviceInfo("cuda", torch.device("cuda", 0), "nccl", "H", 0, "test")
SHAPE = AttentionShape("sm_90", "bf16", 128, 4096)
TIMES = {"fa3": 1.0, "cudnn": 1.5, "flash_attn": 2.0, "flash": 2.5}


def rows(*found: tuple[AttentionShape, dict[str, float]]) -> str:
    return json.dumps({"rows": [{**asdict(s), "milliseconds": t, "source": "h200.json"} for s, t in found]})


def test_a_row_serves_from_its_length_on_and_only_its_kind() -> None:
    table = parse(rows((SHAPE, TIMES), (replace(SHAPE, seq=1024), TIMES), (replace(SHAPE, dtype="fp16"), TIMES)), "x")
    served = {seq: row.shape.seq if (row := lookup(table, replace(SHAPE, seq=seq))) else 0
              for seq in (512, 1024, 4095, 4096, 9999)}
    assert served == {512: 0, 1024: 1024, 4095: 1024, 4096: 4096, 9999: 4096}
    for other in ({"arch": "sm_80"}, {"head_dim": 64}, {"causal": False}, {"dropout": True}, {"dtype": "fp32"}):
        assert lookup(table, replace(SHAPE, **other)) is None  # type: ignore[arg-type]
    assert table[0].order == ["fa3", "cudnn", "flash_attn", "flash"]
    shipped_table()  # can be read


@pytest.mark.parametrize(("change", "says"), [
    ({"milliseconds": {"own": 1.0}}, "milliseconds of own; it takes cudnn"), ({"milliseconds": {}}, "nothing"),
    ({"sequence": 5}, "sequence"), ({"source": None, "arch": 0}, ""),
])
def test_a_row_that_is_wrong_is_refused(change: dict[str, object], says: str) -> None:
    table = json.loads(rows((SHAPE, TIMES)))
    table["rows"][0].update(change)
    if "arch" in change:
        del table["rows"][0]["arch"]
    with pytest.raises(ConfigError, match=f"t.json: row 0: .*{says}"):
        parse(json.dumps(table), "t.json")


def choose(
    monkeypatch: pytest.MonkeyPatch, text: str, packages: dict[str, object], mask: MaskNeeds = CAUSAL, **config: Any
):
    monkeypatch.setattr(choice, "shipped_table", lambda: parse(text, "t.json"))
    monkeypatch.setattr(choice, "optional_import", lambda name: (packages[name], "") if name in packages
                        else (None, f"{name} is not installed"))
    orders: list[list[str]] = []
    monkeypatch.setattr(choice, "sdpa_attention", lambda kernels: orders.append([k.name for k in kernels]))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: orders.append([name]),
                        raising=False)
    needs = choice.AttentionNeeds(torch.bfloat16, shape=SHAPE, mask=mask)
    own = choice.OwnAttention("own attention is for CPUs", lambda: "")
    _, row = choice.choose_attention(BackendConfig(**config), GPU, needs, torch_causal_softmax, own)
    return row, orders


def test_under_a_mask_flash_attn_goes_first_and_math_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times were measured without one; torch's attention computes all scores, and knows neither caps nor sinks."""
    def function(q: Any, k: Any, v: Any, softcap: float = 0.0) -> None: ...

    both = SimpleNamespace(flash_attn_func=function, flash_attn_varlen_func=function)
    flash: dict[str, object] = {"flash_attn": both}
    old: dict[str, object] = {"flash_attn": SimpleNamespace(flash_attn_func=lambda q, k, v: None)}
    text, window, capped = rows((SHAPE, TIMES)), MaskNeeds(window=True), MaskNeeds(window=True, softcap=True)
    for packages, mask, provider, why in (
        (flash, window, "flash_attn", "would compute all scores"), ({}, window, "sdpa", "computes all scores"),
        (flash, capped, "flash_attn", ""), (old, capped, "math", "this flash_attn package knows no softcap"),
        (old, MaskNeeds(documents=True), "sdpa", ""), (flash, MaskNeeds(sinks=True), "math", "flash_attn cannot serve"),
    ):
        row, _ = choose(monkeypatch, text, packages, mask)
        assert row.provider == provider and why in row.why and " ms measured" not in row.why, row


def test_documents_and_windows_take_torchs_varlen_attention_where_flash_attn_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch without it, or with an older one, is named, and a mask that hides nothing stays with torch's kernels,
    cuDNN's left out."""
    def varlen_attn(query: Any, *rest: Any, window_size: Any = (-1, -1), enable_gqa: bool = False) -> None: ...

    def older(query: Any, *rest: Any, is_causal: bool = False) -> None: ...

    def function(q: Any, k: Any, v: Any) -> None: ...

    found: dict[str, object] = {choice._VARLEN: SimpleNamespace(varlen_attn=varlen_attn)}
    old: dict[str, object] = {choice._VARLEN: SimpleNamespace(varlen_attn=older)}
    package = SimpleNamespace(flash_attn_func=function, flash_attn_varlen_func=function)
    flash: dict[str, object] = {"flash_attn": package}
    text, window, documents = rows((SHAPE, TIMES)), MaskNeeds(window=True), MaskNeeds(documents=True, runs=True)
    for packages, mask, provider, why in (
        (found, window, "varlen", "compute all scores under a mask; flash_attn is not installed; torch "),
        (found, documents, "varlen", ""), (found | flash, documents, "flash_attn", ""),
        (old, documents, "sdpa", "first that fits of flash, efficient, math; computes all scores"),
        (old, documents, "sdpa", "has no varlen_attn with window_size and enable_gqa"),
        ({}, window, "sdpa", "torch.nn.attention.varlen is not installed"), (found, MaskNeeds(runs=True), "sdpa", ""),
        (found, MaskNeeds(window=True, softcap=True), "math", ""),
    ):
        row, _ = choose(monkeypatch, text, packages, mask)
        assert row.provider == provider and why in row.why, row
    row, _ = choose(monkeypatch, text, found, documents, attention="varlen")
    assert row.provider == "varlen" and row.why.startswith("asked for")
    for packages, mask, why in (
        (old, window, "no varlen_attn with window_size"), (found, MaskNeeds(softcap=True), "cannot serve soft-capp"),
    ):
        with pytest.raises(EnvironmentFault, match=f'attention = "varlen" cannot serve: .*{why}'):
            choose(monkeypatch, text, packages, mask, attention="varlen")


def test_the_fastest_that_can_serve_is_taken_and_the_reason_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = rows((SHAPE, TIMES))
    row, orders = choose(monkeypatch, text, {})
    assert row.provider == "sdpa" and orders == [
        ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]]
    assert "cudnn first; auto: 1.5 ms measured for sm_90, bf16, head size 128, 4096 tokens, causal" in row.why
    assert "fa3 is faster, but flash_attn_interface is not installed" in row.why and "h200.json" in row.why
    row, orders = choose(monkeypatch, text, {"flash_attn_interface": object()})
    assert row.provider == "fa3" and orders[0] == ["FA3"]
    package = SimpleNamespace(flash_attn_func=lambda *a, **k: a, __version__="2")
    row, _ = choose(monkeypatch, rows((SHAPE, {"flash_attn": 1.0, "flash": 2.0})), {"flash_attn": package})
    assert row.provider == "flash_attn"
    row, orders = choose(monkeypatch, text, {"flash_attn": package}, deterministic=True)
    assert orders[-1][0] == "FLASH_ATTENTION" and "cudnn is faster, and not deterministic" in row.why
    assert "flash_attn is faster, and not deterministic" in row.why


def test_without_a_row_the_written_order_serves_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    row, orders = choose(monkeypatch, rows((replace(SHAPE, seq=8192), TIMES)), {})
    assert row.provider == "sdpa" and orders[-1][0] == "CUDNN_ATTENTION"
    assert "no measured time that serves sm_90, bf16, head size 128, 4096 tokens, causal" in row.why
    row, _ = choose(monkeypatch, rows((SHAPE, TIMES)), {}, attention="sdpa")  # by name: the table is not asked
    assert "measured" not in row.why


def test_measured_rows_become_the_table() -> None:
    def measured(provider: str, seq: int, ms: float | None) -> dict[str, object]:
        common = {**asdict(replace(SHAPE, seq=seq)), "provider": provider, "shape": "s"}
        return {**common, "failed": "no"} if ms is None else {**common, "milliseconds": ms}

    found = [measured("cudnn", 1024, 0.5), measured("flash", 1024, 0.4), measured("fa3", 1024, None),
             measured("flash", 2048, 1.0), measured("flash", 1024, 0.45)]
    table = parse(attention_providers.table({"ops.json": found}), "new")
    assert [(t.shape.seq, t.order, t.source) for t in table] == [
        (1024, ["flash", "cudnn"], "ops.json"), (2048, ["flash"], "ops.json")]
    assert table[0].milliseconds["flash"] == 0.4
