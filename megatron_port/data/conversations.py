"""Conversations of a data set: the forms that are read, and the refusal of all others by the keys that they have.

Read are ``messages`` (role and content, as OpenAI and transformers write them), ``conversations`` (from and value, as
ShareGPT does), ``prompt`` and ``completion``, and two text fields that the user names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant",
}
"""Role, or ShareGPT's ``from`` → role."""
LISTS = ("messages", "conversations")
PAIR = ("prompt", "completion")
PREFERENCES = ("chosen", "rejected")
NOT_READ = {
    "tools": "tool calls", "functions": "tool calls", "tool_calls": "tool calls", "function_call": "tool calls",
    "images": "images", "image": "images", "videos": "videos", "audios": "sound", "audio": "sound",
}
"""Keys that change what a conversation means → what they stand for."""


class ConversationRefusal(Exception):
    """A record that holds no conversation that can be read; the message names the keys found."""


@dataclass(frozen=True)
class ChatFields:
    """Where a record keeps its conversation."""

    messages: str = ""
    """Key of the list of messages; empty: ``messages`` or ``conversations``."""
    pair: tuple[str, str] | None = None
    """Keys of the question and the answer; None: ``prompt`` and ``completion``."""
    preference: bool = False
    """Records are preferences (``data.preferences``): two documents of each."""
    longest_pair: int = 0
    """Tokens that the two together may have; 0: any number."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys that are read, in this order; the first that a record has decides."""
        lists = (self.messages,) if self.messages else LISTS
        return (*(self.pair or ()), *lists, *(() if self.pair else PAIR))

    def columns(self, names: Iterable[str]) -> list[str]:
        """Return the columns of a table that matter."""
        wanted = {*self.keys, *PREFERENCES, *NOT_READ, "system", "prompt"}
        return [name for name in names if name in wanted]


def messages_of(record: object, fields: ChatFields) -> list[dict[str, str]]:
    """Return the messages of a record: role (system, user, assistant) and content.

    Raises:
        ConversationRefusal: another form, tool calls, images, preferences, or no answer to learn from.
    """
    if not isinstance(record, dict):
        what = "an array; write one object per line (jq -c '.[]' FILE)" if isinstance(record, list) else "no object"
        raise ConversationRefusal(f"the line is {what}")
    present = non_empty(record)
    if all(key in present for key in PREFERENCES):
        raise ConversationRefusal(f"a preference record ({names(present)}); --chat reads conversations, and "
                                  "--preference such pairs")
    found = _read(present, fields)
    refuse_extras(present, "the record")
    if "system" in present and found[0]["role"] != "system":
        found.insert(0, {"role": "system", "content": _text(present["system"], "system")})
    if not any(message["role"] == "assistant" for message in found):
        raise ConversationRefusal("no assistant's turn, so nothing to learn from it")
    return found


def _read(present: Mapping[str, Any], fields: ChatFields) -> list[dict[str, str]]:
    question, answer = fields.pair or PAIR
    if fields.pair is None:
        for key in (fields.messages,) if fields.messages else LISTS:
            if key in present:
                return _messages(present[key], key)
    if question in present and answer in present:
        return [*side(present[question], question, "user"), *side(present[answer], answer, "assistant")]
    raise ConversationRefusal(
        f"no conversation under {names(fields.keys)}; found the keys {names(present) or 'of nothing'}. Name the "
        "list of messages with --json-key, or two text fields with --chat-fields QUESTION ANSWER")


def side(value: object, key: str, role: str) -> list[dict[str, str]]:
    """Return one side of a pair as messages: a text is one by ``role``. Raises ConversationRefusal."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "type" not in value[0]:
        return _messages(value, key)
    return [{"role": role, "content": _text(value, key)}]


def _messages(value: object, key: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise ConversationRefusal(f"{key!r} is not a list of messages")
    return [_message(m, f"{key}[{i}]") for i, m in enumerate(value)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, str]:
    present = {key: value for key, value in message.items() if value is not None and value != []}
    refuse_extras(present, where)
    keys = ("role", "content") if "role" in present else ("from", "value")
    if set(present) != set(keys):
        raise ConversationRefusal(f"{where} has the keys {names(present)}; expected role and content, or from and "
                                  "value")
    role = present[keys[0]]
    if not isinstance(role, str) or role not in ROLES:
        raise ConversationRefusal(f"{where} is by {role!r:.40}; read are {names(ROLES)}")
    return {"role": ROLES[role], "content": _text(present[keys[1]], where)}


def _text(value: object, where: str) -> str:
    """A text, or the texts of its parts."""
    if isinstance(value, str):
        return value
    parts: list[str] = []
    for part in value if isinstance(value, list) else [value]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) and kind == "text" else None
        if not isinstance(text, str):
            raise ConversationRefusal(f"{where} has content of type {kind!r:.40}; only text is read")
        parts.append(text)
    return "".join(parts)


def refuse_extras(present: Mapping[str, Any], where: str) -> None:
    """Raise ConversationRefusal for tool calls, images and the like in a record or a message."""
    for key, what in NOT_READ.items():
        if key in present:
            raise ConversationRefusal(f"{where} has {what} ({names(present)}), which --chat does not read")


def non_empty(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says; tables write an empty value for each key that another row has."""
    return {key: value for key, value in record.items() if value not in (None, [], {}, "")}


def names(keys: Iterable[object]) -> str:
    """Return keys for a message, the first dozen."""
    return ", ".join(str(key)[:40] for key in list(keys)[:12])
