"""Mixers with a state beside Gated DeltaNet: each against a formula for one position after the other, transformers' own
module, its recurrence in chunks, its memory in generation, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rank_memory import events_of, most
from test_mixers import layer_of
from torch.nn.functional import silu

from megatron_port.core.config.checks import problems
from megatron_port.core.config.loader import load
from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import ActivationsConfig, DataConfig, LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.engine.module import recorded_parameters
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.mixers.recurrence import Operands, in_chunks, in_steps, passage, zero_state
from megatron_port.ext.mixers.recurrent import Recurrent
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.memory import stage_memory
from megatron_port.tools.plan.step import plan_step

BATCH, SEQ = 2, 150
MODEL = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, seq_length=SEQ, vocab_size=100, normalization="rmsnorm",
    add_bias=False,
)
# One token long, on a chunk's edge, one after it, across one.
STARTS = ((0, 1, 2, 63, 64, 70, 128, 149), (0, 5, 65, 66, 90))


def mamba_of(**recurrent: Any) -> ModelConfig:
    sizes = {"key_size": 5, "value_size": 3, "kernel": 4, **recurrent}
    return replace(MODEL, mixer="mamba2", recurrent=RecurrentConfig(**sizes))


MODELS = {
    "short_conv": replace(MODEL, mixer="short_conv", recurrent=RecurrentConfig(kernel=3)),
    "short_conv, biases": replace(
        MODEL, mixer="short_conv", recurrent=RecurrentConfig(heads=6, kernel=4, segment=7, convolution_bias=True)
    ),
    "mamba2, groups": mamba_of(heads=4, key_heads=2, chunk=16, segment=40),
    "mamba2, one group": mamba_of(heads=4, key_heads=1, convolution_bias=True, step_min=0.4, step_max=1.5),
    "mamba2, norm of all": mamba_of(heads=6, key_heads=3, gated_norm="all", norm_before_gate=True),
    "mamba2, norm of groups": mamba_of(heads=6, key_heads=3, norm_before_gate=True),
    "mamba2, factors": mamba_of(
        heads=4, key_heads=2, multipliers=(0.5, 0.7, 1.3, 0.8, 1.2), result_multiplier=0.6, convolution_bias=True,
    ),
    "mamba2, one group, factors": mamba_of(
        heads=4, key_heads=1, multipliers=(0.5, 0.7, 1.3, 0.8, 1.2), gated_norm="none", convolution_bias=True,
    ),
    "mamba2, no norm": mamba_of(heads=2, key_heads=2, gated_norm="none", step_max=0.8),
    "kda": replace(MODEL, mixer="kda", recurrent=RecurrentConfig(heads=3, key_size=5, value_size=4)),
    "kda, chunks": replace(MODEL, mixer="kda", recurrent=RecurrentConfig(
        heads=2, key_size=3, value_size=6, chunk=21, segment=50,
    )),
}
every = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
documents = pytest.mark.parametrize("starts", [None, STARTS], ids=["one document", "documents"])


def mixer_of(model: ModelConfig, starts: tuple[tuple[int, ...], ...] | None = None, **more: Any) -> Recurrent:
    """The mixer of a layer, of weights that are not small, with documents that begin at ``starts``."""
    mixer = layer_of(model, **more).attention
    assert isinstance(mixer, Recurrent)
    if starts is not None:
        begun = torch.zeros(len(starts), model.seq_length, dtype=torch.int32)
        for row, at in zip(begun, starts, strict=True):
            for start in at:
                row[start:] = start
        context = mixer.step.current
        assert isinstance(context, StepContext)
        mixer.step.current = replace(context, document_starts=begun)
    return mixer


def rows_in(model: ModelConfig) -> torch.Tensor:
    shape = model.seq_length, BATCH, model.hidden_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def projected(mixer: Recurrent, x: torch.Tensor) -> torch.Tensor:
    """What ``mix`` takes."""
    packed: torch.Tensor = mixer.packed(x) if mixer.shared is None else mixer.project(x)
    return packed


def applied(mixer: Recurrent, x: torch.Tensor) -> torch.Tensor:
    """What the mixer adds to the residual stream."""
    out: torch.Tensor = mixer.output(mixer.mix(projected(mixer, x)))
    return out if mixer.output.bias is None else out + mixer.output.bias


def named(mixer: Recurrent) -> dict[str, torch.Tensor]:
    """Parameters by the end of their canonical name."""
    return {r.name.partition(".attention.")[2]: p for r, p in recorded_parameters(mixer)}


# ------------------------------------------------------------------- formulas of one sample, position after position


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """y_t of the rows x [n, channels] of one document."""
    taps = weight.shape[1]
    out = []
    for t in range(len(x)):
        y = torch.zeros_like(x[0]) if bias is None else bias
        for j in range(min(taps, t + 1)):
            y = y + weight[:, taps - 1 - j] * x[t - j]
        out.append(y)
    return out


def short_conv(p: dict[str, torch.Tensor], x: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    units = model.recurrent.heads or model.num_attention_heads
    rows = x @ p["packed.weight"].T + p.get("packed.bias", 0.0)
    b, c, v = rows.view(len(x), units, 3, -1).unbind(2)
    y = torch.stack(convolved((b * v).flatten(1), p["convolution.weight"], p.get("convolution.bias")))
    return (c.flatten(1) * y) @ p["output.weight"].T + p.get("output.bias", 0.0)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + MODEL.norm_epsilon).sqrt()


def mamba_rows(p: dict[str, torch.Tensor], x: torch.Tensor, r: RecurrentConfig) -> tuple[torch.Tensor, ...]:
    """x [n, heads, value], B, C [n, groups, key], gate [n, heads, value] and time step [n, heads] of one document."""
    h, g, k, v = r.heads, r.key_heads, r.key_size, r.value_size
    rows, (of_gate, of_value, of_key, of_query, of_step) = x @ p["packed.weight"].T, r.multipliers or (1.0,) * 5
    if g == 1:
        values, gate, step = rows.view(len(x), h, -1).split((v, v, 1), dim=-1)
        b, c = (x @ p["shared.weight"].T).split(k, dim=-1)
        channels = torch.cat((of_value * values.flatten(1), of_key * b, of_query * c), dim=-1)
        weight = torch.cat((p["convolution.weight"], p["shared_convolution.weight"]))
        bias = torch.cat((p["convolution.bias"], p["shared_convolution.bias"])) if r.convolution_bias else None
    else:
        rows = rows.view(len(x), g, -1)
        values, b, c, gate, step = rows.split((h // g * v, k, k, h // g * v, h // g), dim=-1)
        mixed = torch.cat((of_value * values, of_key * b, of_query * c), dim=-1)
        channels, weight, bias = mixed.flatten(1), p["convolution.weight"], p.get("convolution.bias")
    y = silu(torch.stack(convolved(channels, weight, bias)))
    if g == 1:
        values, b, c = y.split((h * v, k, k), dim=-1)
    else:
        values, b, c = y.view(len(x), g, -1).split((h // g * v, k, k), dim=-1)
    heads = len(x), h, v
    return (
        values.reshape(heads), b.reshape(len(x), g, k), c.reshape(len(x), g, k), of_gate * gate.reshape(heads),
        of_step * step.reshape(len(x), h),
    )


def mamba2(p: dict[str, torch.Tensor], x: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    r = model.recurrent
    values, b, c, gate, step = mamba_rows(p, x, r)
    step = torch.log(1 + torch.exp(step + p["step_bias"])).clamp(r.step_min, r.step_max or torch.inf)
    columns = []
    for head in range(r.heads):
        group, state, column = head // (r.heads // r.key_heads), x.new_zeros(r.value_size, r.key_size), []
        for t in range(len(x)):
            decay = torch.exp(-torch.exp(p["decay"][head]) * step[t, head])
            state = decay * state + step[t, head] * torch.outer(values[t, head], b[t, group])
            column.append(state @ c[t, group] + p["skip"][head] * values[t, head])
        columns.append(torch.stack(column))
    y, gate = torch.stack(columns, dim=1), silu(gate)
    out = []
    for t in range(len(x)):
        row = y[t] if r.norm_before_gate else y[t] * gate[t]
        if r.gated_norm != "none":
            parts = row.flatten().chunk(r.key_heads if r.gated_norm == "group" else 1)
            row = (torch.cat([normed(part) for part in parts]) * p["norm.weight"]).view_as(row)
        out.append((row * gate[t] if r.norm_before_gate or r.gated_norm == "none" else row).flatten())
        if r.gated_norm == "none":
            out[-1] = (y[t] * gate[t]).flatten()
    return r.result_multiplier * torch.stack(out) @ p["output.weight"].T


def kda(p: dict[str, torch.Tensor], x: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    r = model.recurrent
    h, k, v = r.heads, r.key_size, r.value_size
    mixed, b = (x @ p["packed.weight"].T).view(len(x), h, -1).split((2 * k + v, 1), dim=-1)
    y = silu(torch.stack(convolved(mixed.flatten(1), p["convolution.weight"], None))).view(len(x), h, -1)
    query, key, value = y.split((k, k, v), dim=-1)
    low, gate = (x @ p["shared.weight"].T).chunk(2, dim=-1)
    forget = (low @ p["decay_up.weight"].T + p["decay_bias"]).view(len(x), h, k)
    gate = torch.sigmoid(gate @ p["gate_up.weight"].T).view(len(x), h, v)
    columns = []
    for head in range(h):
        state, column = x.new_zeros(k, v), []
        for t in range(len(x)):
            kt, qt = (z[t, head] / (z[t, head].square().sum() + 1e-6).sqrt() for z in (key, query))
            hold = torch.diag(torch.exp(-torch.exp(p["decay"][head]) * torch.log(1 + torch.exp(forget[t, head]))))
            rate = torch.sigmoid(b[t, head])
            state = (torch.eye(k) - rate * torch.outer(kt, kt)) @ hold @ state + rate * torch.outer(kt, value[t, head])
            column.append(normed(qt @ state / k**0.5) * p["norm.weight"] * gate[t, head])
        columns.append(torch.stack(column))
    return torch.stack(columns, dim=1).flatten(1) @ p["output.weight"].T


FORMULAS: dict[str, Callable[..., torch.Tensor]] = {"short_conv": short_conv, "mamba2": mamba2, "kda": kda}


def by_formula(
    mixer: Recurrent, model: ModelConfig, x: torch.Tensor, starts: tuple[tuple[int, ...], ...] | None
) -> torch.Tensor:
    """Each document of each sample by itself."""
    formula, p = FORMULAS[model.mixer], named(mixer)
    samples = []
    for i in range(x.shape[1]):
        edges = [*(starts[i] if starts is not None else (0,)), len(x)]
        samples.append(torch.cat([formula(p, x[a:b, i], model) for a, b in zip(edges, edges[1:], strict=False)]))
    return torch.stack(samples, dim=1)


@every
@documents
def test_a_mixer_is_its_formula(model: ModelConfig, starts: tuple[tuple[int, ...], ...] | None) -> None:
    mixer, x = mixer_of(model, starts), rows_in(model).requires_grad_()
    wanted = by_formula(mixer, model, x, starts)
    factor = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = [x, *mixer.parameters()]
    gradients = torch.autograd.grad((wanted * factor).sum(), leaves)
    found = applied(mixer, x)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    for want, got, name in zip(
        gradients, torch.autograd.grad((found * factor).sum(), leaves), ["x", *named(mixer)], strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10 * float(want.abs().max()), msg=name)


# ------------------------------------------------------------------------------------------------ generation


@every
def test_tokens_after_a_memory_are_those_of_whole_sequences(model: ModelConfig) -> None:
    mixer, x = mixer_of(replace(model, seq_length=20)), rows_in(replace(model, seq_length=20))
    packed = projected(mixer, x)
    with torch.no_grad():
        whole = mixer.mix(packed)
        lengths = torch.tensor([11, 2])  # the second is shorter than some kernels
        begun, memory = mixer.continued(packed[:12], None, lengths)
        for i, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(begun[:length, i], whole[:length, i], rtol=1e-11, atol=1e-11)
        for step in range(6):
            rows = torch.stack([packed[int(lengths[i]) + step, i] for i in range(BATCH)])[None]
            out, memory = mixer.continued(rows, memory, None)
            for i in range(BATCH):
                torch.testing.assert_close(out[0, i], whole[int(lengths[i]) + step, i], rtol=1e-11, atol=1e-11)


# ------------------------------------------------------------------------------------------------ transformers


def give(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give a module of transformers all its weights."""
    state = module.state_dict()
    assert set(weights) == set(state), set(weights) ^ set(state)
    module.load_state_dict({name: weights[name].reshape(state[name].shape) for name in state})


