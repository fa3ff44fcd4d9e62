"""Writes ``chat.jsonl``: 500 short conversations on sums, spelling, capitals, opposites and the order of things.

    python examples/chat/make_chat.py > examples/chat/chat.jsonl

The same lines each time. The text is of this project and under its licence; use it as you like.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

LINES = 500
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
    "Kenya": "Nairobi", "Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana", "Poland": "Warsaw", "Chile": "Santiago",
}
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "open": "shut", "wet": "dry", "fast": "slow", "old": "new",
    "high": "low", "full": "empty", "dark": "light", "hard": "soft", "left": "right",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = ("cat", "ship", "bread", "stone", "river", "lamp", "apple", "cloud", "horse", "green", "paper", "music")


def questions() -> list[tuple[str, str]]:
    """All questions with their answers."""
    found = [(f"What is {a} + {b}?", f"{a + b}") for a in range(1, 10) for b in range(1, 10)]
    found += [(f"What is {a + b} - {a}?", f"{b}") for a in range(1, 7) for b in range(1, 7)]
    found += [(f"What is the capital of {land}?", f"{city}.") for land, city in CAPITALS.items()]
    found += [(f"In which country is {city}?", f"{land}.") for land, city in CAPITALS.items()]
    found += [(f"What is the opposite of {a}?", f"{b}") for a, b in OPPOSITES.items()]
    found += [(f"Which day comes after {day}?", f"{DAYS[(i + 1) % 7]}.") for i, day in enumerate(DAYS)]
    found += [(f"Spell {word}.", "-".join(word)) for word in WORDS]
    found += [(f"Write {word} in capitals.", word.upper()) for word in WORDS]
    return found


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield the conversations: each question once, then drawn ones, some with two turns or a system's line."""
    r = random.Random(500)
    every = questions()
    for i in range(LINES):
        turns = [every[i]] if i < len(every) else [r.choice(every) for _ in range(r.choice((1, 1, 2)))]
        messages = [{"role": "system", "content": "Answer briefly."}] if r.random() < 0.1 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield messages


if __name__ == "__main__":
    for messages in conversations():
        print(json.dumps({"messages": messages}))
