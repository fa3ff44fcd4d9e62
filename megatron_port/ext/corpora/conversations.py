"""Conversations of a data set: the forms that are read, and the refusal of all others by the keys that they have.

Read are lists of messages (role and content, as OpenAI and transformers write them; from and value, as ShareGPT does)
and pairs of a question and an answer (Alpaca, Dolly, OpenOrca, prompt and completion, two fields that the user names),
each with a system prompt and earlier turns beside it. Every key of a record is read, repeats what another says, is
known to change nothing, or is refused by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant",
}
"""Role, or ShareGPT's ``from`` → role."""
LISTS = ("messages", "conversations")
PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"),
    ("question", "response"), ("question", "answer"), ("query", "response"), ("input", "output"),
)
"""Keys of a question and its answer; the first whose keys a record has are read."""
QUESTIONS = tuple(dict.fromkeys(question for question, _ in PAIRS))
CONTEXT = ("input", "context")
"""Texts that follow a question, on a line of their own (Alpaca's ``input``, Dolly's ``context``)."""
SYSTEM = ("system", "system_prompt")
HISTORY = "history"
"""Earlier turns: pairs of a question and an answer, or messages."""
PREFERENCES = ("chosen", "rejected")
NOT_READ = {
    "tools": "tool calls", "functions": "tool calls", "tool_calls": "tool calls", "function_call": "tool calls",
    "images": "images", "image": "images", "videos": "videos", "audios": "sound", "audio": "sound",
}
"""Keys that change what a conversation means → what they stand for."""
IGNORED = frozenset((
    "_id", "id", "ids", "uid", "uuid", "idx", "index", "prompt_id", "message_id", "conversation_id",
    "conversation_hash", "category", "categories", "source", "data_source", "origin", "dataset", "dataset_name",
    "subset", "split", "topic", "domain", "tags", "lang", "language", "model", "generator", "timestamp", "created_at",
    "date", "url", "license", "score", "scores", "score_chosen", "score_rejected",
    "chosen_score", "rejected_score", "chosen_model", "rejected_model", "chosen-rating", "rejected-rating",
    "chosen-model", "rejected-model",
))
"""Keys that tell where a record is from, or how good it is, and are no part of what is said."""
_SHOWN = 12
"""Keys that a refusal names."""


class ConversationRefusal(Exception):
    """A record that holds no conversation that can be read; the message names the keys found."""


@dataclass(frozen=True)
class ChatFields:
    """Where a record keeps its conversation."""

    messages: str = ""
    """Key of the list of messages; empty: ``messages`` or ``conversations``."""
    pair: tuple[str, str] | None = None
    """Keys of the question and the answer; None: one of :data:`PAIRS`."""
    preference: bool = False
    """Records are preferences (``objectives.preferences``): two documents of each."""
    longest_pair: int = 0
    """Tokens that the two together may have; 0: any number."""
    ignored: tuple[str, ...] = ()
    """Keys that are left out, beside :data:`IGNORED`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys that are read, in this order; the first that a record has decides."""
        lists = (self.messages,) if self.messages else LISTS
        pairs = () if self.pair else (key for pair in PAIRS for key in pair)
        return tuple(dict.fromkeys((*(self.pair or ()), *lists, *pairs)))

    def columns(self, names: Iterable[str]) -> list[str]:
        """Return the columns of a table that matter: all, if one of them can hold a conversation, but those that are
        ignored. A column that is not read could not be refused."""
        names = list(names)
        if not {*self.keys, *PREFERENCES} & set(names):
            return []
        return [name for name in names if name in self.keys or not self.ignores(name)]

    def ignores(self, key: str) -> bool:
        """Return whether a key changes nothing."""
        return key in self.ignored or key in IGNORED


