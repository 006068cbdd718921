"""Numbers with their nouns, for sentences and for options of the program."""
from __future__ import annotations

import math


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 token`, `2 tokens`; a noun with an irregular plural gives it, as in ("entry", "entries")."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def milliseconds(seconds: float) -> str:
    """A time as options of the program take it; none is so short that it becomes 0, which they refuse."""
    return f"{round(seconds * 1000) or math.ceil(seconds)}ms"
