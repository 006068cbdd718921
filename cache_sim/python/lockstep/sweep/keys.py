"""The keys of findings: two findings with one key are one defect, as far as that is visible from outside."""
from __future__ import annotations

import re
from typing import Any

from lockstep.calls import signature
from lockstep.sweep.publish import digest_of

NAMES = ("id", "ids", "as", "slot", "from", "to", "lock", "session", "salt", "lora")  # fields whose values are free names
TOKENS = ("tokens", "drafts", "output", "prefix", "keep")
_DOCUMENT = re.compile(r"[a-z]+(?=\d)")


def verb_of(finding: dict[str, Any]) -> str:
    """The verb of the operation that went wrong."""
    return str(finding.get("operation", "")).partition(" ")[0]


def field_of(finding: dict[str, Any]) -> str:
    """The field of the answer that went wrong, as `cached`; empty where the whole answer is."""
    field, equals, _ = str(finding.get("expected", "")).partition("=")
    return field if equals and field.isidentifier() else ""


def early_key(finding: dict[str, Any], version: str) -> str:
    """The key before shrinking: subject and version, kind, verb and field, and the sentence without numbers and tokens, or
    the features that a server's finding needs."""
    about = finding.get("features") or signature(finding["kind"], finding["text"])
    return digest_of([finding["subject"], version, finding["kind"], verb_of(finding), field_of(finding), about])


def final_key(shrunk: dict[str, Any], version: str) -> str:
    """The key after shrinking: subject and version, kind, first wrong verb and field, and the trace with names normalised."""
    return digest_of([shrunk["subject"], version, shrunk["kind"], shrunk["verb"], shrunk["field"], normalised(shrunk["trace"])])


def normalised(trace: str) -> str:
    """The trace without comments, with requests, slots, locks, salts, sessions and documents named in order of appearance."""
    names: dict[str, str] = {}
    documents: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        return documents.setdefault(match[0], f"d{len(documents)}_")

    lines = []
    for line in trace.splitlines():
        if not line or line.startswith("#"):
            continue
        words = line.split()
        for at, word in enumerate(words):
            key, equals, value = word.partition("=")
            if words[0] == "config" or not equals:
                continue
            if key in NAMES:
                value = ",".join(names.setdefault(one, f"n{len(names)}") for one in value.split(","))
            elif key in TOKENS:
                value = _DOCUMENT.sub(renamed, value)
            words[at] = f"{key}={value}"
        lines.append(" ".join(words))
    return "\n".join(lines)
