"""The tokenizer that a checkpoint was trained with, found by its hash; and whether another folder holds the same.

A corpus keeps its tokenizer beside itself, as ``PREFIX.tokenizer.json`` or ``.model``, and a checkpoint records its
name and its hash. Only that file may be exported with the weights: to another tokenizer their ids mean other text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.checkpoint.shard import write_text
from megatron_port.core.data.indexed import OWN_TOKENIZERS, bos_ids, chat_path
from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.chat_template import (
    ChatTemplate,
    TemplateRefusal,
    find_template,
    settings_of,
    special_pieces,
)
from megatron_port.ext.corpora.chat_tokens import PROBE
from megatron_port.ext.corpora.tokenizer import (
    NOTHING_ADDED,
    AddedIds,
    Tokenizer,
    added_ids,
    content_hash,
    get_tokenizer,
    load,
    read_file,
)

FILES = {"hf": ("tokenizer.json", ".json"), "sentencepiece": ("tokenizer.model", ".model")}
"""Kind → its file's name in a Hugging Face folder, and the suffix of the copy beside a corpus."""
PROBES = (
    "Hello, world! The quick brown fox; it's 1,234.56 (or 7e-8)?", "  two  spaces\n\n\tand\ttabs\n",
    "naïve — 東京 🙂 Ωμέγα", "def f(x):\n    return {'a': [x, 0x1F]}  # why\n", "\x00\x7f￿ﬁ",
)
"""Texts on which two tokenizers that cannot be compared byte by byte must give the same ids."""


@dataclass(frozen=True)
class Trained:
    """Tokenizer that a checkpoint was trained with, as far as the checkpoint records it."""

    name: str
    """``byte``, ``gpt2``, ``hf:PATH#PIECE``, ``sentencepiece:PATH``, ``tiktoken:ENCODING``; empty: not recorded."""
    hash: str = ""
    """Empty: made before hashes were kept."""
    eod_id: int = -1
    prefixes: tuple[str, ...] = ()
    """Path prefixes of the corpora."""
    chats: tuple[tuple[str, tuple[Path, ...]], ...] = ()
    """Hash of the chat template of each corpus of conversations, and where it was."""
    bos: str = ""
    """How documents began: see ``data.indexed.CorpusMeta.bos``."""

    @property
    def kind(self) -> str:
        """``hf``, ``sentencepiece``, ``tiktoken``, ``byte``, ``gpt2`` or empty."""
        if self.name in OWN_TOKENIZERS or ":" in self.name:
            return self.name.partition(":")[0]
        return {".json": "hf", ".model": "sentencepiece"}.get(Path(self.name).suffix, "hf" if self.name else "")

    @property
    def path(self) -> Path:
        """The file that the name holds, if it is one."""
        rest = self.name.partition(":")[2] if self.name.startswith(tuple(f"{k}:" for k in FILES)) else self.name
        path = Path(rest.rpartition("#")[0] if self.piece else rest)
        return path / FILES["hf"][0] if path.is_dir() else path

    @property
    def piece(self) -> str:
        """The end-of-document piece that the name holds; empty: the file's own."""
        rest = self.name.partition(":")[2]
        return rest.rpartition("#")[2] if "#" in rest and not Path(rest).exists() else ""

    def added(self, tokenizer: Tokenizer) -> AddedIds:
        """Return what stood around each text in training; where only templates decided, what ``tokenizer`` adds."""
        own = added_ids(tokenizer)
        try:
            before = None if self.chats and not self.bos else bos_ids(self.bos)
        except ValueError:  # a record of a later version, or damaged
            before = None
        if before is None or before == own.before:
            return own
        return AddedIds(before) if before else NOTHING_ADDED


ADVICE = "give the folder with it by --tokenizer DIR (it is compared), or export weights alone with --no-tokenizer"


def trained_with(checkpoint: Checkpoint) -> Trained:
    """The tokenizer of the run that wrote a checkpoint. What is not of the expected type counts as not recorded."""
    state = checkpoint.manifest.state
    known = state.tokenizer if isinstance(state.tokenizer, Mapping) else {}
    name = checkpoint.extra.get("tokenizer") or known.get("name") or ""
    eod, found = known.get("eod_id"), state.data.get("corpora") if isinstance(state.data, Mapping) else ()
    corpora = [c for c in found if isinstance(c, Mapping)] if isinstance(found, list) else []
    prefixes = [c["prefix"] for c in corpora if isinstance(c.get("prefix"), str)]
    chats = [(c["chat"], (chat_path(c["prefix"]), Path(str(c.get("chat_file", "")))))
             for c in corpora if isinstance(c.get("prefix"), str) and isinstance(c.get("chat"), str)]
    return Trained(
        name if isinstance(name, str) else "", str(known.get("hash") or ""), eod if isinstance(eod, int) else -1,
        tuple(prefixes), tuple(chats), str(known.get("bos") or ""),
    )


def pinned_file(trained: Trained, advice: str = ADVICE) -> Path:
    """The file of the tokenizer that was trained with, wherever the run recorded it or its corpora keep it.

    ``advice``: end of the message, what to do where the file cannot be put back.

    Raises:
        DataError: none is there, or what is there is another; the message names each file and both hashes.
    """
    suffix = FILES[trained.kind][1]
    places = [trained.path, *(Path(f"{prefix}.tokenizer{suffix}") for prefix in trained.prefixes)]
    there = [p for p in dict.fromkeys(p.absolute() for p in places) if p.is_file()]
    for path in there:
        if not trained.hash or file_hash(path, trained) == trained.hash:
            return path
    if there:
        found = "; ".join(f"{path} has hash {file_hash(path, trained)}" for path in there)
        raise DataError(
            f"the checkpoint was trained with tokenizer {trained.name} of hash {trained.hash}, and {found}: its ids "
            f"mean other text. Put the old file back, {advice}"
        )
    missing = " and no ".join(str(p.absolute()) for p in dict.fromkeys(places))
    raise DataError(
        f"the checkpoint was trained with tokenizer {trained.name}, and its file is not there: no {missing}. Put it "
        f"back, {advice}"
    )


