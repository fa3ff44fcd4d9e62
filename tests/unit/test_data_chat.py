"""Conversations to tokens: ids and masks are transformers' own, all forms are read, and what is not is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_port.cli.main import main
from megatron_port.core.config.checks import problems
from megatron_port.core.config.loader import load
from megatron_port.core.data.indexed import IndexedDataset, chat_path, mask_path
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora import chat_template as template_process
from megatron_port.ext.corpora import chat_tokens, sources
from megatron_port.ext.corpora import prepare as preparing
from megatron_port.ext.corpora.chat_template import BUILT_IN, ChatTemplate, find_template
from megatron_port.ext.corpora.chat_tokens import ChatRecipe, chat_recipe
from megatron_port.ext.corpora.conversations import ConversationRefusal
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.source_files import ReadOptions
from megatron_port.ext.corpora.tokenizer import get_tokenizer
from megatron_port.ext.corpora.train_tokenizer import train_bpe
from megatron_port.ext.corpora.verify import check_tokenizers, verify

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|head|>")
HEADS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "GEN{{ m['content'] | trim + '<|im_end|>' }}END{% else %}{{ m['content'] | trim + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant\n' }}{% endif %}"
)
BRACKETS = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}GEN{{ ' ' + m.content | trim + eos_token }}END
    {%- else %}{{ '<<' + m.content | trim | tojson + '>>' }}
    {%- endif %}
{%- endfor %}"""
THINKS = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}
        {%- if loop.index0 > ns.last %}GEN{{ '[no thoughts]\n\n' + m.content | trim }}{{ '<|im_end|>\n' }}END
        {%- else %}GEN{{ m.content | trim }}{{ '<|im_end|>\n' }}END
        {%- endif %}
    {%- else %}{{ m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = {name: text.replace("GEN", "{% generation %}").replace("END", "{% endgeneration %}")
          for name, text in {"heads": HEADS, "brackets": BRACKETS, "thinks": THINKS}.items()} | BUILT_IN
UNMARKED = {name: text.replace("GEN", "").replace("END", "")
            for name, text in {"heads": HEADS, "brackets": BRACKETS, "thinks": THINKS}.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of transformers' form: byte-level BPE, whose post-processor trims spans, with special pieces.

    ``whole/`` has the same without trimming: transformers' own masks are empty where an answer begins with a space that
    no span has.
    """
    tokenizers = pytest.importorskip("tokenizers")
    path: Path = tmp_path_factory.mktemp("chat")
    (path / "in.txt").write_text("Paris is the capital of France, system user assistant\n\n  and more. " * 60)
    train_bpe([path / "in.txt"], path / "tokenizer.json", vocab_size=330)
    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    made.add_special_tokens(list(SPECIAL))
    (path / "whole").mkdir()
    for trim, name in ((False, "whole/tokenizer.json"), (True, "tokenizer.json")):
        made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim)
        made.save(str(path / name))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>",
                "clean_up_tokenization_spaces": False, "chat_template": MARKED["heads"]}
    for each in (path, path / "whole"):
        (each / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def conversation(r: random.Random) -> list[dict[str, str]]:
    words = ["Paris", " is", "  the", "capital", "é", "日本", "🎭", "\n", "\n\n", " ", "France", ",", "<b>", "7 ", "\t"]

    def text() -> str:
        return "x" + "".join(r.choice(words) for _ in range(r.randrange(12))) + r.choice(["", "."])

    turns = [{"role": role, "content": text()} for _ in range(r.randrange(1, 4)) for role in ("user", "assistant")]
    return [{"role": "system", "content": text()}, *turns] if r.random() < 0.4 else turns


def recipe_of(folder: Path, template: str, tokenizer: Any = None) -> ChatRecipe:
    tokenizer = tokenizer or get_tokenizer(f"hf:{folder}")
    return ChatRecipe(ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}), tokenizer)


@pytest.mark.parametrize("name", MARKED)
def test_ids_and_masks_are_transformers(folder: Path, name: str) -> None:
    """Ids of the whole conversation, and the tokens of the assistant; without marks, the same are found by prefixes,
    and what precedes the last answer is the prompt that transformers would give."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder / "whole"), local_files_only=True)
    recipe, plain = recipe_of(folder, MARKED[name]), recipe_of(folder, UNMARKED.get(name, MARKED[name]))
    r = random.Random(3)
    for _ in range(40):
        messages = conversation(r)
        wanted = theirs.apply_chat_template(messages, chat_template=MARKED[name], tokenize=True, return_dict=True,
                                            return_assistant_tokens_mask=True)
        for mine in (recipe, plain):
            ids, counted = mine.encode({"messages": messages}, append_eod=False)
            assert ids.tolist() == wanted["input_ids"], messages
            assert counted.astype(int).tolist() == wanted["assistant_masks"], messages
        prompt = theirs.apply_chat_template(messages[:-1], chat_template=MARKED[name], tokenize=True,
                                            add_generation_prompt=True, return_dict=True)["input_ids"]
        last = np.flatnonzero(np.diff(counted.astype(int), prepend=0) == 1)[-1]
        assert ids[:last].tolist() == prompt


def test_a_template_may_use_what_transformers_offers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    text = ("{% for m in messages %}\n    {% if loop.index0 > 5 %}{% break %}{% endif %}\n{{ m | tojson(indent=1) }}"
            "{% if tools is none and documents is none %}!{% endif %}{{ dict(a=m.role)['a'] }}\n{% endfor %}\n")
    messages = [{"role": "user", "content": "<é & 'q'>"}]
    assert ChatTemplate(text).render(messages).text == theirs.apply_chat_template(
        messages, chat_template=text, tokenize=False)
    for bad in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('one turn only') }}"):
        with pytest.raises(ConversationRefusal, match="does not render it"):
            recipe_of(folder, bad).encode({"messages": conversation(random.Random(0))}, append_eod=True)
    with pytest.raises(DataError, match="not a readable chat template"):
        chat_recipe(get_tokenizer(f"hf:{folder}"), str(_written(folder, "{% for %}")))


def _written(folder: Path, text: str) -> Path:
    (folder / "own.jinja").write_text(text)
    return folder / "own.jinja"


def _sentencepiece(folder: Path) -> str:
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "sp.txt").write_text("Paris is the capital of France, and the other one\n" * 80)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "sp.txt"), model_prefix=str(folder / "sp"), vocab_size=330, byte_fallback=True,
        minloglevel=2, model_type="bpe", hard_vocab_limit=False, remove_extra_whitespaces=False,
        normalization_rule_name="identity")
    return f"sentencepiece:{folder / 'sp.model'}"


