"""Our parameters beside those of a Hugging Face family (``model.families``): one table, read in both directions.

Everything that differs is the order of rows. With leading dimensions flattened (SwiGLU's [2, ffn, hidden]), each of our
parameters is a matrix (or a bias, a column), and a :class:`Run` says which of its rows are which rows of which tensor
there. GPT-2 keeps its matrices as [in, out] (``transposed``): their "rows" are the columns there. Importing reads the
runs that a box of ours meets, exporting those that a range of rows there meets, so no tensor is ever needed whole.

* Query, key and value: ours are by key/value group (its queries, its key, its value); GPT-2 has all queries, all keys,
  all values; GPT-NeoX and Falcon have our order; Llama has a matrix for each.
* Experts: ours are one parameter; there they are a matrix each, or one [experts, in, out] whose columns alternate
  between gate and up (GPT-OSS).
* Rotary: ours pairs element i of a head with i + d/2, GPT-NeoX with i + r/2 for its r rotated elements, which come
  first, and GPT-J 2i with 2i + 1 of them (``model.rotary``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import BUFFER, WEIGHT
from megatron_port.core.errors import CheckpointError
from megatron_port.core.model.shapes import buffer_shapes, parameter_shapes
from megatron_port.ext.experts.spec import LAST_STEP
from megatron_port.ext.families import family_named
from megatron_port.ext.families.family import Dimensions, Names, Rotation
from megatron_port.run.same_model import recurrent_of

# Rows of our parameters that are rows of a Hugging Face family's tensors.

@dataclass(frozen=True, slots=True)
class Run:
    """``count`` rows of a parameter of ours from ``ours`` on are the rows of ``tensor`` from ``theirs`` on."""

    ours: int
    tensor: str
    theirs: int
    count: int
    step: int = 1
    """From a row there to the next."""
    expert: int | None = None
    """Place along the first dimension there, where a tensor has all experts; None: there is no such dimension."""

    def rows(self, start: int, count: int) -> slice:
        """Return the rows there that ``count`` rows of ours from ``start`` on are, all of them in this run."""
        first = self.theirs + (start - self.ours) * self.step
        return slice(first, first + (count - 1) * self.step + 1, self.step)


def expert_runs(rows: Sequence[int], there: str | tuple[str, ...], prefix: str, kind: str) -> Iterator[Run]:
    """Runs of a parameter of all experts.

    Args:
        rows: dimensions of its rows: experts, matrices of an expert where it has several, rows of a matrix.
        there: a name for each matrix of one expert, ``{}`` for its number; or one of a tensor of all experts, in which
            rows of an expert's matrices alternate.
        prefix: what stands before these names.
        kind: ``weight`` or ``bias``.
    """
    each, packed = rows[-1], rows[1] if len(rows) == 3 else 1
    for expert in range(rows[0]):
        for part in range(packed):
            ours = (expert * packed + part) * each
            if isinstance(there, str) and "{}" not in there:
                tensor = f"{prefix}{there}" + ("" if kind == "weight" else f"_{kind}")
                yield Run(ours, tensor, part, each, step=packed, expert=expert)
            else:
                name = there if isinstance(there, str) else there[part]
                yield Run(ours, f"{prefix}{name.format(expert)}.{kind}", 0, each)


def overlaps(runs: Sequence[Run], first: int, count: int) -> list[tuple[Run, int, int]]:
    """Return (run, first row, rows) of the rows [first, first + count) of ours, in order; ``runs`` tile ours."""
    out = []
    for at in range(max(bisect_right(runs, first, key=lambda run: run.ours) - 1, 0), len(runs)):
        run = runs[at]
        if run.ours >= first + count:
            break
        start, stop = max(first, run.ours), min(first + count, run.ours + run.count)
        if start < stop:
            out.append((run, start, stop - start))
    return out


MODULE_HEAD = "lm_head.weight"
"""The head in transformers 5's modules, whatever the files call it."""