def file_hash(path: Path, trained: Trained) -> str:
    """The hash of a tokenizer that is one file, with the end of documents that was trained with.

    Raises DataError: it cannot be read.
    """
    if trained.eod_id >= 0:
        return content_hash(read_file(path)[1], trained.eod_id)
    # Documents carried no end, so the sidecar does not have its id: the tokenizer itself knows.
    return str(getattr(load(trained.kind, str(path), eod=trained.piece), "hash", ""))


def check_same(folder: Path, trained: Trained, form: Callable[[], dict[str, Any]]) -> str:
    """Return how ``folder``'s tokenizer was found to be the one trained with: a few words for the model card.

    A file with the recorded hash is the same. Another form of it (GPT-2's as a tokenizer.json) must have the same
    pieces, merges and end of text, and the same ids on ``PROBES``.

    Args:
        form: a tokenizer.json of a tokenizer that is complete in itself (``byte``, ``gpt2``).

    Raises:
        DataError: it is another, or nothing can be compared.
    """
    for kind, (name, _) in FILES.items():
        path = folder / name
        if trained.hash and kind == trained.kind and path.is_file() and file_hash(path, trained) == trained.hash:
            return "the file trained with, by its hash"
    theirs = tokenizer_in(folder)
    wrong = f"{folder}: another tokenizer than {trained.name}, which the checkpoint was trained with"
    if trained.kind in FILES:
        try:
            path = pinned_file(trained)
        except DataError:
            raise DataError(f"{wrong} (hash {trained.hash or 'not recorded'}, file not there)") from None
        ours: Tokenizer = load(trained.kind, str(path), eod=trained.piece)
        rules = read_json(path) if trained.kind == "hf" else {}
    else:
        ours, rules = get_tokenizer(trained.name), form() if trained.kind in OWN_TOKENIZERS else {}
    fault = difference(ours, theirs, rules, read_json(folder / FILES["hf"][0]))
    if fault:
        raise DataError(f"{wrong}: {fault}")
    return f"{'pieces, merges and ' if rules else ''}ids equal to those of {trained.kind} on {len(PROBES)} texts"


def difference(ours: Tokenizer, theirs: Tokenizer, rules: dict[str, Any], other: dict[str, Any]) -> str:
    """The first thing in which two tokenizers differ; empty: sizes, end of text, pieces, merges and ids are the same.

    ``rules`` and ``other``: their tokenizer.json; pieces and merges are compared where both have one.
    """
    if theirs.vocab_size != ours.vocab_size:
        return f"{theirs.vocab_size} ids, not {ours.vocab_size}"
    if theirs.eod_id != ours.eod_id:
        return f"end of text {theirs.eod_id}, not {ours.eod_id}"
    if rules and other:
        mine, his = pieces(rules), pieces(other)
        for piece, i in mine.items():
            if his.get(piece) != i and i != ours.eod_id:
                return f"the piece {piece!r} has id {his.get(piece)}, not {i}"
        if merges(rules) != merges(other):
            return "other merges"
    return first_difference(ours, theirs.encode, PROBES)


def pieces(rules: dict[str, Any]) -> dict[str, int]:
    """Piece → id of a tokenizer.json; empty for a model that is no such table."""
    model = rules.get("model")
    table = model.get("vocab") if isinstance(model, dict) else None
    found = dict(table) if isinstance(table, dict) else {}
    added = rules.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            found[str(token.get("content"))] = token.get("id")
    return found


def merges(rules: dict[str, Any]) -> list[str]:
    """Merges of a tokenizer.json, as ``left right``: files hold them as strings or as pairs."""
    model = rules.get("model")
    found = model.get("merges") if isinstance(model, dict) else None
    return [m if isinstance(m, str) else " ".join(map(str, m)) for m in found] if isinstance(found, list) else []


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        body = json.loads(read_file(path)[1])
    except (DataError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def first_difference(ours: Tokenizer, encode: Any, texts: Iterable[str]) -> str:
    """The first text on which ``encode(text)`` gives other ids than ours; empty: none."""
    for text in texts:
        mine, other = list(ours.encode(text)), list(encode(text))
        if mine != other:
            both = min(len(mine), len(other))
            at = next((i for i in range(both) if mine[i] != other[i]), both)
            return f"{text!r} becomes {other[at:at + 4]} from id {at} on, not {mine[at:at + 4]}"
    return ""


def tokenizer_in(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder. Raises DataError: it has none that can be read."""
    for kind, (name, _) in FILES.items():
        if (folder / name).is_file():
            return load(kind, str(folder / name))
    raise DataError(f"{folder}: no {' and no '.join(name for name, _ in FILES.values())}, so no tokenizer that can be "
                    "compared with the one trained with")


# The chat template that a checkpoint was trained with: kept beside its corpora, exported with the weights.
#
# ``PREFIX.chat.json`` holds the template, the pieces that it names and the ids that end an answer, and the checkpoint
# records its hash. To another template the same words are another prompt.

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
