"""Hugging Face folders on many ranks: fine-tuning, generation and perplexity against transformers itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
import torch
from cases import make_batches, make_config, providers_of, sample_tokens
from pool import RankPool

from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.checkpoint.writer import peers_of, save_checkpoint
from megatron_port.core.config.checks import resolve
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.data.loader import RankView
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.dist.record import BUFFER, WEIGHT
from megatron_port.core.io.logging import Logger
from megatron_port.core.model.shapes import buffer_shapes, parameter_shapes
from megatron_port.core.optim.rules import mixed_kinds
from megatron_port.core.train.hooks import Session
from megatron_port.ext.families import family_names
from megatron_port.run.build import build_engine
from megatron_port.run.device import choose_device
from megatron_port.run.weights import load_initial
from megatron_port.tools.inference.generation import Continuation, Generator, Sampling
from megatron_port.tools.inference.model import InferenceModel, StreamWindows, perplexity
from megatron_port.tools.inference.scoring import Score, score
from megatron_port.tools.interop.export_hf import export_hf
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.parity.comparison import Run, gradient_deviation
from megatron_port.tools.parity.run_record import RankTrace, record_run

pytest.importorskip("transformers")

RATE, HUGE = 0.5, 1e9
"""AdamW with an eps far above any gradient, and a rate of RATE × eps, is SGD with RATE."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products: more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_config(model: ModelConfig, source: Path, *, engine: str = "native", **layout: Any) -> RunConfig:
    config = make_config(engine=engine, layout=layout, clip_grad=0.0)
    return replace(
        config, model=model, checkpoint=replace(config.checkpoint, initial_weights=str(source)),
        optimizer=replace(config.optimizer, lr=RATE * HUGE, eps=HUGE, weight_decay=0.0),
    )


def session_of(config: RunConfig, ctx: ParallelContext) -> Session:
    world = ctx.topology.world_size
    info = ProcessInfo(
        rank=ctx.rank, world_size=world, local_rank=ctx.rank, local_world_size=world, node_rank=0, num_nodes=1,
        master_addr="", master_port=0, launcher="single", hostname="test",
    )
    return Session(resolve(config, world), info, choose_device("cpu"), ctx, providers_of(config),
                   Logger(1))


def one_step(config: RunConfig, topology: Topology, folder: Path) -> RankTrace:
    """Fine-tune for a step from the folder, and save."""
    ctx = ParallelContext.create(topology, "cpu")
    try:
        engine = build_engine(config, ctx, providers_of(config), initialise=False)
        load_initial(engine, session_of(config, ctx))
        trace = record_run(engine, ctx, make_batches(config, ctx), steps=1, lr=lambda _: config.optimizer.lr)
        shapes, buffers = parameter_shapes(config.model), buffer_shapes(config.model)
        kinds = dict.fromkeys(shapes, (WEIGHT, "exp_avg", "exp_avg_sq")) | dict.fromkeys(buffers, (BUFFER,))
        state = SavedState(step=1, samples=8, tokens=8 * config.model.seq_length, layout=config.layout,
                           config=as_dict(config), scalars=engine.scalar_state(), extra={}, kinds=mixed_kinds(kinds))
        save_checkpoint(
            folder, state, engine.state_pieces(), peers=peers_of(torch.distributed.group.WORLD),
            expected=shapes | buffers if ctx.rank == 0 else None,
        )
        return trace
    finally:
        ctx.close()


