"""Choice of a run's matrix products: torch's, or those of cublasLt or hipBLASLt by algorithms measured on this card.

Rank 0 reads the card's table, or measures what it lacks, and tells the others which algorithm each product has: two
replicas that added in different orders would drift apart. Nothing is measured later, nor in a captured step.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_port.core.config.schema import BackendConfig, RunConfig
from megatron_port.core.dist.agree import agreed, broadcast_text
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.layers.linear import PLAIN, LinearKernels, add_product
from megatron_port.core.layers.providers import ProviderRow
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.attention_choice import refuse
from megatron_port.ext.kernels.lt_linear import LtLinearKernels
from megatron_port.ext.kernels.lt_products import Epilogue, candidates, library_name, open_library, product
from megatron_port.ext.kernels.products_table import (
    Form,
    ProductTable,
    ProductTimes,
    forms_of,
    kept_by_torch,
    read_table,
    table_path,
    write_table,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CALLS, ROUNDS = 4, 3
"""Calls between two events, and how often each function has its turn."""
PERIOD = 65537
"""Numbers after which operands repeat themselves: a prime, which no row of a matrix is as long as."""
Clock = Callable[[Sequence[Callable[[], object]]], list[float]]
"""Seconds of a call of each of some functions."""


def event_seconds(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Return the device's seconds of a call of each function: medians of rounds in which they take turns."""
    for function in functions:
        function()
    turns = []
    for function in list(functions) * ROUNDS:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            function()
        end.record()
        turns.append((begin, end))
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) * 1e-3 / CALLS for begin, end in turns]
    return [statistics.median(times[i :: len(functions)]) for i in range(len(functions))]


