"""What precision.fp8 asks of a run: bf16 around it, and matrices whose sizes on a rank are multiples of 16."""

from __future__ import annotations

import math

from megatron_port.core.config.conflicts import Rule, Table
from megatron_port.core.config.layout import either, multiples
from megatron_port.core.config.schema import RunConfig

ALIGN = 16
"""Elements that rows and columns of an 8-bit matrix must be multiples of (cuBLASLt and hipBLASLt)."""


def linear_shapes(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Linear of a layer → (inputs, outputs) on a rank; a fraction where tensor_parallel_size does not divide."""
    m, t = config.model, config.layout.tensor_parallel_size
    heads, d, ffn = m.num_attention_heads, m.head_size, m.ffn_size
    gates = 2 if m.gated else 1
    return {
        "attention.qkv": (m.hidden_size, (heads + 2 * m.kv_heads_held(t)) * d / t),
        "attention.output": (heads * d / t, m.hidden_size),
        "mlp.up": (m.hidden_size, gates * ffn / t),
        "mlp.down": (ffn / t, m.hidden_size),
    }


def _sizes(config: RunConfig) -> list[str]:
    m, t = config.model, config.layout.tensor_parallel_size
    shapes = linear_shapes(config)
    out = []

    def off(size: float) -> bool:
        # A size that tp does not divide is the layout's problem, said there.
        return size == int(size) and int(size) % ALIGN != 0

    def say(what: str, numbers: str, fix: str) -> None:
        out.append(f'precision.fp8 "{config.precision.fp8}": {what} {numbers}, not a multiple of {ALIGN}; {fix}')

    if off(m.hidden_size):
        unit = ALIGN if m.head_dim else math.lcm(ALIGN, m.num_attention_heads)
        near = either(multiples(m.hidden_size, unit))
        say("attention.qkv and mlp.up have", f"hidden_size {m.hidden_size} inputs", f"use hidden_size {near}")
    rows, columns = shapes["attention.qkv"][1], shapes["attention.output"][0]
    # Where the head size follows from the hidden size, fixing that fixes both.
    if (off(rows) or off(columns)) and (m.head_dim or not off(m.hidden_size)):
        heads, each = m.num_attention_heads, f"heads of {m.head_size} / tensor_parallel_size {t}"
        fix = f"use head_dim {either(multiples(m.head_size, ALIGN))}"
        if off(rows):
            say("attention.qkv has", f"({heads} + 2 × {m.kv_heads_held(t)}) {each} = {rows:g} outputs on a rank", fix)
        else:
            say("attention.output has", f"{heads} {each} = {columns:g} inputs on a rank", fix)
    if off(shapes["mlp.down"][0]):
        near = either(multiples(m.ffn_size, ALIGN * t))
        numbers = f"ffn_hidden_size {m.ffn_size} / tensor_parallel_size {t} = {m.ffn_size // t} inputs on a rank"
        say("mlp.down has", numbers, f"use ffn_hidden_size {near}")
    held = m.seq_length // config.layout.context_parallel_size
    tokens = held * config.batch.micro_batch_size
    # Under rowwise the products that sum over tokens stay in bf16.
    if config.precision.fp8 == "tensorwise" and off(tokens):
        unit = ALIGN // math.gcd(ALIGN, held)
        near = either(multiples(config.batch.micro_batch_size, unit))
        say("the weights' gradients sum over", f"{held} positions × micro_batch_size "
            f"{config.batch.micro_batch_size} = {tokens} tokens", f"use micro_batch_size {near}")
    return out


CONFLICTS = (Table(asked='precision.fp8 "{c.precision.fp8}"', on=lambda c: c.precision.fp8 != "none", sized=True, rows=(
    Rule(lambda c: c.precision.dtype != "bf16",
         '{asked} needs precision.dtype "bf16", not "{c.precision.dtype}"; use bf16, or fp8 = "none"'),
), more=(_sizes,)),)
