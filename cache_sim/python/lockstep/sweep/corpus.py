"""The corpus that a search begins with, and how the corpora of many searches become one: for each set of code marks the
smallest trace that reaches it, and of these, from the smallest on, the ones that reach a pair of marks together that no
smaller one does. That is what `explore` asks of a trace too (cache_sim/search/explore.hpp), and no order of the searches
changes the result."""
from __future__ import annotations

import itertools
from typing import Iterable

_REACHES = "# Reaches "


def marks_of(trace: str) -> tuple[str, ...]:
    """The marks that a trace of `explore --corpus` says to reach."""
    line = next((line for line in trace.splitlines() if line.startswith(_REACHES)), "")
    return tuple(line[len(_REACHES):].rstrip(".").split(", ")) if line else ()


def size_of(trace: str) -> tuple[int, str]:
    return len(trace), trace


def keep_smallest(kept: dict[tuple[str, ...], str], traces: Iterable[str]) -> None:
    """Takes traces into the smallest ones by their sets of marks."""
    for trace in traces:
        marks = marks_of(trace)
        if marks and (marks not in kept or size_of(trace) < size_of(kept[marks])):
            kept[marks] = trace


def smallest_cover(traces: Iterable[str]) -> list[str]:
    kept: dict[tuple[str, ...], str] = {}
    keep_smallest(kept, traces)
    seen: set[tuple[str, str]] = set()
    cover = []
    for trace in sorted(kept.values(), key=size_of):
        marks = marks_of(trace)
        pairs = set(itertools.combinations_with_replacement(marks, 2))
        if not pairs <= seen:
            cover.append(trace)
            seen |= pairs
    return cover