class Record:
    """A record's values by key, and which of them were read. Raises ConversationRefusal: it is no object."""

    def __init__(self, record: object, fields: ChatFields) -> None:
        if not isinstance(record, dict):
            what = "an array; write one object per line (jq -c '.[]' FILE)" if isinstance(record, list) else "no object"
            raise ConversationRefusal(f"the line is {what}")
        self.fields, self.values, self.read = fields, _non_empty(record), set[str]()
        for key in fields.ignored:
            self.values.pop(key, None)
        self.said: list[str] = []
        """Texts that were read from keys of their own."""

    def __contains__(self, key: str) -> bool:
        return key in self.values

    @property
    def names(self) -> str:
        """Return the keys, for a message."""
        return names(self.values) or "of nothing"

    def take(self, key: str) -> Any:
        """Return the value of a key, which counts as read."""
        self.read.add(key)
        return self.values[key]

    def text(self, key: str) -> str:
        """Return a key's text."""
        self.said.append(text_of(self.take(key), key))
        return self.said[-1]

    def messages(self, key: str) -> list[dict[str, str]]:
        """Return a key's list of messages."""
        return messages_in(self.take(key), key, self.fields)

    def side(self, key: str, role: str) -> list[dict[str, str]]:
        """Return one side of a pair: messages, one message, or a text by ``role``."""
        value = self.values[key]
        value = [value] if isinstance(value, dict) else value
        if isinstance(value, list) and value and isinstance(value[0], dict) and "type" not in value[0]:
            self.read.add(key)
            return messages_in(value, key, self.fields)
        return [{"role": role, "content": self.text(key)}]

    def question(self, key: str) -> list[dict[str, str]]:
        """Return a question as messages, with its context."""
        found = self.side(key, "user")
        for extra in CONTEXT:
            if extra in self.values and extra not in self.read:
                if found[-1]["role"] != "user" or len(found) > 1:
                    raise ConversationRefusal(f"{extra!r} stands beside {key!r}, which is a list of messages "
                                              f"({self.names})")
                found = [{"role": "user", "content": found[0]["content"] + "\n" + self.text(extra)}]
        return found

    def before(self, found: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the system prompt and the earlier turns that stand beside ``found``."""
        turns = history_of(self.take(HISTORY), self.fields) if HISTORY in self.values else []
        systems = [self.text(key) for key in SYSTEM if key in self.values]
        systems += [m["content"] for m in found[:1] if m["role"] == "system"]
        if turns and found[0]["role"] == "system":
            raise ConversationRefusal(f"{HISTORY!r} stands beside messages with a system prompt ({self.names})")
        if len(set(systems)) > 1:
            raise ConversationRefusal(f"the record has several system prompts ({self.names}); leave one in")
        own = found[0]["role"] == "system"
        return [*({"role": "system", "content": text} for text in systems[:1] if not own), *turns]

    def check(self, *conversations: list[dict[str, str]]) -> None:
        """Refuse what was not read, unless it repeats what one of ``conversations`` says."""
        left = [key for key in self.values if key not in self.read and not self.fields.ignores(key)]
        refuse_extras({key: self.values[key] for key in left}, "the record", self.names)
        unread = [key for key in left if not any(self._repeats(key, messages) for messages in conversations)][:_SHOWN]
        if unread:
            verb, them = ("is", "it") if len(unread) == 1 else ("are", "them")
            raise ConversationRefusal(
                f"the record has {', '.join(f'{key!r:.60}' for key in unread)}, which {verb} not read, and might "
                f"change what is said ({self.names}); --chat-ignore "
                f"{' '.join(shlex.quote(key[:60]) for key in unread)} leaves {them} out")

    def _repeats(self, key: str, messages: list[dict[str, str]]) -> bool:
        """Whether a key says again what is in the messages: one of them, all of them, or a text made of all."""
        value = self.values[key]
        if isinstance(value, str):
            rendered = key == "text" and all(
                self._within(m["content"], value) for m in messages if m["role"] != "system")
            return rendered or value in (*self.said, *(m["content"] for m in messages))
        try:
            return messages_in(value, key, self.fields) in (messages, messages[1:])
        except ConversationRefusal:
            return False


    def _within(self, content: str, text: str) -> bool:
        """Whether a text made of the conversation has a message, or all that it was put together from."""
        parts = [part for part in self.said if part and part in content]
        return content in text or (bool(parts) and all(part in text for part in parts))


def messages_of(record: object, fields: ChatFields) -> list[dict[str, str]]:
    """Return the messages of a record: role (system, user, assistant) and content.

    Raises:
        ConversationRefusal: another form, a key that is not understood, tool calls, images, preferences, or no answer
            to learn from.
    """
    values = Record(record, fields)
    if all(key in values for key in PREFERENCES):
        raise ConversationRefusal(f"a preference record ({values.names}); --chat reads conversations, and "
                                  "--preference such pairs")
    found = _read(values, fields)
    found = [*values.before(found), *found]
    values.check(found)
    if not any(message["role"] == "assistant" for message in found):
        raise ConversationRefusal("no assistant's turn, so nothing to learn from it")
    return found


def _read(values: Record, fields: ChatFields) -> list[dict[str, str]]:
    if fields.pair is None:
        for key in (fields.messages,) if fields.messages else LISTS:
            if key in values:
                return values.messages(key)
    for question, answer in (fields.pair,) if fields.pair else PAIRS:
        if question in values and answer in values:
            values.read.add(answer)  # no context of the question, whatever it is called
            return [*values.question(question), *values.side(answer, "assistant")]
    raise ConversationRefusal(
        f"no conversation under {names(fields.keys)}; found the keys {values.names}. Name the list of messages with "
        "--json-key, or two text fields with --chat-fields QUESTION ANSWER")


def history_of(value: object, fields: ChatFields) -> list[dict[str, str]]:
    """Return earlier turns: pairs of texts, or messages. Raises ConversationRefusal."""
    if not isinstance(value, list):
        raise ConversationRefusal(f"{HISTORY!r} is no list of turns")
    if all(isinstance(turn, dict) for turn in value):
        return messages_in(value, HISTORY, fields)
    out = []
    for i, turn in enumerate(value):
        if not isinstance(turn, list) or len(turn) != 2:
            raise ConversationRefusal(f"{HISTORY}[{i}] is no pair of a question and an answer")
        out += [{"role": role, "content": text_of(text, f"{HISTORY}[{i}]")}
                for role, text in zip(("user", "assistant"), turn)]
    return out


def messages_in(value: object, key: str, fields: ChatFields) -> list[dict[str, str]]:
    """Return the messages of a list. Raises ConversationRefusal."""
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise ConversationRefusal(f"{key!r} is not a list of messages")
    return [_message(m, f"{key}[{i}]", fields) for i, m in enumerate(value)]


def _message(message: Mapping[str, Any], where: str, fields: ChatFields) -> dict[str, str]:
    present = {key: value for key, value in message.items()
               if value is not None and value != [] and not fields.ignores(key)}
    refuse_extras(present, where, names(present))
    keys = ("role", "content") if "role" in present else ("from", "value")
    if set(present) != set(keys):
        raise ConversationRefusal(f"{where} has the keys {names(present)}; expected role and content, or from and "
                                  "value")
    role = present[keys[0]]
    if not isinstance(role, str) or role not in ROLES:
        raise ConversationRefusal(f"{where} is by {role!r:.40}; read are {names(ROLES)}")
    return {"role": ROLES[role], "content": text_of(present[keys[1]], where)}


def text_of(value: object, where: str) -> str:
    """Return a text, or the texts of its parts. Raises ConversationRefusal."""
    if isinstance(value, str):
        return value
    parts: list[str] = []
    for part in value if isinstance(value, list) else [value]:
        present = _non_empty(part, keep="text") if isinstance(part, dict) else {}
        kind = present.get("type") if isinstance(part, dict) else type(part).__name__
        text = present.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise ConversationRefusal(f"{where} has content of type {kind!r:.40}; only text is read")
        if set(present) != {"type", "text"}:
            raise ConversationRefusal(f"{where} has a part with the keys {names(present)}; expected type and text")
        parts.append(text)
    return "".join(parts)


def refuse_extras(present: Mapping[str, Any], where: str, found: str) -> None:
    """Raise ConversationRefusal for tool calls, images and the like in a record or a message."""
    for key, what in NOT_READ.items():
        if key in present:
            raise ConversationRefusal(f"{where} has {what} ({found}), which --chat does not read")


def _non_empty(record: Mapping[str, Any], keep: str = "") -> dict[str, Any]:
    """Return what a record says; tables write an empty value for each key that another row has."""
    return {key: value for key, value in record.items() if key == keep or value not in (None, [], {}, "")}


def names(keys: Iterable[object]) -> str:
    """Return keys for a message, the first dozen."""
    return ", ".join(str(key)[:40] for key in list(keys)[:12])


# Preferences of a data set: a prompt and two answers to it, of which one was chosen and one rejected.
#
# Read are ``chosen`` and ``rejected``, as texts or as messages, with ``prompt`` (a text or messages; or ``question``,
# ``instruction``, …, or the messages under ``messages`` or ``conversations``) or with the prompt at their head. What
# both begin with is the prompt; the assistant's turns after it are the answer.

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
