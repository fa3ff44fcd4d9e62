"""Our parameters beside those of Hugging Face's GPT-2, GPT-NeoX and Llama: one table, read in both directions.

Everything that differs is the order of rows. With leading dimensions flattened (SwiGLU's [2, ffn, hidden]), each of our
parameters is a matrix (or a bias, a column), and a :class:`Run` says which of its rows are which rows of which tensor
there. GPT-2 keeps its matrices as [in, out] (``transposed``): their "rows" are the columns there. Importing reads the
runs that a box of ours meets, exporting those that a range of rows there meets, so no tensor is ever needed whole.

* Query, key and value: ours are by key/value group (its queries, its key, its value); GPT-2 has all queries, all keys,
  all values; GPT-NeoX has our order; Llama has a matrix for each.
* Partial rotary: ours pairs element i of a head with i + d/2, GPT-NeoX with i + r/2 for its r rotated elements, which
  come first (``model.rotary``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron_port.config.schema import ModelConfig
from megatron_port.model.shapes import parameter_shapes

GPT2, NEOX, LLAMA = "gpt2", "gpt_neox", "llama"
FAMILIES = (GPT2, NEOX, LLAMA)
PREFIX = {GPT2: "transformer.", NEOX: "gpt_neox.", LLAMA: "model."}
"""Before every name but the head's; files of the bare model leave it out."""
HEAD = {GPT2: "lm_head.weight", NEOX: "embed_out.weight", LLAMA: "lm_head.weight"}
MODULE_HEAD = "lm_head.weight"
"""The head in transformers 5's modules, whatever the files call it."""
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
"""Ends of names that older versions saved although they are no parameters."""

_LAYER = {
    GPT2: ("h.{}.", {
        "norm1": "ln_1", "norm2": "ln_2", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }),
    NEOX: ("layers.{}.", {
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attention.qkv": "attention.query_key_value",
        "attention.output": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
    }),
    LLAMA: ("layers.{}.", {
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attention.output": "self_attn.o_proj",
        "mlp.down": "mlp.down_proj",
    }),
}
_OUTSIDE = {
    GPT2: {"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"},
    NEOX: {"embedding.word": "embed_in", "final_norm": "final_layer_norm"},
    LLAMA: {"embedding.word": "embed_tokens", "final_norm": "norm"},
}
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""GPT-2's Conv1D matrices."""


@dataclass(frozen=True)
class Run:
    """``count`` rows of a parameter of ours from ``ours`` on are the rows of ``tensor`` from ``theirs`` on."""

    ours: int
    tensor: str
    theirs: int
    count: int


def _is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Norms and biases; SwiGLU's [2, ffn] bias too."""
    return len(shape) == 1 or name.endswith(".bias")


def _rows(name: str, shape: tuple[int, ...]) -> int:
    return prod(shape) if _is_vector(name, shape) else prod(shape[:-1])


@dataclass(frozen=True)
class Mapped:
    """A parameter of ours and where its rows are there."""

    name: str
    shape: tuple[int, ...]
    """Ours, logical."""
    runs: tuple[Run, ...]
    """By rising ``ours``; they tile its rows."""
    transposed: bool

    @property
    def rows(self) -> int:
        """Rows of our parameter, its leading dimensions flattened."""
        return _rows(self.name, self.shape)

    @property
    def columns(self) -> int | None:
        """Columns of our parameter; None: a vector."""
        return None if _is_vector(self.name, self.shape) else self.shape[-1]


@dataclass(frozen=True)
class Tensor:
    """A tensor there and where its rows are in a parameter of ours."""

    name: str
    shape: tuple[int, ...]
    mapped: Mapped
    runs: tuple[Run, ...]
    """By rising ``theirs``; they tile its rows (its columns where ``mapped.transposed``)."""


def hf_mapping(model: ModelConfig, family: str) -> dict[str, Mapped]:
    """Canonical name → :class:`Mapped`, for every parameter of ``model``, in our order."""
    return {name: _mapped(name, shape, model, family) for name, shape in parameter_shapes(model).items()}


def hf_tensors(model: ModelConfig, family: str) -> Iterator[Tensor]:
    """The tensors there, in our order of parameters, each once. A tied head has none of its own."""
    for mapped in hf_mapping(model, family).values():
        by_name: dict[str, list[Run]] = {}
        for run in mapped.runs:
            by_name.setdefault(run.tensor, []).append(run)
        for name, runs in by_name.items():
            rows = sum(r.count for r in runs)
            shape = (rows,) if mapped.columns is None else (rows, mapped.columns)
            ordered = tuple(sorted(runs, key=lambda r: r.theirs))
            yield Tensor(name, shape[::-1] if mapped.transposed else shape, mapped, ordered)


def _mapped(name: str, shape: tuple[int, ...], model: ModelConfig, family: str) -> Mapped:
    rows = _rows(name, shape)
    if name == "head.weight":
        return Mapped(name, shape, (Run(0, HEAD[family], 0, rows),), False)
    module, _, kind = name.rpartition(".")
    prefix = PREFIX[family]
    if module in _OUTSIDE[family]:
        there = f"{prefix}{_OUTSIDE[family][module]}.{kind}"
        return Mapped(name, shape, (Run(0, there, 0, rows),), False)
    _, index, inside = module.split(".", 2)
    layer, names = _LAYER[family]
    prefix += layer.format(index)
    if inside == "attention.qkv":
        return Mapped(name, shape, tuple(_qkv(model, family, prefix, kind)), family == GPT2 and kind == "weight")
    if family == LLAMA and inside == "mlp.up":
        half = rows // 2
        runs = (Run(0, f"{prefix}mlp.gate_proj.{kind}", 0, half), Run(half, f"{prefix}mlp.up_proj.{kind}", 0, half))
        return Mapped(name, shape, runs, False)
    there = f"{prefix}{names[inside]}.{kind}"
    return Mapped(name, shape, (Run(0, there, 0, rows),), family == GPT2 and there.endswith(_TRANSPOSED))


def _qkv(model: ModelConfig, family: str, prefix: str, kind: str) -> Iterator[Run]:
    heads, groups, d = model.num_attention_heads, model.kv_heads, model.head_size
    per = heads // groups
    at = 0
    for group in range(groups):
        for part, count, first in (("q", per, group * per), ("k", 1, group), ("v", 1, group)):
            for i in range(count):
                tensor, start = _place(family, prefix, kind, part, first + i, heads, d)
                for ours, theirs, length in _head_rows(d, model.rotary_size, family == NEOX and part != "v"):
                    yield Run(at + ours, tensor, start + theirs, length)
                at += d


def _place(family: str, prefix: str, kind: str, part: str, head: int, heads: int, d: int) -> tuple[str, int]:
    """Return (tensor, first row) of one head there."""
    if family == LLAMA:
        return f"{prefix}self_attn.{part}_proj.{kind}", head * d
    if family == NEOX:
        return f"{prefix}attention.query_key_value.{kind}", (3 * head + "qkv".index(part)) * d
    return f"{prefix}attn.c_attn.{kind}", ("qkv".index(part) * heads + head) * d


def _head_rows(d: int, rotated: int, partial: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (first row of ours, of theirs, count) within a head."""
    if not partial or rotated == d:
        yield 0, 0, d
        return
    r, still = rotated // 2, (d - rotated) // 2
    yield 0, 0, r
    yield r, rotated, still
    yield d // 2, r, r
    yield d // 2 + r, rotated + still, still
