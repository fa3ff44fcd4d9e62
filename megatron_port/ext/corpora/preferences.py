"""Preferences of a data set: a prompt and two answers to it, of which one was chosen and one rejected.

Read are ``chosen`` and ``rejected``, as texts or as messages, with ``prompt`` (a text or messages; or ``question``,
``instruction``, …, or the messages under ``messages`` or ``conversations``) or with the prompt at their head. What both
begin with is the prompt; the assistant's turns after it are the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.ext.corpora.conversations import (
    LISTS,
    PREFERENCES,
    QUESTIONS,
    ChatFields,
    ConversationRefusal,
    Record,
)

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Preference:
    """Two conversations with the same beginning."""

    chosen: Messages
    rejected: Messages
    shared: int
    """Messages with which both begin."""


def preference_of(record: object, fields: ChatFields | None = None) -> Preference:
    """Return the two conversations of a record.

    Raises:
        ConversationRefusal: another form (the keys found are named), a key that is not understood, tool calls, images,
            no prompt, no answers that differ.
    """
    values = Record(record, fields or ChatFields(preference=True))
    if not all(key in values for key in PREFERENCES):
        raise ConversationRefusal(
            f"no preference under chosen and rejected; found the keys {values.names}. Rankings, scores and single "
            "labels must be turned into pairs first"
        )
    answers = [values.side(key, "assistant") for key in PREFERENCES]
    prompt = _prompt(values, answers)
    chosen, rejected = (_conversation(values, key, prompt, answer) for key, answer in zip(PREFERENCES, answers))
    before = values.before(chosen)
    chosen, rejected = before + chosen, before + rejected
    values.check(chosen, rejected)
    for key, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1]["role"] != "assistant":
            raise ConversationRefusal(f"{key} does not end with the assistant's turn")
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    if chosen == rejected:
        raise ConversationRefusal("chosen and rejected are the same")
    if not any(message["role"] == "user" for message in chosen[:shared]):
        raise ConversationRefusal(
            f"chosen and rejected have no prompt in common ({values.names}); give it as prompt, or as the first "
            "messages of both"
        )
    if not all(any(m["role"] == "assistant" for m in messages[shared:]) for messages in (chosen, rejected)):
        raise ConversationRefusal("one of the answers is the beginning of the other; nothing of it is left to compare")
    return Preference(chosen, rejected, shared)


def _prompt(values: Record, answers: list[Messages]) -> Messages:
    """The prompt of both answers; empty: it is at their head."""
    whole = any(answer[0]["role"] != "assistant" for answer in answers)
    question = next((key for key in QUESTIONS if key in values), "")
    listed = next((key for key in LISTS if key in values), "")
    if question and not (whole and question != "prompt"):
        return values.question(question)
    if listed and not whole:
        return values.messages(listed)
    if any(isinstance(values.values[key], str) for key in PREFERENCES):
        raise ConversationRefusal(f"chosen or rejected is a text, and there is no prompt ({values.names}); give the "
                                  "prompt apart, or messages")
    return []


def _conversation(values: Record, key: str, prompt: Messages, answer: Messages) -> Messages:
    """The prompt and one of the answers; a prompt that the answer's messages begin with is not repeated."""
    if not prompt:
        return answer
    if answer[0]["role"] == "assistant":
        return prompt + answer
    asked = [m for m in answer if m["role"] == "user"][:1]
    if answer[: len(prompt)] != prompt and not (isinstance(values.values["prompt"], str) and asked == prompt):
        raise ConversationRefusal(f"{key} begins with messages that are not those of prompt ({values.names})")
    return answer
