"""An adapter for lm-eval-harness (EleutherAI, ``pip install lm-eval``): its tasks on a model split in any way.

Every rank runs the harness. Tasks and examples are drawn from fixed seeds, so all ask the same questions in the same
order, and the model's collectives meet; rank 0 prints.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from typing import Any

from megatron_port.core.errors import ConfigError, DataError, EnvironmentFault
from megatron_port.ext.corpora.tokenizer_base import Tokenizer, bos_of, encode_whole
from megatron_port.tools.inference.generation import Generator, Sampling
from megatron_port.tools.inference.model import InferenceModel
from megatron_port.tools.inference.scoring import score


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