def _is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Norms and biases; SwiGLU's [2, ffn] bias too."""
    return len(shape) == 1 or name.endswith(".bias")


def _row_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if _is_vector(name, shape) else shape[:-1]


@dataclass(frozen=True)
class Mapped:
    """A parameter of ours and where its rows are there."""

    name: str
    shape: tuple[int, ...]
    """Ours, logical."""
    runs: tuple[Run, ...]
    """By rising ``ours``; they tile its rows."""
    transposed: bool
    kind: str = WEIGHT
    """WEIGHT | BUFFER, which is float32 wherever it lies"""
    dimensions: Dimensions = ()
    """There, where it has others than [rows, columns] or [rows]."""

    @property
    def rows(self) -> int:
        """Rows of our parameter, its leading dimensions flattened."""
        return prod(_row_shape(self.name, self.shape))

    @property
    def columns(self) -> int | None:
        """Columns of our parameter; None: a vector."""
        return None if _is_vector(self.name, self.shape) else self.shape[-1]


@dataclass(frozen=True)
class Tensor:
    """A tensor there and where its rows are in parameters of ours, of one or of several."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Mapped, Run], ...]
    """By rising ``expert`` and ``theirs``; they tile its rows (its columns where ``mapped.transposed``)."""
    copy_of: str = ""
    """The tensor there that it repeats; files may lack it."""

    @property
    def mapped(self) -> Mapped:
        """One of our parameters that it has rows of: all of them have its columns and its kind."""
        return self.pieces[0][0]


def hf_mapping(model: ModelConfig, family: str) -> dict[str, Mapped]:
    """Canonical name → :class:`Mapped`, for every parameter of ``model`` in our order, then for its buffers."""
    found = {name: _mapped(name, shape, model, family) for name, shape in parameter_shapes(model).items()}
    buffers = {name: shape for name, shape in buffer_shapes(model).items() if not name.endswith(LAST_STEP)}
    return found | {
        name: replace(_mapped(name, shape, model, family), kind=BUFFER) for name, shape in buffers.items()
    }


def hf_tensors(model: ModelConfig, family: str) -> Iterator[Tensor]:
    """The tensors there, in our order of parameters, each once. A tied head has none of its own.

    Modules of multi-token prediction have copies of the token table and of the head's matrix, which come last.
    """
    mapping = hf_mapping(model, family)
    by_name: dict[str, list[tuple[Mapped, Run]]] = {}
    for mapped in mapping.values():
        for run in mapped.runs:
            by_name.setdefault(run.tensor, []).append((mapped, run))
    for name, pieces in by_name.items():
        ordered = tuple(sorted(pieces, key=lambda piece: (piece[1].expert or 0, piece[1].theirs)))
        mapped, last = ordered[-1]
        lead = () if last.expert is None else (last.expert + 1,)
        rows = sum(run.count for _, run in pieces) // prod(lead)
        sizes: dict[int | str, int] = {"rows": rows}
        sizes |= {} if mapped.columns is None else {"columns": mapped.columns}
        shape = tuple(sizes.get(size, 1) for size in mapped.dimensions or sizes)
        yield Tensor(name, lead + (shape[::-1] if mapped.transposed else shape), ordered)
    names = _names(model, family)
    table = mapping["embedding.word.weight"]
    for index in range(model.mtp_layers):
        before = names.prefix + names.layer.format(model.num_layers + index)
        for name, mapped in zip(names.ahead_copies, (table, mapping.get("head.weight", table))):
            same = tuple((mapped, run) for run in mapped.runs)
            yield Tensor(f"{before}{name}.weight", mapped.shape, same, copy_of=mapped.runs[0].tensor)


def _names(model: ModelConfig, family: str) -> Names:
    found = family_named(family)
    return found.names if found.names_of is None else found.names_of(model)


def _names_at(name: str, model: ModelConfig, family: str) -> Names:
    """Return the names of the layer that a parameter of ours is in."""
    names, (kind, _, rest) = _names(model, family), name.partition(".")
    if not names.mixers or kind not in ("layers", "mtp"):
        return names
    layer = int(rest.partition(".")[0]) + (model.num_layers if kind == "mtp" else 0)
    return replace(names, inside={**names.inside, **names.mixers.get(model.mixer_of(layer), {})})


def _mapped(name: str, shape: tuple[int, ...], model: ModelConfig, family: str) -> Mapped:
    names, row_shape = _names_at(name, model, family), _row_shape(name, shape)
    rows = prod(row_shape)
    if name.startswith("layers.") and (of := names.rows.get(name.split(".", 2)[2])) is not None:
        prefix, at, runs_there = layer_there(model, names, name), 0, list[Run]()
        for tensor, first, count, *expert in of(replace(model, recurrent=recurrent_of(model))):
            runs_there.append(Run(at, f"{prefix}{tensor}", first, count, expert=expert[0] if expert else None))
            at += count
        convolution: Dimensions = ("rows", 1, "columns")
        others = {**names.dimensions, **dict.fromkeys(names.convolutions, convolution)}
        there_are = next((sizes for end, sizes in others.items() if tensor.endswith(end)), ())
        return Mapped(name, shape, tuple(runs_there), False, dimensions=there_are)
    if name.startswith("head."):
        return Mapped(name, shape, (Run(0, head_tensor(names, name), 0, rows),), False)
    module, _, kind = name.rpartition(".")
    there, prefix = _module_there(module, names, model)
    if there is None:
        raise CheckpointError(f"{name}: a {family} model has no such parameter; its names are those of another family")
    kind = names.kinds.get(kind, kind)
    if ".experts." in module:
        runs = tuple(expert_runs(row_shape, there, prefix, kind))
        return Mapped(name, shape, runs, runs[0].expert is not None and kind == "weight")
    if module.endswith("attention.qkv"):
        parts = (there,) * 3 if isinstance(there, str) else there
        tensors = tuple(f"{prefix}{part}.{kind}" for part in parts)
        return Mapped(name, shape, tuple(_qkv(model, names, tensors)), tensors[0].endswith(names.transposed))
    if module.endswith(("attention.query_norm", "attention.key_norm")) and model.qk_norm and rows == model.head_size:
        order = _head_rows(rows, model.rotary_size, names.rotation)
        return Mapped(name, shape, tuple(Run(a, f"{prefix}{there}.{kind}", b, n) for a, b, n in order), False)
    if module.endswith(("attention.query", "attention.query_up", "attention.kv_down")):
        tensor = f"{prefix}{there}.{kind}"
        make = _latent_and_key if module.endswith("kv_down") else _rotated_heads
        return Mapped(name, shape, tuple(make(model, tensor, rows)), False)
    if isinstance(there, tuple):
        each = rows // len(there)
        runs = tuple(Run(i * each, f"{prefix}{part}.{kind}", 0, each) for i, part in enumerate(there))
        return Mapped(name, shape, runs, False)
    packed = shape[0] if len(shape) > (1 if _is_vector(name, shape) else 2) else 1
    tensor, each = f"{prefix}{there}.{kind}", rows // packed
    runs = tuple(Run(i * each, tensor, i * each, each) for i in range(packed))  # a run never leaves its half
    return Mapped(name, shape, runs, tensor.endswith(names.transposed))


def head_tensor(names: Names, ours: str) -> str:
    """Return the name of the head's matrix or bias there, which no prefix stands before."""
    return f"{names.head.rpartition('.')[0]}.{ours.rpartition('.')[2]}"