@pytest.mark.parametrize("kind", ["byte", "gpt2", "sentencepiece"])
def test_every_kind_of_tokenizer_counts_the_answers(tmp_path: Path, kind: str) -> None:
    """What counts is the answer and its end, decoded with another function than the one that finds spans."""
    try:
        tokenizer = get_tokenizer(_sentencepiece(tmp_path) if kind == "sentencepiece" else kind)
    except DataError as error:
        pytest.skip(str(error))
    recipe, r = chat_recipe(tokenizer, "plain"), random.Random(5)
    assert recipe.stop_ids() == [tokenizer.eod_id]
    for _ in range(20):
        messages = conversation(r)
        ids, counted = recipe.encode({"messages": messages}, append_eod=True)
        edges = np.flatnonzero(np.diff(counted.astype(int), prepend=0, append=0)).reshape(-1, 2)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        found = [tokenizer.decode(ids[a:b].tolist()) for a, b in edges]
        assert [f.strip() for f in found] == [a.strip() for a in answers] and len(found) == len(answers)
        assert all(ids[b - 1] == tokenizer.eod_id for _, b in edges) and ids[-1] == tokenizer.eod_id != ids[-2]


def test_the_end_of_a_document(folder: Path) -> None:
    """It is appended once, and counts where the answer is the end of the text."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer: Any = get_tokenizer(f"hf:{folder}")
    end = tokenizer.eod_id
    for text, appended, counts in ((MARKED["brackets"], 0, True), (MARKED["chatml"], 1, False),
                                   (UNMARKED["thinks"], 1, True)):
        recipe = recipe_of(folder, text)
        without, _ = recipe.encode({"messages": messages}, append_eod=False)
        ids, counted = recipe.encode({"messages": messages}, append_eod=True)
        assert ids.tolist() == [*without.tolist(), *[end] * appended] and bool(counted[-1]) is counts
    assert recipe_of(folder, MARKED["chatml"]).stop_ids() == [tokenizer.special["<|im_end|>"]]


def test_what_cannot_be_told_apart_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(template: str, *contents: str) -> None:
        roles = ("user", "assistant", "user", "assistant")
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents)]
        recipe_of(folder, template).encode({"messages": messages}, append_eod=True)

    loose = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConversationRefusal, match=r"'the' \(characters 0 to 3 .* both sides .* at 2"):
        encode(loose, "th", "e")
    talk = [{"role": "user", "content": "th"}, {"role": "assistant", "content": "e"}]
    with monkeypatch.context() as patch, pytest.raises(DataError, match="cannot be used with this tokenizer"):
        patch.setattr(chat_tokens, "PROBE", talk)  # before anything is read
        recipe_of(folder, loose).stop_ids()
    with pytest.raises(ConversationRefusal, match=r"message 1 has the special piece '</s>'"):
        encode(MARKED["heads"], "a", "b</s>[INST]")
    with pytest.raises(ConversationRefusal, match="message 1 otherwise once others follow"):
        encode("{% for m in messages %}{{ (m.content | upper) if loop.last and m.role == 'assistant' else m.content }}"
               "{% endfor %}", "a", "b", "c", "d")
    with pytest.raises(ConversationRefusal, match="changes what precedes message 1"):
        encode("{{ messages | length }}" + loose, "a", "b", "c", "d")
    with pytest.raises(ConversationRefusal, match="one {% generation %} block within another"):
        encode("{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}", "a", "b")
    with pytest.raises(ConversationRefusal, match="no token of an answer is left"):
        encode("{% for m in messages %}{% generation %}{% endgeneration %}a{% endfor %}", "a", "b")


ONE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def write_rows(path: Path, count: int = 120) -> list[dict[str, Any]]:
    r = random.Random(2)
    rows = [{"messages": conversation(r), "id": i} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_a_corpus_of_conversations(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """The same bytes from JSON lines and Parquet, with workers and after an interruption; the mask lies beside the
    tokens, and a reader gets both."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(sources, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(preparing, "SAVE_BYTES", 5000)
    rows = write_rows(tmp_path / "a.jsonl")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    tokenizer = get_tokenizer(f"hf:{folder}")
    chat = chat_recipe(tokenizer)
    done = prepare([tmp_path / "a.jsonl"], tmp_path / "c", tokenizer=tokenizer, chat=chat)
    prepare([tmp_path / "a.parquet"], tmp_path / "p", tokenizer=tokenizer, chat=chat, workers=2)
    calls: list[Any] = []

    def stop(at: Any) -> None:
        calls.append(at)
        if len(calls) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "a.jsonl"], tmp_path / "i", tokenizer=tokenizer, chat=chat, progress=stop)
    assert prepare([tmp_path / "a.jsonl"], tmp_path / "i", tokenizer=tokenizer, chat=chat).resumed_documents > 0
    for suffix in ("bin", "idx", "mask", "chat.json"):
        for other in "pi":
            assert (tmp_path / f"{other}.{suffix}").read_bytes() == (tmp_path / f"c.{suffix}").read_bytes(), suffix
    data = IndexedDataset(tmp_path / "c")
    assert data.masked and data.meta is not None and done.counted == data.meta.counted
    for i, row in enumerate(rows):
        ids, counted = chat.encode(row, append_eod=True)
        start = data.document_start(i)
        mask = data.read_mask(start, len(ids))
        assert data.document(i).tolist() == ids.tolist() and mask is not None and mask.tolist() == counted.tolist()
    assert main(["data", "verify", str(tmp_path / "c")]) == 0 and main(["data", "inspect", str(tmp_path / "c")]) == 0
    out = capsys.readouterr().out
    assert f"mask: {done.counted} of {done.tokens} tokens count" in out and "sha256 of the chat template" in out


