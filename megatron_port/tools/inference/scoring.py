"""Log-probabilities of given texts, with a model split in any way; logits are never gathered."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.errors import ConfigError, DataError, EnvironmentFault
from megatron_port.ext.corpora.tokenizer import Tokenizer, bos_of, encode_whole
from megatron_port.tools.inference.generation import Generator, Sampling
from megatron_port.tools.inference.model import InferenceModel, misplaced_token


@dataclass(frozen=True)
class Score:
    """Scores of one sequence's scored tokens."""

    log_probability: float
    """Natural logarithm, summed over the tokens."""
    greedy: bool
    """Each of them was the likeliest."""


def score(
    model: InferenceModel, sequences: Sequence[tuple[Sequence[int], int]], *, batch_size: int = 8
) -> list[Score]:
    """Score the last ``count`` tokens of each ``(tokens, count)``, each given all before it. Collective.

    The same on every rank; replicas take the sequences in turn, longest first so that a batch has like lengths.

    Raises:
        DataError: a sequence is longer than the model's context and one more, nothing stands before what is scored, or
            a token id is outside the vocabulary.
    """
    ctx, limit, size = model.ctx, model.model.seq_length, model.model.vocab_size
    for number, (tokens, count) in enumerate(sequences):
        if wrong := misplaced_token(tokens, size):
            raise DataError(f"sequence {number} to be scored: {wrong}")
        if not 1 <= count < len(tokens) or len(tokens) - 1 > limit:
            raise DataError(
                f"{len(tokens)} tokens, the last {count} to be scored: at least one must stand before them, and at "
                f"most model.seq_length + 1 = {limit + 1} are allowed"
            )
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i][0]))
    mine = order[ctx.index("dp") :: ctx.size("dp")]
    table = torch.zeros(len(sequences), 2, dtype=torch.float64, device=ctx.device)
    for number in range(model.batches(len(order), batch_size)):
        chosen = mine[number * batch_size : (number + 1) * batch_size]
        rows = model.from_last_stage(_score_batch(model, [sequences[i] for i in chosen or order[-1:]]))
        if chosen:
            table[torch.tensor(chosen, device=ctx.device)] = rows
    return [Score(p, bool(g)) for p, g in model.over_replicas(table).tolist()]


@torch.no_grad()
def _score_batch(model: InferenceModel, batch: list[tuple[Sequence[int], int]]) -> torch.Tensor:
    """Return float64 [batch, 2] on the last stage, zeros elsewhere: log-probability, 1 if greedy."""
    device = model.ctx.device
    longest = model.padded(max(len(t) for t, _ in batch) - 1)
    tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels, mask = torch.zeros_like(tokens), torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (sequence, count) in enumerate(batch):
        n = len(sequence) - 1
        whole = torch.tensor(list(sequence))
        tokens[i, :n], labels[i, :n] = whole[:-1], whole[1:]
        mask[i, n - count : n] = True
    logits = model.logits(tokens)
    out = torch.zeros(len(batch), 2, dtype=torch.float64, device=device)
    if logits is None:
        return out
    held = model.held(longest)
    log_p, greedy = _token_scores(model, logits, held.take(labels, dim=1).t().contiguous().to(device))
    counted = held.take(mask, dim=1).t().to(device)
    out[:, 0] = (log_p.double() * counted).sum(0)
    out[:, 1] = (~greedy & counted).sum(0)
    model.over_context(out)
    out[:, 1] = out[:, 1] == 0
    return out