@pytest.mark.parametrize("bias", [False, True])
def test_short_conv_is_lfm2s(bias: bool) -> None:
    theirs = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    config = theirs.Lfm2Config(
        hidden_size=MODEL.hidden_size, conv_bias=bias, conv_L_cache=3, num_hidden_layers=1, layer_types=["conv"],
    )
    module = theirs.Lfm2ShortConv(config, 0).double()
    model = replace(MODEL, mixer="short_conv", recurrent=RecurrentConfig(kernel=3, convolution_bias=bias))
    mixer, x = mixer_of(model), rows_in(MODEL)
    p = named(mixer)
    units = MODEL.num_attention_heads
    weights = {
        "in_proj.weight": p["packed.weight"].unflatten(0, (units, 3, -1)).transpose(0, 1).flatten(0, 2),
        "conv.weight": p["convolution.weight"], "out_proj.weight": p["output.weight"],
    }
    if bias:
        weights |= {
            "in_proj.bias": p["packed.bias"].unflatten(0, (units, 3, -1)).transpose(0, 1).flatten(),
            "conv.bias": p["convolution.bias"], "out_proj.bias": p["output.bias"],
        }
    give(module, weights)
    torch.testing.assert_close(applied(mixer, x), module(x.transpose(0, 1)).transpose(0, 1), rtol=1e-11, atol=1e-11)


