"""The chat template that a checkpoint was trained with: kept beside its corpora, exported with the weights.

``PREFIX.chat.json`` holds the template, the pieces that it names and the ids that end an answer, and the checkpoint
records its hash. To another template the same words are another prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_port.core.checkpoint.disk import write_text
from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.chat_template import (
    ChatTemplate,
    TemplateRefusal,
    find_template,
    settings_of,
    special_pieces,
)
from megatron_port.ext.corpora.chat_tokens import PROBE
from megatron_port.ext.corpora.tokenizer_base import Tokenizer
from megatron_port.tools.interop.pinned_tokenizer import ADVICE, Trained, read_json

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True)
class PinnedChat:
    """A template, and how an answer by it ends."""

    template: ChatTemplate
    stop_ids: tuple[int, ...] = ()

    def prompt(self, tokenizer: Any, text: str) -> list[int]:
        """Return the ids with which an answer to ``text``, a user's only message, begins.

        Raises DataError: the template does not render it.
        """
        try:
            rendered = self.template.render([{"role": "user", "content": text}], add_generation_prompt=True)
        except TemplateRefusal as error:
            raise DataError(str(error)) from None
        found: list[int] = tokenizer.encode_spans(rendered.text).ids.tolist()
        return found


def pinned_chat(trained: Trained, advice: str = ADVICE) -> PinnedChat | None:
    """Return the template of the conversations trained on; None: there were none.

    ``advice``: end of the message, what to do where the file cannot be put back.

    Raises:
        DataError: corpora of different templates, or the file is gone or is another.
    """
    if not trained.chats:
        return None
    if len({wanted for wanted, _ in trained.chats}) > 1:
        raise DataError("the checkpoint was trained on conversations of different chat templates: "
                        + ", ".join(f"{files[0]} (hash {wanted[:12]})" for wanted, files in trained.chats)
                        + f"; {advice}")
    wanted, places = trained.chats[0][0], [path for _, files in trained.chats for path in files]
    found = {path: path.read_bytes() for path in dict.fromkeys(places) if path.is_file()}
    for path, data in found.items():
        if hashlib.sha256(data).hexdigest() == wanted:
            return _read(path, data)
    where = f"{next(iter(found))} is another" if found else f"{places[0]} is not there"
    raise DataError(f"the checkpoint was trained on conversations by the chat template of hash {wanted}, and {where}. "
                    f"Put the old file back, {advice}")


def _read(path: Path, data: bytes) -> PinnedChat:
    try:
        body = json.loads(data)
        now = datetime.fromisoformat(body["now"]) if "now" in body else None
        return PinnedChat(ChatTemplate(str(body["template"]), dict(body["pieces"]), str(path), now),
                          tuple(int(i) for i in body["stop_ids"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not readable ({error!r:.100}); prepare the corpus again") from error


def folder_chat(folder: Path, tokenizer: Tokenizer) -> PinnedChat:
    """Return the template of a Hugging Face folder. Raises DataError: it has none."""
    special: Mapping[str, int] = getattr(tokenizer, "special", {})
    end = next((piece for piece, i in special.items() if i == tokenizer.eod_id), "")
    return PinnedChat(find_template("", folder, special_pieces(folder, end)))


def write_chat(part: Path, chat: PinnedChat) -> None:
    """Put the template and its pieces into a folder that has a tokenizer already."""
    write_text(part / TEMPLATE_FILE, chat.template.text)
    settings = settings_of(part)
    settings.pop("chat_template", None)  # one of two would be read
    write_text(part / SETTINGS_FILE, json.dumps({**settings, **chat.template.pieces}, indent=2, ensure_ascii=False)
               + "\n")


def chat_difference(chat: PinnedChat, ours: Any, theirs: Any) -> str:
    """Return how ``theirs``, transformers' tokenizer of a written folder, renders a conversation otherwise; empty: it
    does not."""
    wanted = ours.encode_spans(chat.template.render(PROBE).text).ids.tolist()
    try:
        found = theirs.apply_chat_template(list(map(dict, PROBE)), tokenize=True, return_dict=True)["input_ids"]
    except Exception as error:  # transformers raises anything
        return f"its chat template fails: {type(error).__name__}: {shortened(str(error), 200)}"
    return "" if found == wanted else f"a conversation becomes {found[:8]}, not {wanted[:8]}"


def end_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a text, as generation_config.json or else config.json says; empty: neither does."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if found:
            return found
    return ()


def write_generation(
    part: Path, kept: Path | None, ends: Sequence[int], *, bos: int | None = None, pad: int | None = None
) -> None:
    """Write the generation settings that the model was imported with, or only what begins, ends and fills up a text.

    ``ends``: ids that end a text or an answer; those that the settings lack are added to them. ``bos``: where there are
    no settings. ``pad``: where they name none; None: a batch is filled up with what ends a text.
    """
    path = part / "generation_config.json"
    body = read_json(kept / path.name) if kept is not None else {}
    known = end_ids(kept) if kept is not None and body else ()
    every = list(dict.fromkeys((*known, *ends)))
    pad = every[0] if pad is None and every else pad
    for name, value in (("bos_token_id", None if body else bos), ("pad_token_id", pad)):
        if value is not None and body.get(name) is None:
            body[name] = value
            body.pop("_from_model_config", None)  # transformers would make them anew from config.json
    if every and every != list(known):
        body["eos_token_id"] = every[0] if len(every) == 1 else every
    write_text(path, json.dumps(body, indent=2) + "\n")