class Operands(NamedTuple):
    """Operands that a product is measured with."""

    left: Tensor
    right: Tensor
    out: Tensor
    vector: Tensor | None

    @classmethod
    def of(cls, form: Form, dtype: torch.dtype, device: torch.device, *, filled: bool = True) -> Operands:
        """Make operands of mixed numbers within ±1: zeros would draw less power. torch's random state stays.

        ``filled`` False: of any numbers, for questions about their form.
        """
        mixed = ((torch.arange(PERIOD, device=device) * 7919 % PERIOD) / (PERIOD / 2) - 1).to(dtype)

        def random(*shape: int) -> Tensor:
            if not filled:
                return torch.empty(shape, device=device, dtype=dtype)
            return mixed.repeat(-(-math.prod(shape) // PERIOD))[: math.prod(shape)].view(shape)

        wide = torch.float32 if form.kind == "wgrad" else dtype
        out = (torch.zeros if filled else torch.empty)(form.rows, form.columns, device=device, dtype=wide)
        vector = random(form.columns) if form.kind == "forward+bias" else None
        if form.kind == "wgrad":
            return cls(random(form.inner, form.rows).t(), random(form.inner, form.columns), out, vector)
        if form.kind == "dgrad":
            return cls(random(form.rows, form.inner), random(form.inner, form.columns), out, vector)
        return cls(random(form.rows, form.inner), random(form.columns, form.inner).t(), out, vector)

    @property
    def more(self) -> dict[str, Any]:
        """Return the arguments of a product beside its matrices."""
        return {"epilogue": Epilogue.PLAIN if self.vector is None else Epilogue.BIAS, "vector": self.vector}

    def count(self, form: Form) -> int:
        """Return how many algorithms the library names here for a form, of which these are the operands.

        Raises:
            EnvironmentFault: it could not tell.
        """
        try:
            return candidates(self.left, self.right, self.out, **self.more)
        except RuntimeError as error:
            raise EnvironmentFault(f"{form.words}: {str(error).splitlines()[0]}") from error

    def by_torch(self) -> None:
        """Compute the product as the linear layers do without a library of their own."""
        if self.out.dtype != self.left.dtype:
            add_product(self.out, self.left.t(), self.right)
        elif self.vector is None:
            torch.mm(self.left, self.right)
        else:
            torch.addmm(self.vector, self.left, self.right)


@torch.no_grad()
def measured(
    forms: Iterable[Form], dtype: str, device: torch.device, clock: Clock = event_seconds
) -> list[ProductTimes]:
    """Measure products by torch and by each algorithm of the open library.

    Raises:
        EnvironmentFault: the library could not tell which algorithms it has.
    """
    rows = []
    for form in forms:
        x = Operands.of(form, DTYPES[dtype], device)
        calls = [partial(product, x.left, x.right, x.out, adds=form.kind == "wgrad", candidate=i, **x.more)
                 for i in range(x.count(form))]
        seconds = clock([x.by_torch, *calls])
        rows.append(ProductTimes(*form, dtype=dtype, torch_s=seconds[0], candidates_s=tuple(seconds[1:])))  # type: ignore[arg-type]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def measure_card(configs: Iterable[RunConfig], device: DeviceInfo, *, folder: Path | None = None,
                 clock: Clock = event_seconds) -> str:
    """Measure the products of runs on one device and write the card's table; return a line about it.

    Raises:
        EnvironmentFault: the table cannot be written.
    """
    runs = list(configs)
    if problem := lt_problem(runs[0].backend, device, runs[0].precision.dtype):
        return f"products: torch's alone ({problem})"
    dtype, library = runs[0].precision.dtype, library_name()
    forms = list(dict.fromkeys(form for run in runs for form in forms_of(run)))
    rows = measured(forms, dtype, device.torch_device, clock)
    path = write_table(read_table(device.name, library, folder)[0].with_rows(rows), folder)
    faster = sum(row.fastest(must_gain=True) is not None for row in rows)
    return f"products: {library} is faster for {faster} of {len(rows)}; written: {path}"


def lt_problem(backend: BackendConfig, device: DeviceInfo, dtype: str) -> str:
    """Return why the products of cublasLt or hipBLASLt cannot be used, or nothing. Opens the library."""
    if not device.is_gpu:
        return "cublasLt and hipBLASLt need a GPU"
    if dtype not in DTYPES:
        return f"products of cublasLt and hipBLASLt are for bf16 and fp16 here, not {dtype}"
    if backend.own_kernels == "off":
        return "own_kernels is off"
    if problem := kernels.kernels_status(device.kind)[1]:
        return problem
    kernels.load(device.kind)
    return open_library()


def lt_row(
    config: RunConfig, device: DeviceInfo, folder: Path | None = None
) -> tuple[ProviderRow, ProductTable | None]:
    """Return the row of the table of providers before anything is measured, and the card's table (None: unused).

    Raises:
        EnvironmentFault: ``backend.products`` asks for lt, which cannot serve.
    """
    asked, dtype, forms = config.backend.products, config.precision.dtype, forms_of(config)
    if asked == "torch":
        return ProviderRow("products", "torch", "asked for"), None
    problem = lt_problem(config.backend, device, dtype)
    kept = [found.words for found in kept_by_torch(config)]
    if not problem and not forms:
        problem = f"this run has no product for it; {'; '.join(kept)}"
    if problem and asked == "lt":
        raise refuse("products", asked, problem, "torch")
    if problem or (asked == "auto" and config.backend.deterministic):
        return ProviderRow("products", "torch", f"auto; {problem or 'deterministic'}"), None

    def row(*why: str) -> ProviderRow:
        return ProviderRow("products", "lt", "; ".join(filter(None, (*why, *kept, _may_keep(config)))))

    library = library_name()
    if asked == "lt" and config.backend.deterministic:
        return row("asked for", f"{library}, the heuristic's first choice (deterministic)"), None
    table, unread = read_table(device.name, library, folder)
    if asked == "lt":
        return row("asked for", library, unread), table
    faster = [times for times in table.of(forms, dtype).values() if times.fastest(must_gain=True) is not None]
    if faster:
        return row("auto", f"{library}, faster for {len(faster)} of {len(forms)} products here"), table
    slow = f"{library} is not faster for any product that {table_path(device.name, library, folder).name} has"
    why = unread or (slow if table.rows else f"no measured table for {device.name}; bench calibrate makes one")
    return ProviderRow("products", "torch", f"auto; {why}"), None


def _may_keep(config: RunConfig) -> str:
    """Say what a start may yet leave to torch, before it has chosen the chunks of tensor-parallel products."""
    layout = config.layout
    is_open = layout.tensor_parallel_size > 1 and not layout.tp_overlap_chunks and layout.tp_exchange == "collective"
    if not is_open:
        return ""
    return "torch's too: forward products, if the start divides them into chunks (layout.tp_overlap_chunks 0)"


def _settled(config: RunConfig, device: DeviceInfo, folder: Path | None, clock: Clock) -> dict[str, Any]:
    """Decide on rank 0: the row, the library, and the candidate of each product."""
    row, table = lt_row(config, device, folder)
    told: dict[str, Any] = {"row": [row.op, row.provider, row.why], "library": "", "card": device.name, "chosen": []}
    if row.provider != "lt":
        return told
    dtype, forms, by_name = config.precision.dtype, forms_of(config), config.backend.products == "lt"
    if table is None:
        counts = counted(forms, DTYPES[dtype], device.torch_device)
        first = [form for form in forms if counts[form]]
        chosen: dict[Form, int] = dict.fromkeys(first, 0)
    else:
        lacking = [form for form in forms if form not in table.of(forms, dtype)] if by_name else []
        if lacking:
            table = table.with_rows(measured(lacking, dtype, device.torch_device, clock))
            path = write_table(table, folder)
            told["row"][2] += f"; {len(lacking)} products measured, {path}"
        found = {form: times.fastest(must_gain=not by_name) for form, times in table.of(forms, dtype).items()}
        chosen = {form: candidate for form, candidate in found.items() if candidate is not None}
    return told | {"library": library_name(), "chosen": [[*form, candidate] for form, candidate in chosen.items()]}


def counted(forms: Iterable[Form], dtype: torch.dtype, device: torch.device) -> dict[Form, int]:
    """Return how many algorithms the library names here for each form; it then knows them, and is asked no more.

    Raises:
        EnvironmentFault: it could not tell.
    """
    found = {form: Operands.of(form, dtype, device, filled=False).count(form) for form in forms}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def choose_lt(
    config: RunConfig, device: DeviceInfo, rank: int, *, folder: Path | None = None, clock: Clock = event_seconds
) -> tuple[LinearKernels, ProviderRow]:
    """Collective: return the products of a run's linear layers and their row of the table of providers.

    ``folder``: of the card's table, in place of ``~/.cache/megatron_port``.

    Raises:
        EnvironmentFault: lt was asked for by name and cannot serve, ranks have different cards or libraries, or a rank
            lacks an algorithm; under ``auto`` all ranks then take torch's products, and the row says why.
    """
    told = agreed(lambda: _settled(config, device, folder, clock) if rank == 0 else {})
    told = json.loads(broadcast_text(json.dumps(told)) or "{}")
    chosen = {Form(*form): candidate for *form, candidate in told["chosen"]}
    try:
        agreed(lambda: _check_alike(config, device, told, chosen))
    except EnvironmentFault as fault:  # on every rank, in the words of the lowest that has one
        if config.backend.products == "lt":
            raise
        return PLAIN, ProviderRow("products", "torch", f"auto; {fault}")
    row = ProviderRow(*told["row"])
    return (LtLinearKernels(chosen, DTYPES[config.precision.dtype]) if chosen else PLAIN), row


def _check_alike(config: RunConfig, device: DeviceInfo, told: dict[str, Any], chosen: dict[Form, int]) -> None:
    """Raise EnvironmentFault unless this rank has the card, the library and the algorithms that rank 0 has chosen."""
    if not chosen:
        return
    problem = lt_problem(config.backend, device, config.precision.dtype)
    here = problem or f"{library_name()} on {device.name}"
    if here != (wanted := f"{told['library']} on {told['card']}"):
        raise EnvironmentFault(f"rank 0 has chosen products of {wanted}, and here is: {here}; all ranks need the same, "
                               'or backend.products = "torch"')
    for form, count in counted(chosen, DTYPES[config.precision.dtype], device.torch_device).items():
        if chosen[form] >= count:
            raise EnvironmentFault(f"{form.words}: {here} names {count} algorithms, and rank 0 has chosen number "
                                   f'{chosen[form]}; see that all ranks are alike, or set backend.products = "torch"')