def conv_order(r: RecurrentConfig, packed: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """Rows of x of all heads, then B, then C of all groups, as transformers has them, from ours."""
    h, g, k, v = r.heads, r.key_heads, r.key_size, r.value_size
    if shared is not None:
        return torch.cat((packed.flatten(0, 1), shared))
    return torch.cat([part.flatten(0, 1) for part in packed.split((h // g * v, k, k), dim=1)])


@pytest.mark.parametrize(("module", "groups"), [
    ("mamba2", 1), ("mamba2", 2), ("nemotron_h", 1), ("nemotron_h", 4), ("bamba", 2), ("bamba", 1),
])
def test_mamba2_is_what_transformers_computes(module: str, groups: int) -> None:
    theirs = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    r = RecurrentConfig(heads=4, key_heads=groups, key_size=5, value_size=12, convolution_bias=True)
    model = replace(MODEL, mixer="mamba2", recurrent=r)
    mixer, x = mixer_of(model), rows_in(MODEL)
    a, them = 12, mamba_module(theirs, module, groups)
    p, units = named(mixer), mixer.spec.units
    rows = p["packed.weight"].unflatten(0, (units, -1))
    each = r.heads // units * a
    mixed, gate, step = rows.split((mixer.spec.convolved, each, r.heads // units), dim=1)
    kernels, biases = p["convolution.weight"].unflatten(0, (units, -1)), p["convolution.bias"].view(units, -1)
    give(them, {
        "in_proj.weight": torch.cat((
            gate.flatten(0, 1), conv_order(r, mixed, p.get("shared.weight")), step.flatten(0, 1)
        )),
        "conv1d.weight": conv_order(r, kernels, p.get("shared_convolution.weight")),
        "conv1d.bias": conv_order(r, biases, p.get("shared_convolution.bias")),
        "A_log": p["decay"], "D": p["skip"], "dt_bias": p["step_bias"], "norm.weight": p["norm.weight"],
        "out_proj.weight": p["output.weight"],
    })
    found, wanted = applied(mixer, x), them(x.transpose(0, 1).float()).transpose(0, 1)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.detach().abs().max()))


def mamba_module(theirs: Any, module: str, groups: int) -> torch.nn.Module:
    """A mixer of four heads of transformers' ``module``."""
    epsilon = MODEL.norm_epsilon
    if module == "mamba2":
        config = theirs.Mamba2Config(
            hidden_size=24, num_heads=4, head_dim=12, expand=2, state_size=5, n_groups=groups, conv_kernel=4,
            num_hidden_layers=1, layer_norm_epsilon=epsilon, chunk_size=32,
        )
        return theirs.Mamba2Mixer(config, 0).eval()
    if module == "bamba":
        config = theirs.BambaConfig(
            hidden_size=24, mamba_n_heads=4, mamba_d_head=12, mamba_expand=2, mamba_d_state=5, mamba_n_groups=groups,
            mamba_d_conv=4, num_hidden_layers=1, rms_norm_eps=epsilon, mamba_chunk_size=32,
        )
        return theirs.BambaMixer(config, 0).eval()
    config = theirs.NemotronHConfig(
        hidden_size=24, mamba_num_heads=4, mamba_head_dim=12, ssm_state_size=5, n_groups=groups, conv_kernel=4,
        num_hidden_layers=1, layers_block_type=["mamba"], layer_norm_epsilon=epsilon, chunk_size=32, time_step_min=0.0,
    )
    return theirs.NemotronHMamba2Mixer(config, 0).eval()


def test_kda_is_kimi_linears() -> None:
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = theirs.KimiLinearConfig(
        hidden_size=24, linear_num_heads=3, linear_head_dim=4, linear_conv_kernel_dim=4, num_hidden_layers=1,
        rms_norm_eps=MODEL.norm_epsilon, layer_types=["linear_attention"],
    )
    model = replace(MODEL, mixer="kda", recurrent=RecurrentConfig(heads=3, key_size=4, value_size=4))
    them, mixer, x = theirs.KimiLinearDeltaAttention(config, 0).eval(), mixer_of(model), rows_in(MODEL)
    p = named(mixer)
    query, key, value, rate = p["packed.weight"].unflatten(0, (3, 13)).split((4, 4, 4, 1), dim=1)
    low, gate = p["shared.weight"].chunk(2)
    give(them, {
        "q_proj.weight": query, "k_proj.weight": key, "v_proj.weight": value, "b_proj.weight": rate,
        "conv1d.weight": torch.cat([part.flatten(0, 1) for part in p["convolution.weight"].view(3, 3, 4, 4).unbind(1)]),
        "forget_gate.f_a_proj.weight": low, "forget_gate.f_b_proj.weight": p["decay_up.weight"],
        "forget_gate.dt_bias": p["decay_bias"], "forget_gate.A_log": p["decay"], "g_a_proj.weight": gate,
        "g_b_proj.weight": p["gate_up.weight"], "o_norm.weight": p["norm.weight"], "o_proj.weight": p["output.weight"],
    })
    found, wanted = applied(mixer, x), them(x.transpose(0, 1).float()).transpose(0, 1)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.detach().abs().max()))


# ------------------------------------------------------------------------------------------- decays by key's element


def operands_of(seed: int, n: int, *, delta: bool, scale: float, starts: bool) -> Operands:
    """Operands of decays by element of a key, of about -``scale``."""
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, n, *shape, generator=generator, dtype=torch.float64)

    generator = torch.Generator().manual_seed(seed)
    begun = torch.rand(2, n, generator=generator) < 0.2
    return Operands(
        queries=drawn(5), keys=torch.nn.functional.normalize(drawn(5), dim=-1), values=drawn(4),
        decay=-scale * drawn(5).abs(), rate=drawn().sigmoid() if delta else None, starts=begun if starts else None,
    )


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 64])
def test_chunks_are_steps_where_each_element_decays(delta: bool, starts: bool, chunk: int) -> None:
    given = operands_of(chunk, 90, delta=delta, scale=0.5, starts=starts)
    state = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    want, last = in_steps(given, state)
    found, end = in_chunks(given, state, chunk=chunk)
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(end, last, rtol=1e-11, atol=1e-11)
    local, product = passage(given, None, chunk=chunk).split((4, 5 if delta else 1), dim=-1)
    torch.testing.assert_close((product @ state if delta else product * state) + local, last, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 40.0, 3000.0])
