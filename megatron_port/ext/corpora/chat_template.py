"""Chat templates: the Jinja text that turns a conversation into a prompt, rendered as transformers renders it.

A template comes from the tokenizer's own folder, from a file, or from :data:`BUILT_IN`. It is untrusted, so it runs in
Jinja's immutable sandbox, in a process with a limit of time and memory (``template_process``). ``{% generation %}``
blocks mark the model's own words.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megatron_port.core import package
from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.unpack import need

# Jinja's sandbox for chat templates, with what those on the hub expect to find in it.

BEGIN, END = "\ufdd0", "\ufdd1"
"""Noncharacters that stand around the model's words until they are rendered. No text may have them."""


def compiled(text: str, now: str) -> Any:
    """Return Jinja's template. ``now``: result of ``strftime_now``, in ISO form. Raises DataError: it is none."""
    jinja2 = need("jinja2", "chat templates")
    environment = _environment(jinja2, datetime.fromisoformat(now) if now else None)
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise DataError(shortened(str(error), 200)) from error


def _environment(jinja2: Any, now: datetime | None) -> Any:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}``: the model's own words, between two marks."""

        tags = {"generation"}  # noqa: RUF012 (Jinja reads the class)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
               separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        # Jinja's own escapes <, > and & for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    return environment


# Chat templates of others, rendered in a process of their own that has a limit of time and memory.
#
# Jinja's sandbox keeps a template from files and modules, not from a loop without end or a text of gigabytes. A request
# and its answer are a line of JSON each; one process serves all templates of a process, and keeps what it compiled.

SECONDS = 10.0
"""Limit for one conversation, which takes about a millisecond."""
MEMORY = 1 << 30
"""Address space of the process in bytes, the interpreter's 0.1 GB included."""
LARGEST_TEXT = 1 << 20
"""Characters of a rendered conversation, in addition to 16 times as many as it and its template have."""
START_SECONDS = 120.0
"""Limit for the start of the process, on a loaded machine or a slow disk."""
_START = (
    "import sys; sys.path.insert(0, {root!r}); from megatron_port.ext.corpora.chat_template import serve; serve()"
)


