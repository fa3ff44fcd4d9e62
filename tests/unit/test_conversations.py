"""Records of conversations and preferences: every text of a record is in what is read, or its key is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_port.cli.main import main
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.ext.corpora.conversations import ChatFields, ConversationRefusal, messages_of, preference_of

Q, A = ONE = [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "a."}]
GPT = [{"from": "human", "value": "q?"}, {"from": "gpt", "value": "a."}]
WITH_INPUT = [{"role": "user", "content": "q?\nmore"}, A]
HISTORY = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]
SYSTEM = {"role": "system", "content": "be brief"}
ALPACA = {"instruction": "q?", "input": "more", "output": "a."}
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "messages": ({"messages": ONE, "id": 3, "tools": None}, ONE),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q?"}]}, A]}, ONE),
    "parts of a table": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q?", "url": None}]}, A]},
                         ONE),
    "nulls": ({"messages": [{**m, "tool_calls": None, "name": None} for m in ONE]}, ONE),
    "numbered messages": ({"messages": [{**m, "id": str(i)} for i, m in enumerate(ONE)]}, ONE),
    "sharegpt": ({"conversations": GPT, "id": "x_1"}, ONE),
    "sharegpt, system": ({"conversations": GPT, "system": "be brief", "tools": ""}, [SYSTEM, *ONE]),
    "system prompt beside messages": ({"messages": ONE, "system_prompt": "be brief"}, [SYSTEM, *ONE]),
    "system said twice": ({"messages": [SYSTEM, *ONE], "system": "be brief"}, [SYSTEM, *ONE]),
    "both lists": ({"messages": ONE, "conversations": GPT}, ONE),
    "ultrachat": ({"prompt": "q?", "prompt_id": "5a", "messages": ONE}, ONE),
    "prompt and completion": ({"prompt": "q?", "completion": "a."}, ONE),
    "pair of messages": ({"prompt": [SYSTEM, Q], "completion": [A]}, [SYSTEM, *ONE]),
    "prompt and response": ({"prompt": "q?", "response": "a.", "system": "be brief"}, [SYSTEM, *ONE]),
    "alpaca": (ALPACA, WITH_INPUT),
    "alpaca without input": ({**ALPACA, "input": ""}, ONE),
    "alpaca, rendered too": ({**ALPACA, "text": "Below is …\n\n### q?\n\nmore\n\n### Response:\na."}, WITH_INPUT),
    "alpaca, history": ({**ALPACA, "input": "", "system": "be brief", "history": [["q0", "a0"]]},
                        [SYSTEM, *HISTORY, *ONE]),
    "dolly": ({"instruction": "q?", "context": "more", "response": "a.", "category": "open_qa"}, WITH_INPUT),
    "orca": ({"id": "niv.1", "system_prompt": "be brief", "question": "q?", "response": "a."}, [SYSTEM, *ONE]),
    "questions": ({"question": "q?", "answer": "a."}, ONE),
    "swift": ({"system": "be brief", "history": [["q0", "a0"]], "query": "q?", "response": "a."},
              [SYSTEM, *HISTORY, *ONE]),
    "history of messages": ({"history": HISTORY, "query": "q?", "response": "a."}, [*HISTORY, *ONE]),
    "input and output": ({"input": "q?", "output": "a."}, ONE),
}
OWN: dict[str, tuple[dict[str, Any], ChatFields, list[dict[str, str]]]] = {
    "own list": ({"dialogue": ONE}, ChatFields("dialogue"), ONE),
    "own fields": ({"topic": "q?", "essay": "a.", "messages": []}, ChatFields("", ("topic", "essay")), ONE),
    "own fields of alpaca": (ALPACA, ChatFields("", ("instruction", "output")), WITH_INPUT),
    "left out": ({"messages": [{**Q, "weight": 1}, A], "tools": [{}]}, ChatFields(ignored=("weight", "tools")), ONE),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "preferences": ({"prompt": "q?", "chosen": ONE, "rejected": ONE}, "preference record .prompt, chosen, rejected"),
    "tools": ({"messages": ONE, "tools": [{}]}, r"tool calls \(messages, tools\)"),
    "sharegpt, tools": ({"conversations": GPT, "tools": "[{}]"}, "tool calls"),
    "calls": ({"messages": [Q, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
              r"messages\[1\] has tool calls"),
    "a tool's turn": ({"messages": [*ONE, {"role": "tool", "content": "x"}]}, r"messages\[2\] is by 'tool'"),
    "images": ({"messages": ONE, "images": ["a.png"]}, "images .messages, images"),
    "image part": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
                   r"messages\[0\] has content of type 'image_url'"),
    "cached part": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q?", "cache": {"a": 1}}]}, A]},
                    "part with the keys type, text, cache"),
    "weight": ({"messages": [{**Q, "weight": 0}, A]}, "keys role, content, weight"),
    "a name": ({"messages": [{**Q, "name": "Bob"}, A]}, "keys role, content, name"),
    "reasoning": ({"messages": [Q, {**A, "reasoning_content": "hm"}]}, "keys role, content, reasoning_content"),
    "text": ({"text": "q?", "url": "u"}, "found the keys text, url.*--json-key.*--chat-fields"),
    "no answer": ({"messages": [Q]}, "no assistant's turn"),
    "array": ([{"messages": ONE}], r"an array; write one object per line"),
    "null content": ({"messages": [{"role": "user", "content": None}, A]}, "keys role; expected"),
    "other prompt": ({"prompt": "other", "messages": ONE}, "has 'prompt', which is not read.*--chat-ignore prompt"),
    "more keys": ({"prompt": "other", "messages": ONE, "my key": 1}, "has 'prompt', 'my key', which are not read.*"
                  "--chat-ignore prompt 'my key' leaves them out"),
    "other list": ({"messages": ONE, "conversations": [*GPT, *GPT]}, "has 'conversations'"),
    "two systems": ({"messages": [SYSTEM, *ONE], "system": "be long"}, "several system prompts"),
    "a label": ({"prompt": "q?", "completion": "a.", "label": False}, "has 'label'"),
    "two answers": ({"instruction": "q?", "output": "a.", "response": "b."}, "has 'response'"),
    "context of messages": ({"prompt": [SYSTEM, Q], "completion": "a.", "context": "c"}, "'context' stands beside"),
    "history of texts": ({"query": "q?", "response": "a.", "history": ["q0"]}, r"history\[0\] is no pair"),
}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad one"}
PREFERENCES: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "ultrafeedback": ({"prompt": "q?", "prompt_id": "1", "messages": [Q, GOOD], "chosen": [Q, GOOD],
                       "rejected": [Q, BAD], "score_chosen": 8.0, "score_rejected": 2.5}, [Q]),
    "orca": ({"system": "be brief", "question": "q?", "chosen": "good", "rejected": "bad one"}, [SYSTEM, Q]),
    "alpaca": ({"instruction": "q?", "input": "more", "chosen": "good", "rejected": "bad one"}, WITH_INPUT[:1]),
    "sharegpt": ({"conversations": GPT[:1], "chosen": {"from": "gpt", "value": "good"},
                  "rejected": {"from": "gpt", "value": "bad one"}}, [Q]),
}


def texts_in(value: Any, key: str = "") -> Iterator[str]:
    """Every text of a record but roles, kinds of parts, and keys that say where it is from."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from texts_in(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner, key)
    elif isinstance(value, str) and key not in ("role", "from", "type", "id", "prompt_id", "category", "text"):
        yield value