def test_strong_decays_neither_overflow_nor_lose_digits(scale: float) -> None:
    """In fp32, values and gradients."""
    given = operands_of(3, 80, delta=True, scale=scale, starts=False)
    results = []
    for dtype, compute in (torch.float64, in_steps), (torch.float32, partial(in_chunks, chunk=64)):
        mine = replace(given, **{
            name: getattr(given, name).to(dtype).requires_grad_()
            for name in ("queries", "keys", "values", "decay", "rate")
        })
        out, _ = compute(mine, zero_state(mine))
        gradients = torch.autograd.grad(out.square().sum(), mine.tensors)
        results.append([out, *gradients])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-5 * float(want.detach().abs().max()))


# ------------------------------------------------------------------------------------------------ half precision


@every
def test_in_half_precision_only_the_products_round(model: ModelConfig) -> None:
    """Between its projections everything is in fp32: of rows in bf16, the result is fp64's but for its own rounding."""
    narrow, wide = mixer_of(model, dtype=torch.bfloat16), mixer_of(model)
    packed = mixer_rows(narrow, model)
    with torch.no_grad():
        for mine, other in zip(wide.parameters(), narrow.parameters(), strict=True):
            mine.copy_(other)
        found, wanted = narrow.mix(packed), wide.mix(packed.double())
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-8, atol=1e-4 * float(wanted.abs().max()))