def layer_there(model: ModelConfig, names: Names, name: str) -> str:
    """Return what stands there before the names of the layer that has a module or a parameter of a layer of ours."""
    _, index, inside = name.split(".", 2)
    number = int(index) if names.number is None else names.number(model, int(index), inside)
    return names.prefix + names.layer.format(number)


def _module_there(module: str, names: Names, model: ModelConfig) -> tuple[str | tuple[str, ...] | None, str]:
    """The name of a module of ours there (None: there is none), and what stands before it."""
    if module.startswith("layers."):
        return names.inside.get(module.split(".", 2)[2]), layer_there(model, names, module)
    if not module.startswith("mtp."):
        return names.outside.get(module), names.prefix
    _, index, inside = module.split(".", 2)
    prefix = names.prefix + names.layer.format(model.num_layers + int(index))
    part, _, rest = inside.partition(".")
    return (names.inside if names.ahead and part == "layer" else names.ahead).get(rest or part), prefix


def _qkv(model: ModelConfig, names: Names, tensors: tuple[str, ...]) -> Iterator[Run]:
    """Runs of the fused projection; ``tensors``: of queries, keys and values, one three times where they are fused."""
    heads, groups, d = model.num_attention_heads * (1 + model.attention_gate), model.kv_heads, model.head_size
    per = heads // groups
    fused = tensors[0] == tensors[1]
    at = 0
    for group in range(groups):
        for part, count, first in ((0, per, group * per), (1, 1, group), (2, 1, group)):
            for head in range(first, first + count):
                start = _first_head(names, part, head, heads, groups) * d if fused else head * d
                still = part == 2 or (part == 0 and model.attention_gate and head % 2)  # behind each query is its gate
                for ours, theirs, length in _head_rows(d, model.rotary_size, "halves" if still else names.rotation):
                    yield Run(at + ours, tensors[part], start + theirs, length)
                at += d