def test_damage_to_a_mask_is_found(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", 5)
    tokenizer = get_tokenizer("byte")
    prepare([tmp_path / "a.jsonl"], tmp_path / "c", tokenizer=tokenizer, chat=chat_recipe(tokenizer, "plain"))
    whole, path = mask_path(tmp_path / "c").read_bytes(), mask_path(tmp_path / "c")
    for damaged, byte, what in ((b"\3" + whole[1:], 0, "whether token 0 counts"),
                                (bytes([1 - whole[0]]) + whole[1:], -1, "xxh3-128"), (whole[:-1], -1, "size for")):
        path.write_bytes(damaged)
        assert any(f.file == path and f.byte == byte and what in f.what for f in verify(tmp_path / "c").faults)
    with pytest.raises(DataError, match=r"c\.mask: expected \d+ bytes, one per token, found"):
        IndexedDataset(tmp_path / "c")
    path.write_bytes(whole)
    chat_path(tmp_path / "c").write_text("{}")
    assert [f.file.name for f in verify(tmp_path / "c").faults] == ["c.chat.json"]
    with pytest.raises(DataError, match=r"c\.chat\.json: the chat template .*put the old file back"):
        check_tokenizers([IndexedDataset(tmp_path / "c")])  # at the start of training
    (tmp_path / "t.jsonl").write_text('{"text": "no conversation"}\n')
    prepare([tmp_path / "t.jsonl"], tmp_path / "c", tokenizer=tokenizer)  # in its place: nothing of the old one stays
    assert not path.exists() and not chat_path(tmp_path / "c").exists() and not verify(tmp_path / "c").faults
    assert IndexedDataset(tmp_path / "c").read_mask(0, 3) is None


def test_refusals_of_prepare(folder: Path, tmp_path: Path) -> None:
    """By file and line; ``skip`` leaves them out and counts them."""
    byte = get_tokenizer("byte")
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ({"messages": ONE}, {"messages": ONE, "tools": [1]})))
    chat = chat_recipe(byte, "plain")
    with pytest.raises(DataError, match=r"a\.jsonl:2: the record has tool calls.*--bad-input skip"):
        prepare([path], tmp_path / "c", tokenizer=byte, chat=chat)
    done = prepare([path], tmp_path / "c", tokenizer=byte, chat=chat, bad_input="skip")
    assert (done.documents, done.left_out) == (1, 1)
    (tmp_path / "b.txt").write_text("plain")
    with pytest.raises(DataError, match=r"b\.txt: conversations are read from JSON lines"):
        prepare([tmp_path / "b.txt"], tmp_path / "c", tokenizer=byte, chat=chat)
    with pytest.raises(DataError, match=r"no chat template of its own; give one with --chat-template FILE"):
        chat_recipe(byte)
    with pytest.raises(DataError, match=r"tokenizer byte has no special piece <\|im_start\|>.*--chat-template plain"):
        chat_recipe(byte, "chatml")
    assert find_template("", folder, {}).text == MARKED["heads"]  # a file beside tokenizer_config.json precedes it
    named = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert find_template("", tmp_path, {}).text == "d"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert find_template("", tmp_path, {}).text == "j"