def mixer_rows(mixer: Recurrent, model: ModelConfig) -> torch.Tensor:
    x = rows_in(model).to(next(mixer.parameters()).dtype)
    return projected(mixer, x).detach()


# ------------------------------------------------------------------------------------------------ refusals


def refused(model: ModelConfig, **layout: Any) -> list[str]:
    run = RunConfig(
        model=model, data=DataConfig(synthetic=True), engine="native",
        layout=LayoutConfig(vocab_padding_multiple=1, **layout),
    )
    world = layout.get("tensor_parallel_size", 1) * layout.get("context_parallel_size", 1)
    return problems(run, world_size=world)


@every
def test_models_here_are_legal(model: ModelConfig) -> None:
    assert refused(model) == []


def test_channels_that_heads_do_not_divide_are_refused() -> None:
    model = replace(MODEL, mixer="short_conv")
    assert refused(replace(model, recurrent=RecurrentConfig(heads=5))) == [
        "model.hidden_size 24 does not divide by model.recurrent.heads 5, into which model.mixer 'short_conv' groups "
        "its channels; set heads to a divisor"
    ]
    assert refused(replace(model, recurrent=RecurrentConfig(heads=3)), tensor_parallel_size=2) == [
        "layout.tensor_parallel_size 2 does not divide model.recurrent.heads 3, which ranks share out; use 1 or 3"
    ]


