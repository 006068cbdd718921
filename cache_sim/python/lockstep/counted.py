"""Numbers with their nouns, for sentences."""
from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 token`, `2 tokens`; a noun with an irregular plural gives it, as in ("entry", "entries")."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
