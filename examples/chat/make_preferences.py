"""Writes ``preferences.jsonl``: 60 questions of ``make_chat.py``, each with a chosen and a rejected answer.

    python examples/chat/make_preferences.py > examples/chat/preferences.jsonl

The chosen answer is plain; the rejected one, about as long, hedges. The same lines each time. The text is of this
project and under its licence; use it as you like.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from make_chat import questions

PAIRS = 60
PLAIN = ("The answer is {}.", "It is {}, as anybody can check.", "Surely {}, and nothing else.")
HEDGES = ("It might be {}...", "Perhaps {}? I am not very sure.", "Some say {}, others do not.")


def preferences() -> Iterator[dict[str, object]]:
    """Yield the records in three forms: texts, messages beside a prompt, messages with the prompt at their head."""
    r = random.Random(60)
    for i, (question, answer) in enumerate(r.sample(questions(), PAIRS)):
        chosen, rejected = (r.choice(forms).format(answer.rstrip(".")) for forms in (PLAIN, HEDGES))
        prompt = [{"role": "user", "content": question}]
        turns = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
        if i % 3 == 0:
            yield {"prompt": question, "chosen": chosen, "rejected": rejected}
        elif i % 3 == 1:
            yield {"prompt": prompt, "chosen": turns[0], "rejected": turns[1]}
        else:
            yield {"chosen": prompt + turns[0], "rejected": prompt + turns[1]}


if __name__ == "__main__":
    for record in preferences():
        print(json.dumps(record))