def test_settings_that_no_mixer_reads_are_refused() -> None:
    model = replace(MODEL, mixer="short_conv", recurrent=RecurrentConfig(key_size=4, kernel=2))
    assert refused(model) == [
        "model.recurrent.key_size 4 is of other mixers, and model.mixer 'short_conv' does not read it; leave it out"
    ]
    assert refused(replace(model, mixer="attention", mixer_pattern=("short_conv", "gated_delta"))) == []


# ------------------------------------------------------------------------------------------------ layers without an MLP


def test_a_layer_may_be_a_mixer_alone() -> None:
    model = replace(MODELS["mamba2, groups"], mlp_pattern=("none", "mlp"))
    layer, x = layer_of(model), rows_in(model)
    assert layer.norm1 is not None and layer.norm2 is None
    torch.testing.assert_close(layer(x), x + applied(layer.attention, layer.norm1(x)))
    alone, whole = model_spec(model).layers
    assert parameter_count(model) == parameter_count(replace(model, mlp_pattern=())) - sum(
        p.numel for p in whole.parameters if p.name.startswith(("mlp.", "norm2."))
    )
    assert alone.matmul_numel == sum(linear.weight_numel for linear in alone.mixer.linears)
    assert refused(model) == []
    assert refused(replace(model, parallel_residual=True)) == [
        'model.mlp_pattern names "none" with model.parallel_residual, under which the feed-forward block adds to the '
        "residual stream together with the mixer; set parallel_residual = false"
    ]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mixer", ["mamba2", "attention"])
