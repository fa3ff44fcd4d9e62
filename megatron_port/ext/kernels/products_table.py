"""Measured times of matrix products on a card: torch's, and each algorithm of cublasLt or hipBLASLt; kept in a file.

A file is for one card and one version of the library, whose heuristic names the same algorithms in the same order
everywhere. A number in it that was changed by accident is found by its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from megatron_port.core.config.ranges import at_least
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.io.files import read_regular, write_output
from megatron_port.core.io.typed_json import LARGEST, WrongContent, parse_json, typed
from megatron_port.core.layers.embedding import padded_vocab_size
from megatron_port.ext.kernels.settings import linear_shapes

Kind = Literal["forward", "forward+bias", "dgrad", "wgrad"]
LEAST_GAIN = 0.01
"""Share of torch's time that a product must save to be taken in its place: less is noise."""


class Form(NamedTuple):
    """A product of a linear layer: [rows, inner] times [inner, columns]."""

    kind: Kind
    """wgrad: [rows, columns] in float32, added to a sum."""
    rows: int
    columns: int
    inner: int

    @property
    def words(self) -> str:
        """The product in an error."""
        return f"{self.kind} [{self.rows}, {self.inner}] × [{self.inner}, {self.columns}]"


FORWARD: tuple[Kind, ...] = ("forward", "forward+bias")
ENTRIES, EXITS = ("attention.qkv", "mlp.up"), ("attention.output", "mlp.down")


class Kept(NamedTuple):
    """Products of some linears that never come to cublasLt or hipBLASLt, and the setting that keeps them with torch."""

    linears: tuple[str, ...]
    kinds: tuple[Kind, ...]
    why: str

    @property
    def words(self) -> str:
        """The products in the table of providers."""
        which = "all" if "wgrad" in self.kinds else "forward and dgrad" if "dgrad" in self.kinds else "forward"
        return f"torch's: {which} of {', '.join(self.linears)} ({self.why})"


def kept_by_torch(config: RunConfig) -> list[Kept]:
    """Return the products of a run that are torch's in its layout, for whatever algorithms were chosen."""
    layout, fp8 = config.layout, config.precision.fp8
    divided, sequence, found = layout.tensor_parallel_size > 1, layout.sequence_parallel, list[Kept]()
    everything: tuple[Kind, ...] = (*FORWARD, "dgrad", "wgrad")
    if fp8 != "none" or config.quantisation.enabled:
        why = f'precision.fp8 "{fp8}"' if fp8 != "none" else f'quantisation.weights "{config.quantisation.weights}"'
        found.append(Kept(tuple(layer_linears(config)), everything, why))
    elif divided and layout.tp_exchange != "collective" and sequence:
        why = f'layout.tp_exchange "{layout.tp_exchange}"'
        found += [Kept(_whole(config), FORWARD, why), Kept(EXITS, (*FORWARD, "dgrad"), why)]
    elif divided and layout.tp_overlap_chunks > 1:
        linears = (*_whole(config), *EXITS) if sequence else EXITS
        found.append(Kept(linears, FORWARD, f"layout.tp_overlap_chunks {layout.tp_overlap_chunks}"))
    if config.activations.head_chunk > 0:
        found.append(Kept(("head",), everything, f"activations.head_chunk {config.activations.head_chunk}"))
    return found


def _whole(config: RunConfig) -> tuple[str, ...]:
    """Linears at the entries of a tensor-parallel region that have one weight: only those overlap."""
    return tuple(name for name in ENTRIES if name in layer_linears(config))