@pytest.mark.parametrize("form", FORMS)
def test_a_record_is_read_whole(form: str) -> None:
    """All its texts are in the messages, another key is refused by its name, and left out where the user names it."""
    record, wanted = FORMS[form]
    assert messages_of(record, ChatFields()) == wanted
    said = "\n".join(m["content"] for m in wanted)
    assert all(text in said for text in texts_in(record))
    for name, value in (("zzz", "other"), ("note", ["x"]), ("weight", 0.5), ("turns", 2), ("tools", [{"name": "f"}])):
        with pytest.raises(ConversationRefusal, match=f"{name}|tool calls"):
            messages_of({**record, name: value}, ChatFields())
        assert messages_of({**record, name: value}, ChatFields(ignored=(name,))) == wanted
    if wanted[0]["role"] != "system" and "history" not in record:
        assert messages_of({**record, "system_prompt": "be brief"}, ChatFields()) == [SYSTEM, *wanted]


@pytest.mark.parametrize("form", OWN)
def test_fields_that_the_user_names(form: str) -> None:
    record, fields, wanted = OWN[form]
    assert messages_of(record, fields) == wanted
    with pytest.raises(ConversationRefusal, match="has 'zzz'"):
        messages_of({**record, "zzz": 1}, fields)


@pytest.mark.parametrize("form", REFUSED)
def test_forms_that_are_refused_by_their_keys(form: str) -> None:
    record, message = REFUSED[form]
    with pytest.raises(ConversationRefusal, match=message):
        messages_of(record, ChatFields())


@pytest.mark.parametrize("form", PREFERENCES)
def test_preferences_are_read_whole(form: str) -> None:
    record, prompt = PREFERENCES[form]
    found = preference_of(record)
    assert found.chosen == [*prompt, GOOD] and found.rejected == [*prompt, BAD] and found.shared == len(prompt)
    for name, value in (("zzz", "other"), ("margin", 2.0), ("context" if "input" in record else "label", "x")):
        if name == "context":
            assert preference_of({**record, name: value}).chosen[0]["content"] == "q?\nmore\nx"
            continue
        with pytest.raises(ConversationRefusal, match=f"has '{name}'"):
            preference_of({**record, name: value})


def test_every_text_is_in_the_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command, from JSON lines and from Parquet, whose rows have every column."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    record = {**ALPACA, "system": "be brief", "category": "x"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    parquet.write_table(pyarrow.Table.from_pylist([record, {**record, "input": None}]), tmp_path / "a.parquet")
    prepare = ["data", "prepare", str(tmp_path / "c"), "--chat", "--chat-template", "plain", "--workers", "1"]
    for name in ("a.jsonl", "a.parquet"):
        assert main([*prepare, "--input", str(tmp_path / name)]) == 0
        text = bytes(i for i in IndexedDataset(tmp_path / "c").document(0).tolist() if i < 256).decode()
        assert text == "System:\nbe brief\nUser:\nq?\nmore\nAssistant:\na."
    parquet.write_table(pyarrow.Table.from_pylist([{**record, "hint": "h"}]), tmp_path / "b.parquet")
    assert main([*prepare, "--input", str(tmp_path / "b.parquet")]) == 4
    assert "has 'hint', which is not read" in capsys.readouterr().err
    assert main([*prepare, "--input", str(tmp_path / "b.parquet"), "--chat-ignore", "hint"]) == 0
    assert main([*prepare[:3], "--input", str(tmp_path / "a.jsonl"), "--chat-ignore", "x"]) == 2