def their_step(
    config: RunConfig, folder: Path, dtype: torch.dtype, *, exact: bool = False
) -> tuple[Any, dict[str, torch.Tensor], float]:
    """(transformers' model after one step of SGD, its gradients in our names, the loss). ``exact``: all in float64."""
    model = hf.loaded(folder).to(dtype)
    drawn = torch.stack([sample_tokens(config, i)[0] for i in range(config.batch.global_batch_size)])
    with hf.in_double(model) if exact else nullcontext():
        logits = model(drawn[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten())
        loss.backward()
    grads = hf.in_files(model, {n: p.grad for n, p in model.named_parameters()})
    with torch.no_grad():
        for p in model.parameters():
            p -= RATE * p.grad
    return model, hf.in_our_names(config.model, HFFolder(folder).family, grads), float(loss.detach())


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], Any]] = {
    "gpt2": (lambda: hf.gpt2(16), {"sequence_parallel": True}, "fp32"),
    "gpt2 fp64": (lambda: hf.gpt2(16), {"sequence_parallel": True}, "fp64"),
    "neox": (lambda: hf.neox(16), {"sequence_parallel": True}, "fp32"),
    "llama": (lambda: hf.llama(16, rope_parameters=dict(hf.LLAMA3, original_max_position_embeddings=8)),
              {"recompute": "full"}, "fp32"),
    "deepseek_v3 fp64": (lambda: hf.deepseek(16, num_hidden_layers=4), {"expert_parallel_size": 2}, "fp64"),
}
SHARED = {"neox"}
"""What differs in them is in other tests: only with SLOW=1."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SHARED else ()) for case in CASES]
)
def test_in_one_step_and_out(ranks: RankPool, tmp_path: Path, case: str) -> None:
    """HF → tp 2 × pp 2 × dp 2 → one step → HF: gradients, weights and logits are transformers' own.

    Gradients by max|Δ| ÷ (rms + 1e-3 × rms of all). In fp32 transformers' own are 5e-6 to 9e-6 from exact ones by that
    measure, so no two programs can agree within 1e-6; ours are held to be as near to the exact ones as theirs are
    (here a quarter is left for the luck of a largest value; test_gradients_are_as_exact takes means). In fp64 the
    bound is 1e-12, of transformers' model computed in float64 throughout; experts are divided over two ranks.
    """
    made, layout, dtype = CASES[case]
    source = hf.saved(hf.reference(made()), tmp_path / "source", shard="40KB")
    folder = HFFolder(source)
    model = replace(folder.model, moe=replace(folder.model.moe, bias_rate=0.0))  # theirs leaves it alone
    config = run_config(model, source, **layout)
    config = replace(config, precision=replace(config.precision, dtype=dtype))
    topology = replace(Topology(2, 2, 2), ep=config.layout.expert_parallel_size)
    run = Run.of(ranks.run(8, one_step, config, topology, tmp_path / "ours"))
    theirs, gradients, loss = their_step(
        config, source, torch.float64 if dtype == "fp64" else torch.float32, exact=dtype == "fp64"
    )
    exact = their_step(config, source, torch.float64, exact=True)[1]
    (worst, name), (key, _) = gradient_deviation(exact, run.gradients[0], config.model)
    bounds = {"gradient": 1e-12, "key": 1e-12, "weight": 1e-9}
    if dtype == "fp32":
        (rounding, _), _ = gradient_deviation(exact, gradients, config.model)
        assert 1e-6 < rounding < 2e-5  # else the bound below says nothing
        bounds = {"gradient": 1.25 * rounding, "key": KEY_NOISE, "weight": 1e-6}
    assert run.losses[0] == pytest.approx(loss, rel=1e-6)
    assert worst <= bounds["gradient"] and key <= bounds["key"], (worst, name, key, bounds)

    export_hf(open_checkpoint(tmp_path / "ours" / "step-00000001"), tmp_path / "back", note=lambda _: None)
    back = HFFolder(tmp_path / "back")
    for name, wanted in hf.in_files(theirs, dict(theirs.named_parameters())).items():
        mine = back.tensor(name)
        assert mine is not None and hf.relative(mine, wanted.detach()) <= bounds["weight"], name
    tokens, read = torch.arange(64).view(4, 16), hf.loaded(tmp_path / "back")
    with torch.no_grad():
        wanted = theirs.float()(tokens).logits
        rounding = hf.relative(wanted, theirs.double()(tokens).logits)
        assert rounding < 1e-6 and hf.relative(read(tokens).logits, wanted) <= max(1e-6, 2 * rounding)


SEEDS = range(5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["gpt2", "neox", "llama"])
def test_gradients_are_as_exact(ranks: RankPool, tmp_path: Path, case: str) -> None:
    """Five models each: in fp64 gradients are the exact ones within 1e-12, in fp32 no further from them than
    transformers' own, by the mean over the models; on one process and on tp 2 × pp 2 × dp 2."""
    made, layout, _ = CASES[case]
    far: dict[str, list[float]] = {}
    for seed in SEEDS:
        source = hf.saved(hf.reference(made(), seed=seed), tmp_path / f"{seed}")
        config = run_config(HFFolder(source).model, source, **layout)
        exact = their_step(config, source, torch.float64, exact=True)[1]
        found = {"theirs fp32": their_step(config, source, torch.float32)[1]}
        for topology in (Topology(), Topology(2, 2, 2)):
            for dtype in ("fp32", "fp64"):
                wide = replace(config, precision=replace(config.precision, dtype=dtype))
                name = f"ours {dtype} {topology.world_size}"
                traces = ranks.run(topology.world_size, one_step, wide, topology, tmp_path / f"{seed} {name}")
                found[name] = Run.of(traces).gradients[0]
        for name, gradients in found.items():
            far.setdefault(name, []).append(gradient_deviation(exact, gradients, config.model)[0][0])
    told = {name: " ".join(f"{value:.2g}" for value in values) for name, values in far.items()}
    print(case, told)
    mean = {name: sum(values) / len(values) for name, values in far.items()}
    for count in (1, 8):
        assert max(far[f"ours fp64 {count}"]) <= 1e-12, told
        assert mean[f"ours fp32 {count}"] <= mean["theirs fp32"], told