def test_layers_of_a_mixer_alone_are_planned(recompute: Any, mixer: str) -> None:
    base = MODEL if mixer == "attention" else MODELS["mamba2, groups"]
    times = []
    pattern: Any
    for pattern in ("none", "mlp"), ("mlp",):
        run = RunConfig(
            model=replace(base, mlp_pattern=pattern), data=DataConfig(synthetic=True), engine="native",
            activations=ActivationsConfig(policy=recompute),
        )
        case, machine = case_of(run)[0], machine_of(load("clusters/frontier").config)
        assert stage_memory(case, machine, 0).allocated > 0
        times.append(plan_step(case, machine).seconds)
    assert times[0] < times[1]


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(("mixer", "sizes", "allowed"), [
    ("short_conv", RecurrentConfig(kernel=3), 0.05),
    ("mamba2", RecurrentConfig(heads=4, key_heads=2, key_size=48, value_size=96, chunk=64), 0.12),
    ("mamba2", RecurrentConfig(heads=4, key_heads=1, key_size=64, value_size=64, chunk=128), 0.12),
    ("kda", RecurrentConfig(heads=2, key_size=64, value_size=64, chunk=128), 0.08),
], ids=["short_conv", "mamba2", "mamba2, one group", "kda"])
def test_memory_in_passing_is_as_stated(mixer: str, sizes: RecurrentConfig, allowed: float) -> None:
    """The allocator's peak in one pass of the mixer, of a sequence of two segments."""
    model = replace(MODEL, seq_length=512, hidden_size=96, mixer=mixer, recurrent=replace(sizes, segment=256))
    module: Any = layer_of(model, torch.float32).attention
    rows = module.spec.packed.outputs + module.spec.shared_rows
    packed = torch.randn(512, BATCH, rows).requires_grad_()
    found: dict[str, torch.Tensor] = {}

    def forward() -> None:
        found["out"] = module.mix(packed)

    def backward() -> None:
        found["out"].backward(torch.ones_like(found["out"]))

    def peak(step: Callable[[], None]) -> float:
        return most([event.nbytes() for event in events_of(step) if event.name() == "[memory]"]) / 4 / BATCH

    out = 512 * module.spec.output.inputs
    assert peak(forward) == pytest.approx(256 * module.spec.scratch[0] + out, rel=allowed)
    # The gradient of all rows, and once more of a segment's.
    assert peak(backward) == pytest.approx(256 * module.spec.scratch[1] + out + 768 * rows, rel=allowed)
