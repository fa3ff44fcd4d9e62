"""From a record with a conversation to token ids, and which of them are the model's own words.

The rendered conversation is tokenized once, and a token counts if its characters are within an answer. Where the
template marks no answers, they are found by rendering what comes before and after each one. A token that belongs to
both sides of an answer's edge is refused: no prompt would ever end in the middle of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.chat_template import (
    BUILT_IN,
    CHATML_PIECES,
    ChatTemplate,
    Message,
    Rendered,
    TemplateRefusal,
    find_template,
    special_pieces,
)
from megatron_port.ext.corpora.conversations import ChatFields, ConversationRefusal, messages_of, preference_of
from megatron_port.ext.corpora.tokenizer import Spans, Tokenizer

PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
_WORD = "yonder"
"""Content of an answer after which its end is looked for: no template has the word."""
_STANDIN = "\ue000answer\ue000"
"""Stands for a message's content where it is to be found in a rendering. Private characters: no text has them."""


@dataclass(frozen=True)
class ChatRecipe:
    """How the records of a data set become tokens.

    Raises:
        DataError: the template needs pieces that the tokenizer does not have.
    """

    template: ChatTemplate
    tokenizer: Any
    """A ``Tokenizer`` that has ``encode_spans`` and ``special``; all of ours do."""
    fields: ChatFields = field(default_factory=ChatFields)

    def __post_init__(self) -> None:
        missing = [piece for piece in CHATML_PIECES if piece not in self.tokenizer.special]
        if self.template.text == BUILT_IN["chatml"] and missing:
            raise DataError(f"tokenizer {self.tokenizer.name} has no special piece {' and no '.join(missing)}, which "
                            "the built-in template chatml needs; use --chat-template plain, or a file")

    def encode(self, record: object, *, append_eod: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a record's conversation, i64 [n], and which of them are the model's words, bool [n].

        ``append_eod``: end with the end of document, unless the last answer has it already. It counts where the last
        answer is the end of the text.

        Raises:
            ConversationRefusal: the record, or what the template makes of it, cannot be used.
        """
        return self._encoded(messages_of(record, self.fields), append_eod)[:2]

    def documents(self, record: object, *, append_eod: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the documents of a record: one conversation, or the two of a preference."""
        if self.fields.preference:
            return self.encode_pair(record, append_eod=append_eod)
        return [self.encode(record, append_eod=append_eod)]

    def encode_pair(self, record: object, *, append_eod: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return what :meth:`encode` does of the chosen and of the rejected conversation of a preference; only the
        tokens of what follows the prompt count.

        Raises:
            ConversationRefusal: the record, or what the template makes of it, cannot be used.
        """
        found = preference_of(record, self.fields)
        both = [self._encoded(messages, append_eod, found.shared) for messages in (found.chosen, found.rejected)]
        if both[0][2] != both[1][2]:
            raise ConversationRefusal(f"{self.template.source} renders the prompt of the chosen answer otherwise than "
                                      "that of the rejected one")
        tokens, most = sum(len(ids) for ids, _, _ in both), self.fields.longest_pair
        if 0 < most < tokens:
            raise ConversationRefusal(f"the two have {tokens} tokens together, more than --longest-pair {most}")
        return [(ids, counted) for ids, counted, _ in both]

    def _encoded(
        self, messages: Sequence[Message], append_eod: bool, shared: int = 0
    ) -> tuple[np.ndarray, np.ndarray, str]:
        """Return (ids, which count, the text before the first answer); answers among the first ``shared`` messages do
        not count."""
        self._check_content(messages)
        if messages[0]["role"] == "system" and self._drops_system:
            raise ConversationRefusal(f"{self.template.source} leaves system prompts out, and there is one")
        try:
            rendered = answers_of(self.template, messages)
        except TemplateRefusal as error:
            raise ConversationRefusal(str(error)) from None
        assert rendered.answers is not None
        turns, before = (sum(m["role"] == "assistant" for m in part) for part in (messages, messages[:shared]))
        if before and len(rendered.answers) != turns:
            raise ConversationRefusal(f"{self.template.source} marks {len(rendered.answers)} answers of {turns} "
                                      "assistant's turns, so those of the prompt are not to be told apart")
        rendered = Rendered(rendered.text, rendered.answers[before:])
        spans = self.tokenizer.encode_spans(rendered.text)
        counted = counted_tokens(spans, rendered)
        if not counted.any() or not rendered.answers:
            raise ConversationRefusal("no token of an answer is left to learn from")
        end, prompt = self.tokenizer.eod_id, rendered.text[: rendered.answers[0][0]]
        if append_eod and end not in spans.ids[spans.first >= rendered.answers[-1][0]]:
            return np.append(spans.ids, end), np.append(counted, counted[-1]), prompt
        return spans.ids, counted, prompt

    def _check_content(self, messages: Sequence[Message]) -> None:
        for i, message in enumerate(messages):
            text = message["content"]
            found = self._special.search(text) if self.tokenizer.special else None
            if found:
                raise ConversationRefusal(f"message {i} has the special piece {found.group()!r} in its text, which "
                                          "would end a turn or begin one")
            if "\0" in text:
                raise ConversationRefusal(f"message {i} has a NUL character; it is binary, or damaged")
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise ConversationRefusal(f"message {i} has half of a surrogate pair") from None

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tokenizer.special)))

    @cached_property
    def description(self) -> bytes:
        """Return what is kept beside the corpus: the template, its pieces, and the ids that end an answer."""
        body = {"template": self.template.text, "pieces": dict(self.template.pieces), "stop_ids": self.stop_ids()}
        if self.template.dated and self.template.now is not None:
            body["now"] = self.template.now.isoformat()
        return (json.dumps(body, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode()

    @property
    def hash(self) -> str:
        """Return the sha256 of :attr:`description`."""
        return hashlib.sha256(self.description).hexdigest()

    def stop_ids(self) -> list[int]:
        """Return the special id with which an answer ends, or nothing (see :meth:`end_note`).

        Raises:
            DataError: the template does not render the shortest conversation, or the tokenizer does not part its
                answer from what is before it.
        """
        try:
            rendered = answers_of(self.template, PROBE)
            spans = self.tokenizer.encode_spans(rendered.text)
            counted = counted_tokens(spans, rendered)
        except TemplateRefusal as error:
            raise DataError(str(error)) from None
        except ConversationRefusal as error:
            raise DataError(f"{self.template.source} cannot be used with this tokenizer: {error}") from None
        special = set(self.tokenizer.special.values())
        return [int(i) for i in spans.ids[counted] if int(i) in special][-1:]

    def end_note(self, *, append_eod: bool) -> str:
        """Return a line where only the last answer of a conversation has an end that counts; empty: each has.

        An end is anything after the content of an answer but white space: a special piece, a text, or the end of
        document.

        Raises:
            DataError: no answer has one, so a model would never learn to stop.
        """
        turn = (PROBE[0], {"role": "assistant", "content": _WORD})
        taught = [self._end_counts(turn * turns, append_eod) for turns in (1, 2)]
        known = [found for found in taught if found is not None]
        if not known or all(all(found) for found in known):
            return ""
        if any(found[-1] for found in known):
            return (f"{self.template.source}: no end of an answer is learned but that of a conversation's last; a "
                    "model may write the next turn of the user, too")
        raise DataError(
            f"{self.template.source}: nothing that counts follows the content of an answer, so a model would learn no "
            "end and never stop; put {{ eos_token }} or the piece that ends a turn after the content, within the "
            "{% generation %} block if there is one"
        )

    def _end_counts(self, messages: Sequence[Message], append_eod: bool) -> list[bool] | None:
        """Return whether an end of each answer counts; None: the template does not render so many turns."""
        try:
            rendered = answers_of(self.template, messages)
            ids, counted, _ = self._encoded(messages, append_eod)
        except (TemplateRefusal, ConversationRefusal):
            return None
        assert rendered.answers is not None
        ends = [bool(rendered.text[first:end].rpartition(_WORD)[2].strip())
                for first, end in rendered.answers]
        if ends and append_eod and ids[-1] == self.tokenizer.eod_id and counted[-1]:
            ends[-1] = True
        return ends

    @cached_property
    def _drops_system(self) -> bool:
        """Whether the template leaves the content of a system prompt out."""
        try:
            return _STANDIN not in self.template.render([{"role": "system", "content": _STANDIN}, *PROBE]).text
        except TemplateRefusal:  # it refuses one by itself, with its own words
            return False


def chat_recipe(tokenizer: Tokenizer, template: str = "", fields: ChatFields | None = None) -> ChatRecipe:
    """Return the recipe of ``data prepare --chat``; ``template``: a file, a built-in name, or the tokenizer's own.

    A template that asks for the time is given the beginning of this day, for all conversations.

    Raises:
        DataError: there is no template, or it cannot be used with this tokenizer.
    """
    path: Path | None = getattr(tokenizer, "path", None)
    special: Mapping[str, int] = getattr(tokenizer, "special", {})
    end = next((piece for piece, i in special.items() if i == tokenizer.eod_id), "")
    folder = path.parent if path else None
    today = datetime.combine(date.today(), time())
    found = find_template(template, folder, special_pieces(folder, end), now=today)
    recipe = ChatRecipe(found, tokenizer, fields or ChatFields())
    recipe.stop_ids()  # a template that cannot be rendered is refused before anything is read
    return recipe


def answers_of(template: ChatTemplate, messages: Sequence[Message]) -> Rendered:
    """Render a conversation and find the characters of its answers.

    Raises:
        TemplateRefusal: the template fails, or renders a turn otherwise once others follow, so that its answer is
            not to be found.
    """
    whole = template.render(messages)
    if whole.answers is not None:
        return whole
    found = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:i], add_generation_prompt=True).text
        through = template.render(messages[:i + 1]).text
        if not whole.text.startswith(before) or not through.startswith(before):
            raise TemplateRefusal(f"{template.source} changes what precedes message {i} once it is there, so its "
                                  "answer is not to be found; mark answers by {% generation %} blocks")
        end = len(through) if whole.text.startswith(through) else _end_of_turn(template, messages, i, before)
        if end < 0:
            raise TemplateRefusal(f"{template.source} renders message {i} otherwise once others follow, so its answer "
                                  "is not to be found; mark answers by {% generation %} blocks")
        found.append((len(before), end))
    return Rendered(whole.text, tuple(found))


def _end_of_turn(template: ChatTemplate, messages: Sequence[Message], i: int, before: str) -> int:
    """End of a turn that is rendered in another way than as the last one, such as without its reasoning; -1: not found.

    Another content in its place shows where it stands in the whole conversation, and what closes a turn.
    """
    other = {**messages[i], "content": _STANDIN}
    whole = template.render(messages).text
    head, found, tail = template.render([*messages[:i], other, *messages[i + 1:]]).text.partition(_STANDIN)
    _, last, close = template.render([*messages[:i], other]).text.partition(_STANDIN)
    end = len(whole) - len(tail)
    kept = whole[len(head):end]
    same = found and last and whole.startswith(head) and whole.endswith(tail) and head.startswith(before)
    if not same or not tail.startswith(close) or not kept.strip() or kept.strip() not in messages[i]["content"]:
        return -1
    return end + len(close)


def counted_tokens(spans: Spans, rendered: Rendered) -> np.ndarray:
    """Return which tokens are within an answer, bool [n].

    Raises:
        ConversationRefusal: a token is on both sides of an answer's edge.
    """
    counted = np.zeros(len(spans.ids), dtype=bool)
    for first, end in rendered.answers or ():
        for edge in (first, end):
            across = np.flatnonzero((spans.first < edge) & (spans.end > edge))
            if across.size:
                begin, stop = int(spans.first[across[0]]), int(spans.end[across[0]])
                raise ConversationRefusal(
                    f"the token of {rendered.text[begin:stop]!r:.60} (characters {begin} to {stop} of the rendered "
                    f"conversation) belongs to both sides of the edge of an answer at {edge}; trim the white space of "
                    "the contents, or use a template that parts them")
        counted |= (spans.first >= first) & (spans.first < end)
    return counted
