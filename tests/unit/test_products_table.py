"""Which algorithm a product gets: the products of a run, the card's table of times, and what every rank is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import fake_ranks
import pytest
import torch
from ghost_cublaslt import compiled_cublaslt

from megatron_port.cli.doctor_backend import providers as doctor_providers
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.layers.linear import PLAIN, PlainLinearKernels
from megatron_port.ext.kernels import choose_products, kernels
from megatron_port.ext.kernels import lt_products as products
from megatron_port.ext.kernels.choose_products import Operands, choose_lt, lt_row, measure_card, measured
from megatron_port.ext.kernels.lt_linear import LtLinearKernels
from megatron_port.ext.kernels.products_table import (
    Form,
    Kind,
    ProductTable,
    ProductTimes,
    forms_of,
    read_table,
    table_path,
    write_table,
)
from megatron_port.tools.bench.session import _runs as calibrated_runs

CARD = DeviceInfo("cuda", torch.device("cpu"), "nccl", "NVIDIA H200", 141 << 30, "a test")
LIBRARY = "cublasLt 130100"


def run_of(**values: object) -> RunConfig:
    """A run of a model whose sizes all differ, on a GPU in bf16."""
    model = ModelConfig(name="x", num_layers=2, hidden_size=48, num_attention_heads=4, vocab_size=100, seq_length=8,
                        ffn_hidden_size=112)
    return with_values(RunConfig(model=model), {
        "precision.dtype": "bf16", "backend.device": "cuda", "batch.micro_batch_size": 3,
        "layout.vocab_padding_multiple": 16, **{key.replace("__", "."): value for key, value in values.items()}})


def test_a_runs_products_are_those_of_its_layers_and_head() -> None:
    """By hand: 24 tokens; qkv 48 → 144 with bias, output 48 → 48, up 48 → 112, down 112 → 48, head 48 → 112 padded."""
    pairs = {(48, 144), (48, 48), (48, 112), (112, 48)}
    wanted = set()
    for inputs, outputs in pairs:
        kind: Kind = "forward+bias" if outputs == 144 else "forward"
        wanted |= {Form(kind, 24, outputs, inputs), Form("dgrad", 24, inputs, outputs),
                   Form("wgrad", outputs, inputs, 24)}
    found = forms_of(run_of())
    assert set(found) == wanted and len(found) == len(wanted)
    half = forms_of(run_of(layout__tensor_parallel_size=2, model__vocab_size=129, model__add_bias=False))
    assert Form("wgrad", 72, 48, 24) in half and Form("forward", 24, 48, 56) in half  # half of qkv, of down
    assert Form("dgrad", 24, 48, 80) in half and not [f for f in half if f.kind == "forward+bias"]  # 160 of 129


class Recorder(PlainLinearKernels):
    """torch's products, and the forms that came to them."""

    def __init__(self) -> None:
        self.seen: set[Form] = set()

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, weight_2d: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        outputs, inputs = weight_2d.shape
        self.seen.add(Form("forward" if bias is None else "forward+bias", x.numel() // inputs, outputs, inputs))
        return super().forward(x, weight, weight_2d, bias)

    def dgrad(self, grad_output_2d: torch.Tensor, weight: torch.Tensor, weight_2d: torch.Tensor) -> torch.Tensor:
        self.seen.add(Form("dgrad", len(grad_output_2d), weight_2d.shape[1], len(weight_2d)))
        return super().dgrad(grad_output_2d, weight, weight_2d)

    def wgrad_accumulate(
        self, main_grad: torch.Tensor, grad_output_2d: torch.Tensor, x: torch.Tensor,
        saved_input_scale: torch.Tensor | None, *, first: bool = False,
    ) -> None:
        self.seen.add(Form("wgrad", grad_output_2d.shape[1], x.shape[1], len(x)))
        super().wgrad_accumulate(main_grad, grad_output_2d, x, saved_input_scale, first=first)


TP2, TP4 = ({"layout__tensor_parallel_size": size} for size in (2, 4))
SEQUENCE: dict[str, object] = {"layout__sequence_parallel": True}
CHUNKS: dict[str, object] = {"layout__tp_overlap_chunks": 2}
PAIRS = SEQUENCE | {"layout__tp_exchange": "pairs"}


@pytest.mark.parametrize("values", [
    {}, TP2, TP2 | SEQUENCE, TP2 | CHUNKS, TP2 | CHUNKS | SEQUENCE, TP2 | PAIRS, TP4, TP4 | CHUNKS | SEQUENCE,
    TP4 | PAIRS, {"activations__head_chunk": 4}, {"model__head_bias": True, "model__tie_embeddings": False},
    TP2 | CHUNKS | {"model__activation": "swiglu", "model__add_bias": False, "model__qkv_bias": True},
    {"quantisation__weights": "int8", "quantisation__group_size": 8},
], ids=str)
def test_the_forms_are_those_that_a_step_brings(values: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank of a real model: with whole heads (tp 1, 2) and with keys and values that two ranks share (tp 4)."""
    recorder = Recorder()
    with_them = replace(fake_ranks.torch_providers(), products=recorder)
    monkeypatch.setattr(fake_ranks, "torch_providers", lambda: with_them)
    config = run_of(**{
        "model__num_query_groups": 2, "backend__device": "cpu", "precision__dtype": "fp32", "data__synthetic": True,
        "batch__global_batch_size": 3, "layout__data_parallel_size": 1, **values})
    with fake_ranks.fake_rank(config, 0, initialise=True) as (engine, ctx, resolved):
        engine.train_step(fake_ranks.batches(resolved, ctx), step=0, lr=1e-3)
    assert recorder.seen == set(forms_of(config))


@pytest.mark.parametrize(("values", "said"), [
    ({"layout__tp_overlap_chunks": 2},
     "torch's: forward of attention.output, mlp.down (layout.tp_overlap_chunks 2)"),
    ({"layout__tp_overlap_chunks": 2, "layout__sequence_parallel": True},
     "torch's: forward of attention.qkv, mlp.up, attention.output, mlp.down (layout.tp_overlap_chunks 2)"),
    ({"layout__tp_exchange": "pairs", "layout__sequence_parallel": True},
     'torch\'s: forward of attention.qkv, mlp.up (layout.tp_exchange "pairs"); '
     'torch\'s: forward and dgrad of attention.output, mlp.down (layout.tp_exchange "pairs")'),
    ({"precision__fp8": "tensorwise", "layout__tp_overlap_chunks": 2},
     "torch's: all of attention.qkv, attention.output, mlp.up, mlp.down (precision.fp8 \"tensorwise\")"),
    ({"hardware__matmul_tflops": 500.0}, "torch's too: forward products, if the start divides them"),
    ({"activations__head_chunk": 4}, "torch's: all of head (activations.head_chunk 4)"),
])
def test_the_row_names_what_stays_with_torch(
    tmp_path: Path, lt: Path, values: dict[str, object], said: str
) -> None:
    """The row of a run's start, and of doctor."""
    for asked in ({}, {"backend__deterministic": True}):
        config = run_of(backend__products="lt", layout__tensor_parallel_size=2, **values, **asked)
        clock = Clock()
        made, row_ = choose_lt(config, CARD, 0, folder=tmp_path, clock=clock)
        assert said in row_.why and isinstance(made, LtLinearKernels) and set(made.chosen) == set(forms_of(config))
    assert said in lt_row(config, CARD, tmp_path)[0].why
    assert "torch's" not in lt_row(run_of(backend__products="lt"), CARD, tmp_path)[0].why


def test_a_run_without_a_product_for_it_is_told(lt: Path) -> None:
    values = {"precision__fp8": "rowwise", "activations__head_chunk": 4}
    assert lt_row(run_of(**values), CARD)[0].provider == "torch"
    with pytest.raises(EnvironmentFault, match="this run has no product for it; torch's: all of attention.qkv"):
        lt_row(run_of(backend__products="lt", **values), CARD)


def row(form: Form, torch_s: float, *candidates_s: float) -> ProductTimes:
    return ProductTimes(*form, dtype="bf16", torch_s=torch_s, candidates_s=candidates_s)  # type: ignore[arg-type]


FORM = Form("dgrad", 24, 48, 144)


@pytest.mark.parametrize(("times", "by_name", "by_gain"), [
    ((1.0, 3.0, 0.5, 2.0), 1, 1), ((1.0, 3.0, 0.995, 2.0), 1, None), ((1.0, 3.0, 0.98), 1, 1), ((1.0,), None, None),
    ((1.0, 2.0), 0, None),
])
def test_the_fastest_is_taken(times: tuple[float, ...], by_name: int | None, by_gain: int | None) -> None:
    """``auto`` leaves a product to torch where the gain is under 1 %."""
    made = row(FORM, *times)
    assert (made.fastest(must_gain=False), made.fastest(must_gain=True)) == (by_name, by_gain)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = ProductTable(CARD.name, LIBRARY, (row(FORM, 1.0, 0.1, 1 / 3),))
    path = write_table(table, tmp_path / "new")
    assert path.name == "products-nvidia-h200-cublaslt-130100.json"
    assert read_table(CARD.name, LIBRARY, tmp_path / "new") == (table, "")
    assert read_table(CARD.name, LIBRARY, tmp_path) == (ProductTable(CARD.name, LIBRARY), "")
    later = table.with_rows([row(FORM, 2.0, 1.0), row(FORM._replace(rows=25), 3.0)])
    assert [r.torch_s for r in later.rows] == [2.0, 3.0]
    assert later.of([FORM], "bf16") == {FORM: later.rows[0]} and later.of([FORM], "fp16") == {}


@pytest.mark.parametrize(("change", "said"), [
    (lambda text: text[: len(text) // 2], "is no JSON"),
    (lambda text: text.replace("0.125", "0.625"), "its digest is that of other numbers"),
    (lambda text: text.replace('"dgrad"', '"grad"'), "kind"),
    (lambda text: text.replace("0.125", "-0.125"), "candidates_s"),
    (lambda text: text.replace("NVIDIA H200", "NVIDIA H100"), "digest"),
    (lambda text: "[]", "expected"),
])
def test_a_damaged_table_is_refused_by_name_and_made_again(
    tmp_path: Path, lt: Path, change: Callable[[str], str], said: str
) -> None:
    path = write_table(ProductTable(CARD.name, LIBRARY, (row(FORM, 1.0, 0.125),)), tmp_path)
    path.write_text(change(path.read_text()))
    table, why = read_table(CARD.name, LIBRARY, tmp_path)
    assert table.rows == () and why.startswith(f"{path} is not read: ") and said in why
    config = run_of(backend__products="auto")
    assert why in lt_row(config, CARD, tmp_path)[0].why and lt_row(config, CARD, tmp_path)[0].provider == "torch"
    _, made = choose_lt(run_of(backend__products="lt"), CARD, 0, folder=tmp_path, clock=Clock())
    assert why in made.why and f"12 products measured, {path}" in made.why
    assert len(read_table(CARD.name, LIBRARY, tmp_path)[0].rows) == 12


def test_a_table_of_another_card_is_not_taken(tmp_path: Path) -> None:
    table = ProductTable("NVIDIA H100", LIBRARY, (row(FORM, 1.0, 0.1),))
    table_path(CARD.name, LIBRARY, tmp_path).write_text(table.text())
    assert "is for NVIDIA H100" in read_table(CARD.name, LIBRARY, tmp_path)[1]


class Clock:
    """Times by the place of a function: torch's 8, then 9, 10, 1, 11, …; counts what was measured."""

    def __init__(self) -> None:
        self.measured = 0

    def __call__(self, functions: Sequence[Callable[[], object]]) -> list[float]:
        self.measured += 1
        for function in functions:
            function()
        return [8.0, 9.0, 10.0, 1.0, *(float(10 + i) for i in range(1, 6))][: len(functions)]


@pytest.fixture
def lt(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The ghost machine's cublasLt in place of a GPU's, for tensors of a CPU."""
    kernels.load("cpu")
    path = Path(tmp_path_factory.getbasetemp()) / "lt"
    if not path.exists():
        path.mkdir()
        compiled_cublaslt(path)

    def opened(*_: object) -> str:
        return products.open_library(products.CPU, path / "lib.so")

    assert opened() == ""
    monkeypatch.setattr(choose_products, "lt_problem", opened)
    monkeypatch.setattr(choose_products, "library_name", lambda: products.library_name(products.CPU))
    yield path
    products.close_library(products.CPU)


def test_products_by_name_are_measured_once_for_a_card(tmp_path: Path, lt: Path) -> None:
    clock, config = Clock(), run_of(backend__products="lt")
    made, told = choose_lt(config, CARD, 0, folder=tmp_path, clock=clock)
    assert isinstance(made, LtLinearKernels) and made.dtype == torch.bfloat16
    assert made.chosen == dict.fromkeys(forms_of(config), 2) and clock.measured == 12
    assert told.provider == "lt" and told.why.startswith(f"asked for; {LIBRARY}; 12 products measured")
    again, told = choose_lt(config, CARD, 0, folder=tmp_path, clock=clock)
    assert isinstance(again, LtLinearKernels) and again.chosen == made.chosen and clock.measured == 12
    assert told.why == f"asked for; {LIBRARY}"
    more = run_of(backend__products="lt", batch__micro_batch_size=4)
    choose_lt(more, CARD, 0, folder=tmp_path, clock=clock)
    assert clock.measured == 24 and len(read_table(CARD.name, LIBRARY, tmp_path)[0].rows) == 24


def test_auto_takes_what_a_table_has_faster_and_measures_nothing(tmp_path: Path, lt: Path) -> None:
    config, clock = run_of(), Clock()
    assert config.backend.products == "auto"
    made, told = choose_lt(config, CARD, 0, folder=tmp_path, clock=clock)
    assert made is PLAIN and told.provider == "torch" and "no measured table for NVIDIA H200" in told.why
    forms = forms_of(config)
    slow = ProductTable(CARD.name, LIBRARY, tuple(row(form, 1.0, 2.0, 0.995) for form in forms))
    write_table(slow, tmp_path)
    made, told = choose_lt(config, CARD, 0, folder=tmp_path, clock=clock)
    assert made is PLAIN and "is not faster for any product" in told.why
    write_table(slow.with_rows([row(forms[0], 1.0, 2.0, 0.5), row(forms[3], 1.0, 0.7)]), tmp_path)
    made, told = choose_lt(config, CARD, 0, folder=tmp_path, clock=clock)
    assert isinstance(made, LtLinearKernels) and made.chosen == {forms[0]: 1, forms[3]: 0}
    assert told.why == f"auto; {LIBRARY}, faster for 2 of 12 products here" and clock.measured == 0
    fixed = run_of(backend__deterministic=True)
    assert choose_lt(fixed, CARD, 0, folder=tmp_path, clock=clock)[1].why == "auto; deterministic"


def test_a_deterministic_run_takes_the_first_of_each(tmp_path: Path, lt: Path) -> None:
    """What was measured may change from one start to the next."""
    config, clock = run_of(backend__products="lt", backend__deterministic=True), Clock()
    made, told = choose_lt(config, CARD, 0, folder=tmp_path, clock=clock)
    assert isinstance(made, LtLinearKernels) and made.chosen == dict.fromkeys(forms_of(config), 0)
    assert clock.measured == 0 and "deterministic" in told.why and not list(tmp_path.iterdir())


def test_every_rank_takes_what_rank_0_was_told(tmp_path: Path, lt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank neither measures nor reads a table of its own, which has another order."""
    config, told = run_of(backend__products="lt"), list[str | None]()
    monkeypatch.setattr(choose_products, "broadcast_text", lambda text: told.append(text) or told[0])
    first, _ = choose_lt(config, CARD, 0, folder=tmp_path, clock=Clock())
    write_table(ProductTable(CARD.name, LIBRARY, tuple(row(f, 1.0, 0.1) for f in forms_of(config))), tmp_path / "1")
    second, _ = choose_lt(config, CARD, 1, folder=tmp_path / "1", clock=Clock())
    clock = Clock()
    choose_lt(config, CARD, 1, folder=tmp_path / "2", clock=clock)
    assert clock.measured == 0 and not (tmp_path / "2").exists()
    assert isinstance(first, LtLinearKernels) and isinstance(second, LtLinearKernels)
    assert first.chosen == second.chosen == dict.fromkeys(forms_of(config), 2)
    other = replace(CARD, name="NVIDIA H100")
    with pytest.raises(EnvironmentFault, match="rank 0 has chosen products of cublasLt 130100 on NVIDIA H200, and here "
                                               "is: cublasLt 130100 on NVIDIA H100"):
        choose_lt(config, other, 1, folder=tmp_path, clock=Clock())
    told[0] = json.dumps({**json.loads(told[0] or ""), "library": "cublasLt 120900"})
    with pytest.raises(EnvironmentFault, match="cublasLt 120900"):
        choose_lt(config, CARD, 1, folder=tmp_path, clock=Clock())


def test_auto_takes_torchs_everywhere_where_one_rank_has_another_card(
    tmp_path: Path, lt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has a table, rank 1 another card: rank 0, whose own check passes, hears of it, and no start stops."""
    config, told = run_of(), list[str | None]()
    write_table(ProductTable(CARD.name, LIBRARY, tuple(row(f, 1.0, 0.5) for f in forms_of(config))), tmp_path)
    monkeypatch.setattr(choose_products, "broadcast_text", lambda text: told.append(text) or told[0])
    made, said = choose_lt(config, CARD, 0, folder=tmp_path, clock=Clock())
    assert isinstance(made, LtLinearKernels) and said.provider == "lt"
    made, there = choose_lt(config, replace(CARD, name="NVIDIA H100"), 1, folder=tmp_path, clock=Clock())
    assert made is PLAIN and there.provider == "torch"
    assert there.why.startswith("auto; rank 0 has chosen products of cublasLt 130100 on NVIDIA H200, and here is")

    def met(action: Callable[[], object]) -> object:
        """What rank 0 gets of ``agreed`` once rank 1 has failed: rank 1's fault after the broadcast."""
        if len(told) > 2:
            raise EnvironmentFault("rank 1 on there: another card")
        return action()

    monkeypatch.setattr(choose_products, "agreed", met)
    made, here = choose_lt(config, CARD, 0, folder=tmp_path, clock=Clock())
    assert made is PLAIN and here.why == "auto; rank 1 on there: another card"


@pytest.mark.parametrize(("variable", "said"), [
    (("GHOST_CANDIDATES", "2"), "cublasLt 130100 on NVIDIA H200 names 2 algorithms, and rank 0 has chosen number 2"),
    (("GHOST_HEURISTIC", "15"), "names 0 algorithms"),
    (("GHOST_HEURISTIC", "3"), "cublasLtMatmulAlgoGetHeuristic gave status 3 (ALLOC_FAILED); leave more"),
])
def test_a_rank_that_lacks_an_algorithm_says_so_at_the_start(
    tmp_path: Path, lt: Path, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str], said: str
) -> None:
    """And not in the middle of a pass, with the others in a collective."""
    told = list[str | None]()
    monkeypatch.setattr(choose_products, "broadcast_text", lambda text: told.append(text) or told[0])
    choose_lt(run_of(backend__products="lt"), CARD, 0, folder=tmp_path, clock=Clock())
    products.open_library(products.CPU, lt / "lib.so")  # another rank's, which has been asked nothing
    monkeypatch.setenv(*variable)
    with pytest.raises(EnvironmentFault) as caught:
        choose_lt(run_of(backend__products="lt"), CARD, 1, folder=tmp_path, clock=Clock())
    assert said in str(caught.value) and str(caught.value).startswith("forward+bias [24, 48] × [48, 144]: ")
    made, row_ = choose_lt(run_of(), CARD, 1, folder=tmp_path, clock=Clock())
    assert made is PLAIN and row_.why.startswith("auto; forward+bias [24, 48] × ") and said in row_.why


def test_a_start_asks_for_all_that_its_products_will(tmp_path: Path, lt: Path) -> None:
    config = run_of(backend__products="lt")
    choose_lt(config, CARD, 0, folder=tmp_path, clock=Clock())
    products.open_library(products.CPU, lt / "lib.so")  # as after another start
    made, _ = choose_lt(config, CARD, 0, folder=tmp_path, clock=Clock())
    assert isinstance(made, LtLinearKernels)
    asked = products.times_asked(products.CPU)
    measured(made.chosen, "bf16", torch.device("cpu"), Clock())
    assert products.times_asked(products.CPU) == asked


def test_a_calibration_measures_each_product_of_its_layouts_once(tmp_path: Path, lt: Path) -> None:
    clock, config = Clock(), run_of()
    runs = calibrated_runs(config, config.model, (1, 2, 3, 4, 8))
    assert [run.layout.tensor_parallel_size for run in runs] == [1, 2, 4]  # 4 heads
    said = measure_card(runs, CARD, folder=tmp_path, clock=clock)
    forms = {form for run in runs for form in forms_of(run)}
    path = table_path(CARD.name, LIBRARY, tmp_path)
    assert said == f"products: {LIBRARY} is faster for {len(forms)} of {len(forms)}; written: {path}"
    assert {r.form for r in read_table(CARD.name, LIBRARY, tmp_path)[0].rows} == forms and clock.measured == len(forms)
    made, _ = choose_lt(runs[1], CARD, 0, folder=tmp_path, clock=clock)
    assert isinstance(made, LtLinearKernels) and made.chosen == dict.fromkeys(forms_of(runs[1]), 2)


def test_operands_are_the_layers_and_torchs_product_is_timed_beside_them(lt: Path) -> None:
    """What is timed is what a layer asks for: the same transposition, sum and bias."""
    for form in (Form("forward", 24, 40, 16), Form("forward+bias", 24, 40, 16), Form("dgrad", 24, 16, 40),
                 Form("wgrad", 40, 16, 24)):
        x = Operands.of(form, torch.bfloat16, torch.device("cpu"))
        assert (x.left @ x.right).shape == x.out.shape == (form.rows, form.columns) and x.left.shape[1] == form.inner
        assert x.left.is_contiguous() == (form.kind != "wgrad")
        assert x.right.is_contiguous() == (not form.kind.startswith("forward"))
        assert (x.out.dtype == torch.float32) == (form.kind == "wgrad")
        assert x.left.unique().numel() > 100
    made = measured([FORM], "bf16", torch.device("cpu"), Clock())
    assert made == [row(FORM, 8.0, 9.0, 10.0, 1.0, 11.0, 12.0, 13.0, 14.0, 15.0)]


@pytest.mark.parametrize(("values", "said"), [
    ({"backend__device": "cpu"}, "which has neither cublasLt nor hipBLASLt"),
    ({"precision__dtype": "fp32"}, "needs precision.dtype"),
    ({"backend__own_kernels": "off"}, "whose library calls it"),
])
def test_a_run_that_cannot_have_them_is_told(values: dict[str, object], said: str) -> None:
    from megatron_port.core.config.checks import problems

    assert any(said in text for text in problems(run_of(backend__products="lt", **values)))
    assert not any("products" in text for text in problems(run_of(**values)))


def test_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = replace(CARD, kind="cpu")
    config = run_of(backend__products="lt")
    assert measure_card([config], on_cpu) == "products: torch's alone (cublasLt and hipBLASLt need a GPU)"
    (found,) = (row for row in doctor_providers(config, on_cpu) if row.name == "products")
    assert found.status == "wrong" and "need a GPU" in found.remedy
    with pytest.raises(EnvironmentFault, match="cannot serve: cublasLt and hipBLASLt need a GPU"):
        lt_row(config, on_cpu)
    assert lt_row(run_of(backend__products="torch"), CARD)[0].why == "asked for"
    kernels.load("cpu")
    assert "torch has loaded no libcublasLt and no libhipblaslt" in products.open_library()
    monkeypatch.setattr(kernels, "kernels_status", lambda kind: ("x", ""))
    monkeypatch.setattr(kernels, "load", lambda kind: kind)
    assert "auto; torch has loaded no libcublasLt" in lt_row(run_of(), CARD)[0].why
