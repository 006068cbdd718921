"""Tokens as numbers, and as the terms of the trace grammar (cache_sim/trace/grammar.md).

`a1000+b8:10+[7,9]` is the first 1,000 tokens of document a, tokens 8 and 9 of document b, and the ids 7 and 9. A
token of a document is (document << 32) | index, so it is 2^32 or more and fits into 63 bits; an explicit id is below.
"""
from __future__ import annotations

import functools
import hashlib
import re
from typing import Iterable, Tuple

Tokens = Tuple[int, ...]

_SLICE = re.compile(r"([a-z]+)(?:(\d+):)?(\d+)")
_SHORT = sum(26**letters for letters in range(1, 7))  # the last name of six letters
_OUTPUTS = range(1 << 30, 1 << 31)  # documents that Lockstep numbers itself: outputs of scheduled requests
_long_names: dict[int, str] = {}


@functools.lru_cache(maxsize=4096)
def _document(name: str) -> int:
    """Bijective base 26: a is 1, z is 26, aa is 27. A longer name has a number of its own below lockstep's documents,
    the same in every process: the same trace gives the same tokens whatever was played before."""
    number = 0
    for letter in name:
        number = number * 26 + ord(letter) - 96
    if number <= _SHORT or number in _OUTPUTS:
        return number
    mixed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    document = _SHORT + 1 + mixed % (_OUTPUTS.start - _SHORT - 1)
    if _long_names.setdefault(document, name) != name:
        raise ValueError(f"documents {_long_names[document]} and {name} have the same number; rename one")
    return document


def _name(document: int) -> str:
    if document in _long_names:
        return _long_names[document]
    letters = ""
    while document:
        document, letter = divmod(document - 1, 26)
        letters = chr(97 + letter) + letters
    return letters


@functools.lru_cache(maxsize=4096)
def _term(term: str) -> Tokens:
    if term.startswith("["):
        return tuple(int(token) for token in term[1:-1].split(",") if token)
    match = _SLICE.fullmatch(term)
    if match is None:
        raise ValueError(f"`{term}` is not a term of tokens such as a1000, a8:16 or [7,9]")
    name, first, last = match.groups()
    base = _document(name) << 32
    return tuple(range(base + int(first or 0), base + int(last)))


def parse_tokens(text: str) -> Tokens:
    """The tokens that `text` spells: `a3+[7]` gives three tokens of document a and the id 7."""
    if "+" not in text:
        return _term(text)
    parts: list[int] = []
    for term in text.split("+"):
        parts.extend(_term(term))
    return tuple(parts)


def tokens_text(tokens: Iterable[int]) -> str:
    """The shortest text of these tokens: `[]` where there are none."""
    terms: list[str] = []
    run: list[int] = []

    def end_run() -> None:
        if not run:
            return
        document, first = run[0] >> 32, run[0] & 0xFFFFFFFF
        if document == 0:
            terms.append("[" + ",".join(map(str, run)) + "]")
        else:
            terms.append(f"{_name(document)}{f'{first}:' if first else ''}{first + len(run)}")
        run.clear()

    for token in tokens:
        if run and not (token >> 32 == run[-1] >> 32 == 0 or (token >> 32 and token == run[-1] + 1)):
            end_run()
        run.append(token)
    end_run()
    return "+".join(terms) or "[]"