def _token_scores(
    model: InferenceModel, logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probability, whether it is the likeliest) of each label; logits [seq, batch, columns]."""
    offset, extent = model.vocabulary
    assert model.stage.head is not None  # there are logits
    ops, group = model.stage.head.cross_entropy, model.ctx.over("tp")
    highest, total, target = ops.statistics(logits.contiguous(), labels, offset=offset, extent=extent)
    if group is not None:
        own = highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack((total * (own - highest).exp(), target))
        dist.all_reduce(sums, group=group)
        total, target = sums.unbind()
    return target - highest - total.log(), target >= highest


# An adapter for lm-eval-harness (EleutherAI, ``pip install lm-eval``): its tasks on a model split in any way.
#
# Every rank runs the harness. Tasks and examples are drawn from fixed seeds, so all ask the same questions in the same
# order, and the model's collectives meet; rank 0 prints.

def require_harness() -> None:
    """Raise EnvironmentFault where the package is missing."""
    if find_spec("lm_eval") is None:
        raise EnvironmentFault("--tasks needs lm-eval-harness, which is not installed; run: pip install lm-eval")


class Questions:
    """Answers to what ``lm_eval`` asks of a model, without ``lm_eval``: log-likelihoods and texts. Collective.

    The ids are those of its own ``hf`` model: contexts have what the tokenizer adds (BOS), and before a text without
    context stands BOS, or the end of text where there is none.

    Raises DataError: the tokenizer has neither.
    """

    def __init__(self, model: InferenceModel, tokenizer: Tokenizer, *, batch_size: int = 1) -> None:
        bos = bos_of(tokenizer)
        self.prefix = bos if bos >= 0 else tokenizer.eod_id
        if self.prefix < 0:
            raise DataError(f"tokenizer {tokenizer.name} has no BOS and no end of text to begin a text with")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.limit = model.model.seq_length

    def pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Return (tokens, how many are the continuation's). Blanks between the two belong to the continuation."""
        blanks = len(context) - len(context.rstrip())
        if context:
            whole = encode_whole(self.tokenizer, context + continuation)
            count = max(1, len(whole) - len(encode_whole(self.tokenizer, context[: len(context) - blanks])))
        else:
            whole = self.tokenizer.encode(continuation)
            whole = whole if whole[:1] == [self.prefix] else [self.prefix, *whole]
            count = max(1, len(whole) - 1)
        tokens = whole if len(whole) > count else [self.prefix, *whole]
        tokens = tokens[-(self.limit + 1) :]
        return tokens, min(count, len(tokens) - 1)

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return (log-probability of the continuation given the context, whether it is the greedy one) of each pair."""
        found = score(self.model, [self.pair(*p) for p in pairs], batch_size=self.batch_size)
        return [(s.log_probability, s.greedy) for s in found]

    def windows(self, text: str) -> list[tuple[list[int], int]]:
        """Cut a text so that each token, an added BOS too, is predicted once, from as many before it as fit."""
        ids = encode_whole(self.tokenizer, text)
        out = [([self.prefix, *ids[: self.limit]], min(len(ids), self.limit))] if ids else []
        for start in range(self.limit, len(ids), self.limit):
            stop = min(start + self.limit, len(ids))
            out.append((ids[stop - self.limit - 1 : stop], stop - start))
        return out

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probability of each whole text."""
        cut = [self.windows(text) for text in texts]
        found = iter(score(self.model, [w for windows in cut for w in windows], batch_size=self.batch_size))
        return [sum(next(found).log_probability for _ in windows) for windows in cut]

    def continuations(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Return a text for each (context, options): ``until``, ``max_gen_toks``, ``do_sample``, ``temperature``, …"""
        groups: dict[Sampling, list[int]] = {}
        for i, (_, options) in enumerate(requests):
            groups.setdefault(self._sampling(options), []).append(i)
        out = [""] * len(requests)
        generator = Generator(self.model, self.tokenizer.decode)
        for sampling, members in groups.items():
            room = max(1, self.limit - sampling.max_new_tokens)
            prompts = [
                (encode_whole(self.tokenizer, requests[i][0]) or [self.prefix])[-room:] for i in members
            ]
            for i, found in zip(members, generator.generate(prompts, sampling, batch_size=self.batch_size)):
                out[i] = found.text or ""
        return out

    def _sampling(self, options: dict[str, Any]) -> Sampling:
        until = options.get("until") or []
        temperature = float(options.get("temperature") or 0.0)
        if options.get("do_sample") is False:
            temperature = 0.0
        return Sampling(
            max_new_tokens=int(options.get("max_gen_toks", 256)), temperature=temperature,
            top_k=int(options.get("top_k") or 0), top_p=float(options.get("top_p") or 1.0),
            stop_ids=(self.tokenizer.eod_id,) if self.tokenizer.eod_id >= 0 else (),
            stop_strings=tuple(s for s in ([until] if isinstance(until, str) else until) if s),
        )


def adapter(questions: Questions) -> Any:
    """Return an ``lm_eval.api.model.LM`` that passes its questions on."""
    from lm_eval.api.model import LM

    class Adapter(LM):  # type: ignore[misc]
        """``lm_eval`` model that answers through :class:`Questions`."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return questions.loglikelihood([r.args for r in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return questions.rolling([r.args[0] for r in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return questions.continuations([r.args for r in requests])

    return Adapter()


def run_tasks(
    model: InferenceModel, tokenizer: Tokenizer, tasks: Sequence[str], *, include_path: str | None = None,
    num_fewshot: int | None = None, limit: float | None = None, batch_size: int = 1, is_rank_zero: bool = True,
) -> tuple[dict[str, Any], str]:
    """Return (the results by task, a table). Collective: every rank calls it alike.

    Raises:
        ConfigError: no such task.
        EnvironmentFault: lm-eval is not installed.
    """
    require_harness()
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    if not is_rank_zero:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"  # its resampling forks processes, which ranks with connections must not
    manager = TaskManager(include_path=include_path)
    unknown = [t for t in tasks if t not in manager.all_tasks]
    if unknown or not tasks:
        near = [t for t in manager.all_tasks if unknown and unknown[0].lower() in t.lower()][:5]
        raise ConfigError(
            f"--tasks {','.join(tasks)}: lm-eval {lm_eval.__version__} has no task {', '.join(map(repr, unknown))}"
            + (f"; like it: {', '.join(near)}" if near else "; --include-path names a folder with further ones")
        )
    with nullcontext() if is_rank_zero else redirect_stderr(io.StringIO()):  # progress bars
        found = lm_eval.simple_evaluate(
            model=adapter(Questions(model, tokenizer, batch_size=batch_size)), tasks=list(tasks),
            num_fewshot=num_fewshot, limit=limit, bootstrap_iters=1000, log_samples=False, task_manager=manager,
        )
    results = {"results": found["results"], "n-shot": found.get("n-shot", {}), "versions": found.get("versions", {})}
    return results, str(make_table(found))