NEW = 200
PROMPTS = [[5, 17, 3], [60, 2, 9, 9, 31, 77, 12, 40], [99], [8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12]]


Job = tuple[list[list[int]], Sampling, int]
Text = tuple[list[int], int]


def generated(config: RunConfig, topology: Topology, jobs: list[Job]) -> list[list[Continuation]]:
    return generated_and_scored(config, topology, jobs, [])[0]


def generated_and_scored(
    config: RunConfig, topology: Topology, jobs: list[Job], texts: list[Text]
) -> tuple[list[list[Continuation]], list[Score]]:
    """Continuations of each job, and the scores of texts one by one."""
    ctx = ParallelContext.create(topology, "cpu")
    try:
        session = session_of(config, ctx)
        model = InferenceModel(session, HFFolder(config.checkpoint.initial_weights).read)
        generator = Generator(model, decode=lambda ids: "".join(chr(33 + i) for i in ids))
        return [generator.generate(p, s, batch_size=b) for p, s, b in jobs], score(model, texts, batch_size=1)
    finally:
        ctx.close()


def greedy(folder: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens, and how far the two best logits of each were apart."""
    model = hf.loaded(folder)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True, attention_mask=torch.ones(1, len(prompt)), pad_token_id=0,
        )
    best = [torch.topk(x[0].double(), 2).values for x in out.logits]
    return out.sequences[0, len(prompt):].tolist(), [float(b[0] - b[1]) for b in best]


KEY_NOISE = 32 * 2.0**-24
"""Key biases' gradients, zero but for rounding, in units of the query biases' (docs/parity.md): 23 roundoffs of fp32
were measured here, 12 in transformers."""
GENERATE: dict[str, Callable[..., Any]] = {
    "gpt2": lambda **c: hf.gpt2(256, **c), "neox": lambda **c: hf.neox(256, **c),
    "llama": lambda **c: hf.llama(256, **c), "qwen2": lambda **c: hf.small("qwen2", 256, sliding_window=20, **c),
    **{family: partial(hf.small, family, 256) for family in ("gemma3_text", "gptj")},
}
MORE: dict[str, Callable[..., Any]] = {
    family: partial(hf.small, family, 256) for family in family_names() if family not in (*GENERATE, "gpt_neox")
}
"""Families whose keys and values are kept as those of the others, with windows of 7 or 8 where they have some: only
with SLOW=1."""
QUICK = ("gpt2", "llama", "gemma3_text")
"""Learned positions; rope; windows, norms of heads and two rope bases: the others run with SLOW=1."""
LAYOUTS = [Topology(tp=2), Topology(pp=2), Topology(tp=4), Topology(tp=2, pp=2), Topology(pp=3),
           Topology(pp=2, dp=2), Topology(tp=2, cp=2), Topology(2, 2, 2)]


def check_greedy(found: list[Continuation], wanted: list[tuple[list[int], list[float]]], where: Any) -> None:
    """Equal until the two best logits are within 1e-5, and that for long enough to say something."""
    for mine, (tokens, gaps) in zip(found, wanted, strict=True):
        sure = next((i for i, gap in enumerate(gaps) if gap < 1e-5), NEW)
        assert sure > 50
        assert mine.tokens[:sure] == tokens[: min(sure, len(mine.tokens))], (where, sure)


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in (*GENERATE, *MORE)
])
def test_generation_is_transformers(ranks: RankPool, tmp_path: Path, case: str) -> None:
    """Greedy: 200 tokens equal, of a batch and one by one; 60 of Llama with grouped queries on pp 2 × cp 2, whose
    ranks divide the prompts, and on tp 4, whose ranks share its two key/value heads."""
    folder = hf.saved(hf.reference({**GENERATE, **MORE}[case]()), tmp_path / "m")
    config, prompts = run_config(HFFolder(folder).model, folder), PROMPTS[1:3]
    wanted = [greedy(folder, p, NEW) for p in prompts]
    best = Sampling(max_new_tokens=NEW, temperature=0.0)
    for found in generated(config, Topology(), [(prompts, best, 2), (prompts, best, 1)]):
        assert all(len(f.tokens) == NEW for f in found)
        check_greedy(found, wanted, "one process")
    if case == "llama":
        short = replace(best, max_new_tokens=60)
        assert config.model.kv_heads == 2
        for topology in (Topology(pp=2, cp=2), Topology(tp=4, kv_copies=2)):
            results = ranks.run(4, generated, config, topology, [(prompts, short, 2)])
            assert all(r == results[0] for r in results), "ranks differ"
            check_greedy(results[0][0], wanted, topology)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda t: f"tp{t.tp} pp{t.pp} dp{t.dp} cp{t.cp}")
@pytest.mark.parametrize("case", GENERATE)
def test_generation_on_every_layout(ranks: RankPool, tmp_path: Path, case: str, topology: Topology) -> None:
    """200 tokens on eight layouts, in a batch of four and one by one. Collectives of gloo wait for the scheduler."""
    folder = hf.saved(hf.reference(GENERATE[case]()), tmp_path / "m")
    config = run_config(HFFolder(folder).model, folder)
    topology = replace(topology, kv_copies=max(topology.tp // config.model.kv_heads, 1))
    wanted = [greedy(folder, p, NEW) for p in PROMPTS]
    best = Sampling(max_new_tokens=NEW, temperature=0.0)
    jobs = [(PROMPTS, best, 4), (PROMPTS[:2], best, 1)]
    results = ranks.run(topology.world_size, generated, config, topology, jobs, timeout=900)
    assert all(r == results[0] for r in results), "ranks differ"
    for found in results[0]:
        assert all(len(f.tokens) == NEW for f in found)
        check_greedy(found, wanted[: len(found)], topology)


@pytest.mark.slow
def test_drawing_does_not_depend_on_layout_or_batch(ranks: RankPool, tmp_path: Path) -> None:
    """Sampled tokens, stop strings and ids: equal on one rank, tp 2 × pp 2, pp 2 × dp 2, in batches of 1, 3, 4. With
    experts, whose tensor-parallel ranks share even a single position, and which replicas divide: of three prompts and
    texts, the second replica has one, and computes for the first one's until they have ended."""
    folder = hf.saved(hf.reference(hf.small("mixtral", 32)), tmp_path / "m")
    config = run_config(HFFolder(folder).model, folder)
    drawn = Sampling(max_new_tokens=40, temperature=1.0, top_k=20, top_p=0.9, seed=3)  # beyond the context of 32
    first = generated(config, Topology(), [(PROMPTS, drawn, 4)])[0]
    text = "".join(chr(33 + i) for i in first[0].tokens)
    stopping = replace(drawn, stop_strings=(text[20:23],), stop_ids=(first[1].tokens[30],))
    second = replace(stopping, stop_strings=())  # the second text alone ends early
    jobs = [(PROMPTS, s, b) for s, b in ((drawn, 1), (stopping, 3), (stopping, 4), (second, 4))]
    alone = generated(config, Topology(), jobs)
    assert alone[0] == first and all(len(c.tokens) == 40 and not c.stopped for c in first)
    assert len({tuple(c.tokens) for c in first}) == 4
    cut = alone[1][0]
    assert cut.stopped and cut.text is not None and text.startswith(cut.text) and text[20:23] not in cut.text
    assert alone[1][1].stopped and stopping.stop_ids[0] not in alone[1][1].tokens
    assert alone[1] == alone[2] and [c.stopped for c in alone[3][:3]] == [False, True, False]
    assert all(r == alone[:1] for r in ranks.run(4, generated, config, Topology(tp=2, pp=2), jobs[:1]))
    texts = [(prompt, 2) for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3])]
    job, (_, scores) = (PROMPTS[:3], second, 1), generated_and_scored(config, Topology(), [], texts)
    for found, told in ranks.run(4, generated_and_scored, config, Topology(pp=2, dp=2, ep=2), [job], texts):
        assert found == [alone[3][:3]]
        assert [s.log_probability for s in told] == pytest.approx([s.log_probability for s in scores], rel=1e-6)