def _pairs(ours: int, tensor: str, theirs: int, size: int, apart: int) -> Iterator[Run]:
    """Neighbouring pairs there, whose halves are ``apart`` rows from one another in ours."""
    for part in (0, 1):
        for i in range(size // 2):
            yield Run(ours + part * apart + i, tensor, theirs + 2 * i + part, 1)


def _latent_and_key(model: ModelConfig, tensor: str, rows: int) -> Iterator[Run]:
    """Rows of latent attention's product for keys and values: the latent, then the rotated part of the keys."""
    rotated = model.qk_rope_head_dim
    yield Run(0, tensor, 0, rows - rotated)
    yield from _pairs(rows - rotated, tensor, rows - rotated, rotated, rotated // 2)


def _rotated_heads(model: ModelConfig, tensor: str, rows: int) -> Iterator[Run]:
    """Rows of latent attention's queries: of each head what stays, then neighbouring pairs that are rotated. Ours has
    the pairs' first halves, half of what stays, the second halves, the rest."""
    rotated, each = model.qk_rope_head_dim, model.head_size
    still = (each - rotated) // 2
    for at in range(0, rows, each):
        runs = [
            *_pairs(at, tensor, at + 2 * still, rotated, each // 2),
            Run(at + rotated // 2, tensor, at, still), Run(at + each // 2 + rotated // 2, tensor, at + still, still),
        ]
        yield from sorted((run for run in runs if run.count), key=lambda run: run.ours)


def _first_head(names: Names, part: int, head: int, heads: int, groups: int) -> int:
    """Place, in heads, of a query (part 0), key or value head in a fused projection there."""
    if not names.qkv_by_group:
        return (0, heads, heads + groups)[part] + head
    per = heads // groups
    return head // per * (per + 2) + head % per if part == 0 else head * (per + 2) + per + part - 1


def _head_rows(d: int, rotated: int, rotation: Rotation) -> Iterator[tuple[int, int, int]]:
    """Yield (first row of ours, of theirs, count) within a head."""
    r, still = rotated // 2, (d - rotated) // 2
    if rotation == "halves" or (rotation == "first" and rotated == d):
        yield 0, 0, d
        return
    if rotation == "interleaved":
        for half in (0, 1):
            yield from ((half * d // 2 + i, 2 * i + half, 1) for i in range(r))
            if still:
                yield half * d // 2 + r, rotated + half * still, still
        return
    yield 0, 0, r
    yield r, rotated, still
    yield d // 2, r, r
    yield d // 2 + r, rotated + still, still
