"""Preferences of a data set: a prompt and two answers to it, of which one was chosen and one rejected.

Read are ``chosen`` and ``rejected``, as texts or as messages, with ``prompt`` (a text or messages) or with the prompt
at their head. What both begin with is the prompt; the assistant's turns after it are the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_port.data.conversations import PREFERENCES, ConversationRefusal, names, non_empty, refuse_extras, side

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Preference:
    """Two conversations with the same beginning."""

    chosen: Messages
    rejected: Messages
    shared: int
    """Messages with which both begin."""


def preference_of(record: object) -> Preference:
    """Return the two conversations of a record.

    Raises:
        ConversationRefusal: another form (the keys found are named), tool calls, images, no prompt, no answers that
            differ.
    """
    if not isinstance(record, dict):
        raise ConversationRefusal("the line is no object")
    present = non_empty(record)
    if not all(key in present for key in PREFERENCES):
        raise ConversationRefusal(
            f"no preference under chosen and rejected; found the keys {names(present) or 'of nothing'}. Rankings, "
            "scores and single labels must be turned into pairs first"
        )
    refuse_extras(present, "the record")
    chosen, rejected = (_conversation(present, key) for key in PREFERENCES)
    for key, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1]["role"] != "assistant":
            raise ConversationRefusal(f"{key} does not end with the assistant's turn")
    if "system" in present and chosen[0]["role"] != "system":
        system = side(present["system"], "system", "system")
        chosen, rejected = system + chosen, system + rejected
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    if chosen == rejected:
        raise ConversationRefusal("chosen and rejected are the same")
    if not any(message["role"] == "user" for message in chosen[:shared]):
        raise ConversationRefusal(
            f"chosen and rejected have no prompt in common ({names(present)}); give it as prompt, or as the first "
            "messages of both"
        )
    if not all(any(m["role"] == "assistant" for m in messages[shared:]) for messages in (chosen, rejected)):
        raise ConversationRefusal("one of the answers is the beginning of the other; nothing of it is left to compare")
    return Preference(chosen, rejected, shared)


def _conversation(present: dict[str, Any], key: str) -> Messages:
    """The prompt and one of the answers; a prompt that the answer's messages begin with is not repeated."""
    answer = side(present[key], key, "assistant")
    if "prompt" not in present:
        if isinstance(present[key], str):
            raise ConversationRefusal(f"{key} is a text, and there is no prompt ({names(present)}); give the prompt "
                                      "apart, or messages")
        return answer
    prompt = side(present["prompt"], "prompt", "user")
    if answer[0]["role"] == "assistant":
        return prompt + answer
    asked = [m for m in answer if m["role"] == "user"][:1]
    if answer[: len(prompt)] != prompt and not (isinstance(present["prompt"], str) and asked == prompt):
        raise ConversationRefusal(f"{key} begins with messages that are not those of prompt ({names(present)})")
    return answer