def evaluated(
    config: RunConfig, topology: Topology, tokens: torch.Tensor, strides: list[int], texts: list[tuple[list[int], int]]
) -> tuple[list[tuple[float, int]], list[Score]]:
    ctx = ParallelContext.create(topology, "cpu")
    try:
        engine = build_engine(config, ctx, providers_of(config), initialise=False)
        folder = HFFolder(config.checkpoint.initial_weights)
        engine.load_weights(folder.read)
        stream = tokens.numpy()
        found = [
            perplexity(engine, ctx, StreamWindows(
                lambda at, n: stream[at : at + n], len(stream), config.model.seq_length, hf.VOCABULARY, stride,
            ), view=RankView.on(config, ctx), micro_batch_size=2)
            for stride in strides
        ]
        scores = score(InferenceModel(session_of(config, ctx), folder.read), texts, batch_size=2)
        return [(f.loss, f.tokens) for f in found], scores
    finally:
        ctx.close()


def test_perplexity_and_scores_are_transformers(ranks: RankPool, tmp_path: Path) -> None:
    """150 tokens in windows of 16, with and without overlap, and scores of texts, by both engines."""
    folder = hf.saved(hf.reference(hf.llama(16)), tmp_path / "m")
    model = hf.loaded(folder)
    stream = torch.randint(0, hf.VOCABULARY, (150,), generator=torch.Generator().manual_seed(4))
    texts = [(stream[:n].tolist(), c) for n, c in ((5, 2), (17, 16), (9, 1), (12, 4))]

    def log_p(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            all_of = model(tokens[None, :-1]).logits[0].double().log_softmax(-1)
        return all_of.gather(1, tokens[1:, None])[:, 0]

    wanted = []
    for stride in (16, 5):
        total, at = 0.0, 0
        while True:
            window = log_p(stream[at : at + 17])
            total -= float(window[0 if at == 0 else 16 - stride :].sum())
            if at + 17 >= 150:
                break
            at += stride
        wanted.append(total / 149)
    scores = [float(log_p(torch.tensor(t))[-c:].sum()) for t, c in texts]
    config = run_config(HFFolder(folder).model, folder)
    cases: list[tuple[RunConfig, Topology, dict[str, Any]]] = [
        (config, Topology(pp=2, cp=2), {}),
        (run_config(HFFolder(folder).model, folder, engine="deepspeed", zero_stage=1), Topology(tp=2, dp=2),
         {"deepspeed": True}),
    ]
    for case, topology, options in cases:
        for found, told in ranks.run(4, evaluated, case, topology, stream, [16, 5], texts, **options):
            for (loss, count), value in zip(found, wanted):
                assert count == 149 and math.isclose(loss, value, rel_tol=1e-6), (topology, loss, value)
            assert [s.log_probability for s in told] == pytest.approx(scores, rel=1e-5)


def prompt_logits(config: RunConfig, topology: Topology, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's positions of a prompt, int64 [held], and their logits [held, vocabulary]."""
    ctx = ParallelContext.create(topology, "cpu")
    try:
        model = InferenceModel(session_of(config, ctx), HFFolder(config.checkpoint.initial_weights).read)
        out = model.logits(tokens)
        assert out is not None
        return model.held(tokens.shape[1]).index(ctx.device), model.gather_logits(out)[:, 0]
    finally:
        ctx.close()


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_prompt_of_32k_tokens_on_four_ranks_has_transformers_logits(ranks: RankPool, tmp_path: Path) -> None:
    folder, length = hf.saved(hf.reference(hf.llama(32768, num_hidden_layers=2)), tmp_path / "m"), 32768
    config = run_config(HFFolder(folder).model, folder)
    config = replace(config, backend=replace(config.backend, attention="own", own_kernels="on"))
    tokens = torch.randint(0, hf.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(8))
    model = hf.loaded(folder)
    model.set_attn_implementation("sdpa")  # eager holds every score
    with torch.no_grad():
        wanted = model(tokens).logits[0]
    found = ranks.run(4, prompt_logits, config, Topology(cp=4), tokens, timeout=900)
    assert sorted(torch.cat([at for at, _ in found]).tolist()) == list(range(length))
    for at, logits in found:  # 5.1e-6: fp32's sums over 32,768 keys, by two kernels
        assert float((logits - wanted[at]).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_another_model_is_refused_with_the_numbers(ranks: RankPool, tmp_path: Path) -> None:
    folder = hf.saved(hf.reference(hf.gpt2(16)), tmp_path / "m")
    model = replace(HFFolder(folder).model, num_layers=4, activation="gelu")
    with pytest.raises(AssertionError, match=r"num_layers is 3 there and 4 here.*activation is 'gelu_tanh' there"):
        ranks.run(2, one_step, run_config(model, folder), Topology(tp=2), tmp_path / "ours")