def test_table_without_conversations_names_its_columns(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["a"], "url": ["b"]}), tmp_path / "a.parquet")
    byte = get_tokenizer("byte")
    with pytest.raises(DataError, match=r"no column of conversations .*it has body, url.*--chat-fields"):
        prepare([tmp_path / "a.parquet"], tmp_path / "c", tokenizer=byte, chat=chat_recipe(byte, "plain"),
                options=ReadOptions())


def test_the_shipped_conversations_are_those_of_their_script() -> None:
    import runpy

    folder = Path(__file__).resolve().parents[2] / "examples" / "chat"
    made = runpy.run_path(str(folder / "make_chat.py"))["conversations"]()
    lines = (folder / "chat.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"] for line in lines] == list(made) and len(lines) == 500
    byte = get_tokenizer("byte")
    chat = chat_recipe(byte, "plain")
    assert all(chat.encode(json.loads(line), append_eod=True)[1].any() for line in lines)
    config = load("runs/quickstart-chat").config
    assert not problems(config, world_size=8) and config.data.train == ("data/chat",)


REASONS = UNMARKED["thinks"].replace("{%- else %}{{ m.content | trim }}",
                                     "{%- else %}{{ m.content.split('</think>')[-1] | trim }}")


def test_reasoning_that_a_template_drops(folder: Path) -> None:
    """The earlier answer is found without it, up to its end, and the last one counts with it; a template that changes
    more than that is refused."""
    assert UNMARKED["thinks"] != REASONS
    tokenizer = get_tokenizer(f"hf:{folder}")
    contents = ("a", "<think>\nParis\n</think>\n\nthe capital", "the capital", "<think>no</think>France")
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    recipe = recipe_of(folder, REASONS, tokenizer)
    ids, counted = recipe.encode({"messages": talk}, append_eod=False)
    edges = np.flatnonzero(np.diff(counted.astype(int), prepend=0, append=0)).reshape(-1, 2)
    assert [tokenizer.decode(ids[a:b].tolist()) for a, b in edges] == [
        "the capital<|im_end|>\n", "[no thoughts]\n\n<think>no</think>France<|im_end|>\n"]
    assert ids.tolist() == tokenizer.encode_spans(recipe.template.render(talk).text).ids.tolist()  # type: ignore[attr-defined]
    shuffled = REASONS.replace("split('</think>')[-1]", "upper()")
    with pytest.raises(ConversationRefusal, match="message 1 otherwise once others follow"):
        recipe_of(folder, shuffled, tokenizer).encode({"messages": talk}, append_eod=False)