class TemplateProcess:
    """The process that renders, started when it is first needed."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._held = b""

    def ask(self, request: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return ``text`` (the rendered conversation), ``refused`` (why not) or ``unreadable`` (no template).

        Raises:
            DataError: the template takes too much time or memory. ``source`` names it.
        """
        child = self._started()
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            answer = self._line(child.stdout.fileno(), time.monotonic() + SECONDS)
        except (BrokenPipeError, EOFError):
            self._end()
            raise DataError(f"{source}: the process that renders it ended; it takes more than {MEMORY >> 20} MiB, or "
                            "is damaged. Use another template") from None
        except TimeoutError:
            self._end()
            raise DataError(f"{source}: it takes more than {SECONDS:.0f} s for one conversation; use another "
                            "template") from None
        except BaseException:  # Ctrl-C in a program that continues: the answer must not be taken for the next one
            self._end()
            raise
        found: dict[str, Any] = json.loads(answer)
        if "exhausted" in found:
            self._end()  # its memory is in pieces
            raise DataError(f"{source}: it takes {found['exhausted']} for one conversation; use another template")
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            root = str(package.ROOT)
            self._held = b""
            self._child = subprocess.Popen(
                [sys.executable, "-c", _START.format(root=root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is for the parent
            assert self._child.stdout is not None
            try:
                self._line(self._child.stdout.fileno(), time.monotonic() + START_SECONDS)
            except BaseException as error:
                self._end()
                if not isinstance(error, (EOFError, TimeoutError)):
                    raise
                raise DataError("the process that renders chat templates does not start: "
                                + ("it ended" if isinstance(error, EOFError) else f"no answer in {START_SECONDS:.0f} s")
                                ) from None
        return self._child

    def _line(self, file: int, deadline: float) -> bytes:
        """Return the next line. Raises EOFError and TimeoutError."""
        parts = [self._held]
        while b"\n" not in parts[-1]:
            if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(file, 1 << 20)
            if not part:
                raise EOFError
            parts.append(part)
        line, _, self._held = b"".join(parts).partition(b"\n")
        return line

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


@cache
def _of_process(pid: int) -> TemplateProcess:
    return TemplateProcess()


def template_process() -> TemplateProcess:
    """Return this process's own: a forked worker shares no pipe with its parent."""
    return _of_process(os.getpid())


def serve() -> None:
    """Answer requests until there are no more: the process itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    with suppress(ValueError, OSError):  # a system without this limit still has that of time
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    made: dict[tuple[str, str], Any] = {}
    sys.stdout.write("{}\n")  # ready
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # A loop without end ends even where the parent is gone.
        spent = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(spent.ru_utime + spent.ru_stime + 2 * SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        answer = json.dumps(_answer(request, made, LARGEST_TEXT + 16 * len(line)))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _answer(
    request: Mapping[str, Any], made: dict[tuple[str, str], Any], largest: int
) -> dict[str, str]:
    key = (request["template"], request["now"])
    try:
        if key not in made:
            made.clear()  # a process needs one or two
            try:
                made[key] = compiled(*key)
            except DataError as error:
                return {"unreadable": str(error)}
        text = made[key].render(**variables(request["messages"], request["prompt"], request["pieces"]))
        return {"text": text} if len(text) <= largest else {"exhausted": f"{len(text)} characters"}
    except MemoryError:
        return {"exhausted": f"more than {MEMORY >> 20} MiB"}
    except Exception as error:  # a template can raise anything
        return {"refused": str(error)[:1000]}


def variables(messages: Sequence[Mapping[str, str]], prompt: bool, pieces: Mapping[str, str]) -> dict[str, Any]:
    """Return what a template can name."""
    return {**pieces, "messages": [dict(m) for m in messages], "tools": None, "documents": None,
            "add_generation_prompt": prompt}


Message = Mapping[str, str]
"""``role`` (system, user, assistant) and ``content``."""
LARGEST_TEMPLATE = 1 << 20
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Pieces of tokenizer_config.json that a template can name."""
BUILT_IN = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
        "{{ message['role'] | capitalize + ':\\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\nAssistant:\\n' }}{% endif %}"
    ),
}
"""``chatml``: for tokenizers that have its pieces. ``plain``: for any; an answer ends with the end of text."""
CHATML_PIECES = ("<|im_start|>", "<|im_end|>")


class TemplateRefusal(Exception):
    """A conversation that a template does not render; the message says why."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...] | None
    """Characters [first, end) within ``{% generation %}`` blocks; None: the template has none."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the pieces that it can name.

    Raises:
        DataError: on first use: it is not a template, or jinja2 is missing or older than 3.1.6 (which has escapes from
            the sandbox).
    """

    text: str
    pieces: Mapping[str, str] = field(default_factory=dict)
    """``eos_token`` and the like → piece."""
    source: str = "the template"
    """Where it is from, for messages."""
    now: datetime | None = None
    """Result of ``strftime_now``; None: the time of rendering."""

    @property
    def marked(self) -> bool:
        """Whether it has ``{% generation %}`` blocks."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.text) is not None

    @property
    def dated(self) -> bool:
        """Whether it asks for the date."""
        return "strftime_now" in self.text

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> Rendered:
        """Render a conversation; ``add_generation_prompt`` ends it with what precedes an answer.

        Raises:
            TemplateRefusal: the template refuses it, or fails on it.
        """
        if any(BEGIN in m["content"] or END in m["content"] for m in messages):
            raise TemplateRefusal("the text has a character that is none (U+FDD0 or U+FDD1)")
        jinja2 = need("jinja2", self.source)
        if tuple(int(n) for n in jinja2.__version__.split(".")[:3]) < (3, 1, 6):
            raise DataError(f"{self.source}: jinja2 {jinja2.__version__} has known escapes from its sandbox, and "
                            "templates are code of others; run: pip install 'jinja2>=3.1.6'")
        if self.text in BUILT_IN.values():
            text: str = self._built_in.render(**variables(messages, add_generation_prompt, self.pieces))
        else:
            text = self._by_process(messages, add_generation_prompt)
        return _without_marks(text) if self.marked else Rendered(text, None)

    def _by_process(self, messages: Sequence[Message], prompt: bool) -> str:
        found = template_process().ask({
            "template": self.text, "now": self.now.isoformat() if self.now else "", "pieces": dict(self.pieces),
            "messages": [dict(m) for m in messages], "prompt": prompt}, self.source)
        if "unreadable" in found:
            raise DataError(f"{self.source}: not a readable chat template ({found['unreadable']})")
        if "refused" in found:
            raise TemplateRefusal(f"{self.source} does not render it: {shortened(found['refused'], 200)}")
        return str(found["text"])

    @cached_property
    def _built_in(self) -> Any:
        return compiled(self.text, "")


def _without_marks(text: str) -> Rendered:
    """Take the marks out, and note where they stood."""
    parts = re.split(f"([{BEGIN}{END}])", text)
    out: list[str] = []
    answers: list[tuple[int, int]] = []
    at, begun = 0, -1
    for part in parts:
        if part == BEGIN:
            if begun >= 0:
                raise TemplateRefusal("the template has one {% generation %} block within another")
            begun = at
        elif part == END:
            answers.append((begun, at))
            begun = -1
        else:
            out.append(part)
            at += len(part)
    return Rendered("".join(out), tuple(answers))


def find_template(asked: str, folder: Path | None, pieces: Mapping[str, str], *,
                  now: datetime | None = None) -> ChatTemplate:
    """Return the chat template to use.

    Args:
        asked: a name of :data:`BUILT_IN`, or a file; empty: the tokenizer's own, of ``folder``.
        folder: the tokenizer's; None: it is none that has a folder.
        pieces: the tokenizer's special pieces (see :func:`special_pieces`).

    Raises:
        DataError: there is none, or it cannot be read.
    """
    if asked in BUILT_IN:
        return ChatTemplate(BUILT_IN[asked], pieces, f"the built-in template {asked}", now)
    if asked:
        return ChatTemplate(_read(Path(asked)), pieces, asked, now)
    if folder is not None:
        file = folder / "chat_template.jinja"
        if file.is_file():
            _check_link(file)
            return ChatTemplate(_read(file), pieces, str(file), now)
        text = template_in(settings_of(folder))
        if text:
            return ChatTemplate(text, pieces, f"the chat_template of {folder / 'tokenizer_config.json'}", now)
    where = f"{folder}: no chat_template.jinja, and no chat_template in tokenizer_config.json" if folder else (
        "this tokenizer has no chat template of its own")
    raise DataError(f"{where}; give one with --chat-template FILE, or a built-in one: --chat-template "
                    f"{' or '.join(BUILT_IN)}")


def template_in(settings: Mapping[str, Any]) -> str:
    """Return the template in a tokenizer_config.json; of several the one named ``default``. Empty: none."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def special_pieces(folder: Path | None, end: str) -> dict[str, str]:
    """Return the special pieces that a tokenizer's folder names; ``end``: the end of text where it names none."""
    found: dict[str, str] = {}
    for name, value in settings_of(folder).items() if folder is not None else ():
        piece = value.get("content") if isinstance(value, dict) else value
        if name in SPECIAL_NAMES and isinstance(piece, str):
            found[name] = piece
    return {**({"eos_token": end} if end else {}), **found}


def settings_of(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; empty where there is none that can be read. Raises DataError: it is a link out of
    the folder."""
    _check_link(folder / "tokenizer_config.json")
    try:
        body = json.loads(_read(folder / "tokenizer_config.json", 16 << 20))
    except (DataError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _check_link(path: Path) -> None:
    target = outside_target(path)
    if target is not None:
        raise DataError(f"{path} is a link to {target}, outside of its folder, and would be copied with the model; put "
                        "a copy in its place if it belongs there")


def _read(path: Path, most: int = LARGEST_TEMPLATE) -> str:
    try:
        if path.stat().st_size > most:
            raise DataError(f"{path}: {path.stat().st_size} bytes; a chat template has at most {most}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"chat template {path}: cannot be read ({error})") from error


# Links out of a folder that came from elsewhere: what they point to was never part of it.

def outside_target(path: Path) -> Path | None:
    """Return where a file of a folder really is, if that is outside the folder; None: within it.

    The hub's cache keeps the files of a model in ``models--OWNER--NAME/blobs``. Its snapshots link there, and so do
    folders that older versions of huggingface_hub downloaded to (``local_dir``).
    """
    folder, target = path.parent.resolve(), path.resolve()
    of_hub = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    return None if of_hub or target.is_relative_to(folder) else target