def layer_linears(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) on a rank of each weight of a layer's linears.

    Tensor-parallel ranks that share a key and value have a weight for their queries, and one for what they share.
    """
    model, tp = config.model, config.layout.tensor_parallel_size
    shapes = {name: (int(inputs), int(outputs)) for name, (inputs, outputs) in linear_shapes(config).items()}
    if model.kv_heads_held(tp) == model.kv_heads:
        return shapes
    hidden, outputs = shapes.pop("attention.qkv")
    shared = 2 * model.head_size
    return {"attention.q": (hidden, outputs - shared), "attention.kv": (hidden, shared), **shapes}


def forms_of(config: RunConfig) -> list[Form]:
    """Return the products of a run's linear layers and of its head on a rank that come to a library, each form once.

    Not those that its layout leaves to torch (:func:`kept_by_torch`), of experts and of adapters.
    """
    model, layout = config.model, config.layout
    tokens = model.seq_length // layout.context_parallel_size * config.batch.micro_batch_size
    vocab = padded_vocab_size(model.vocab_size, tp=layout.tensor_parallel_size, multiple=layout.vocab_padding_multiple)
    shapes = layer_linears(config) | {"head": (model.hidden_size, vocab // layout.tensor_parallel_size)}
    kept = {(name, kind) for linears, kinds, _ in kept_by_torch(config) for name in linears for kind in kinds}
    biased = dict.fromkeys(("attention.qkv", "attention.q", "attention.kv"), model.add_bias or model.qkv_bias)
    biased["head"] = model.head_bias  # other biases are added with what follows
    found: dict[Form, None] = {}
    for name, (inputs, outputs) in shapes.items():
        forward: Kind = "forward+bias" if biased.get(name) else "forward"
        of_linear = (Form(forward, tokens, outputs, inputs), Form("dgrad", tokens, inputs, outputs),
                     Form("wgrad", outputs, inputs, tokens))
        found |= {form: None for form in of_linear if (name, form.kind) not in kept}
    return list(found)


Seconds = Annotated[float, at_least(0.0)]


@dataclass(frozen=True)
class ProductTimes:
    """Seconds of one product on the device."""

    kind: Kind
    rows: Annotated[int, at_least(1)]
    columns: Annotated[int, at_least(1)]
    inner: Annotated[int, at_least(1)]
    dtype: Literal["bf16", "fp16"]
    torch_s: Seconds
    candidates_s: tuple[Seconds, ...]
    """By candidate, in the heuristic's order; empty: the library has none."""

    @property
    def form(self) -> Form:
        """The product."""
        return Form(self.kind, self.rows, self.columns, self.inner)

    def fastest(self, *, must_gain: bool) -> int | None:
        """Return the fastest candidate; None: there is none or, with ``must_gain``, torch is about as fast."""
        if not self.candidates_s:
            return None
        best = min(range(len(self.candidates_s)), key=self.candidates_s.__getitem__)
        slower = self.candidates_s[best] > (1 - LEAST_GAIN) * self.torch_s
        return None if must_gain and slower else best


@dataclass(frozen=True)
class ProductTable:
    """Times on one card by one version of a library."""

    card: str
    library: str
    """cublasLt 130100"""
    rows: tuple[ProductTimes, ...] = ()

    def with_rows(self, rows: Iterable[ProductTimes]) -> ProductTable:
        """Return the table with rows added, or in place of those of the same product."""
        by_form = {(row.form, row.dtype): row for row in (*self.rows, *rows)}
        return ProductTable(self.card, self.library, tuple(by_form.values()))

    def of(self, forms: Iterable[Form], dtype: str) -> dict[Form, ProductTimes]:
        """Return the rows of products in a dtype, as far as there are any."""
        rows = {row.form: row for row in self.rows if row.dtype == dtype}
        return {form: rows[form] for form in forms if form in rows}

    def text(self) -> str:
        """Return the file's text."""
        content = {"card": self.card, "library": self.library, "rows": [asdict(row) for row in self.rows]}
        return json.dumps({"digest": digest_of(content), **content}, indent=1) + "\n"


def digest_of(content: Mapping[str, Any]) -> str:
    """Return a digest of a table's content without its digest."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=16).hexdigest()


def table_path(card: str, library: str, folder: Path | None = None) -> Path:
    """Return where the table of a card and a library is kept; ``folder``: in place of ``~/.cache/megatron_port``."""
    name = re.sub(r"[^a-z0-9]+", "-", f"products {card} {library}".lower()).strip("-")
    return (folder or Path.home() / ".cache" / "megatron_port") / f"{name}.json"


def read_table(card: str, library: str, folder: Path | None = None) -> tuple[ProductTable, str]:
    """Return (the table of a card and a library, "") or (an empty one, why it is not read).

    The reason is empty too where there is no file.
    """
    empty, path = ProductTable(card, library), table_path(card, library, folder)
    try:
        content = parse_json(read_regular(path, LARGEST))
        table = typed(ProductTable, content)
        if content.get("digest") != digest_of(content):
            raise WrongContent("its digest is that of other numbers")
        if (table.card, table.library) != (card, library):
            raise WrongContent(f"it is for {table.card} and {table.library}")
    except FileNotFoundError:
        return empty, ""
    except (OSError, WrongContent) as error:
        return empty, f"{path} is not read: {error}"
    return table, ""


def write_table(table: ProductTable, folder: Path | None = None) -> Path:
    """Write a table where :func:`read_table` looks for it; return the path.

    Raises:
        EnvironmentFault: the file system refused.
    """
    path = table_path(table.card, table.library, folder)
    with contextlib.suppress(OSError):  # then the next line says which file
        path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, table.text())
    return path