TURNS = "{% for m in messages %}{{ m.role + ': ' }}BODY{{ '\n' }}{% endfor %}"


@pytest.mark.parametrize(("body", "append_eod", "said"), [
    ("{{ m.content }}", False, "nothing that counts follows"),
    ("{{ m.content }}", True, "but that of a conversation's last"),
    ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>", True, "nothing that counts follows"),
    ("{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}", True, "nothing that counts follows"),
    ("{% generation %}{{ m.content + eos_token }}{% endgeneration %}", False, ""),
    ("{{ m.content + eos_token }}", True, ""), ("{{ m.content }} ###", False, ""),
])
def test_a_template_that_teaches_no_end(
    body: str, append_eod: bool, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = {"{% generation %}": "{% if m.role == 'assistant' %}{% generation %}",
             "{% endgeneration %}": "{% endgeneration %}{% else %}{{ m.content }}{% endif %}"}
    text = TURNS.replace("BODY", body)
    for mark, around in marks.items():
        text = text.replace(mark, around)
    (tmp_path / "t.jinja").write_text(
        text + "{% if add_generation_prompt %}assistant: {% endif %}")
    write_rows(tmp_path / "a.jsonl", 3)
    found = main(["data", "prepare", str(tmp_path / "c"), "--chat", "--input", str(tmp_path / "a.jsonl"), "--tokenizer",
                  f"hf:{folder}", "--chat-template", str(tmp_path / "t.jinja"), "--workers", "1",
                  *(() if append_eod else ("--no-eod",))])
    shown = capsys.readouterr()
    refused = said.startswith("nothing")
    assert (found == 4) is refused and said in (shown.err if refused else shown.out + shown.err)
    assert bool(said) == ("an answer" in shown.out + shown.err)


def test_a_template_that_drops_system_prompts(folder: Path) -> None:
    drops = MARKED["heads"].replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    talk = [{"role": "system", "content": "s"}, *ONE]
    with pytest.raises(ConversationRefusal, match="leaves system prompts out"):
        recipe_of(folder, drops).encode({"messages": talk}, append_eod=True)
    assert recipe_of(folder, drops).encode({"messages": ONE}, append_eod=True)[1].any()


@pytest.mark.parametrize(("body", "what"), [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}", "more than 1 s"),
    ("{{ 'a' * 1500000000 }}", "more than 1024 MiB"), ("{{ 'a' * 20000000 }}", "20000... characters"),
])
def test_a_template_has_a_limit_of_time_and_memory(
    body: str, what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the command, whatever happens to damaged records; the next template is rendered as ever."""
    monkeypatch.setattr(template_process, "SECONDS", 0.6 if " s" in what else 60.0)
    with pytest.raises(DataError, match=f"takes {what}"):
        recipe_of(folder, body + MARKED["heads"]).encode({"messages": ONE}, append_eod=True)
    assert recipe_of(folder, MARKED["heads"]).encode({"messages": ONE}, append_eod=True)[1].any()


def test_no_answer_is_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a conversation is rendered: its answer must not be that of the next one."""
    template = ChatTemplate("{{ messages[0].content }}!", {}, "t")
    told = [{"role": "user", "content": "first"}]
    assert template.render(told).text == "first!"

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(template_process.TemplateProcess, "_line", interrupted)
        template.render(told)
    assert template.render([{"role": "user", "content": "second"}]).text == "second!"
