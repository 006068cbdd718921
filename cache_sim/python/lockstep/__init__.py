"""Lockstep from Python: plug in a cache or a server, search it for bugs, replay what was found.

    import lockstep

    class MyCache(lockstep.Subject):
        def admit(self, id, tokens): ...
        def extend(self, id, n, tokens): ...
        def finish(self, id, insert): ...

    lockstep.explore(MyCache, beside="oracle:radix", seconds=30)  # raises FindingError with a shrunk trace
    lockstep.replay("bug.trace", MyCache)

`python -m lockstep.serve FILE.py:MyCache` is the same class as a child process for `--subject 'exec:…'` of the
program `lockstep`; `lockstep nightly SETTINGS` searches every night. The protocol is described in
cache_sim/check/protocol.md.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

# Loaded when asked for: `python -m lockstep.serve` is started often and needs few of them.
_HOMES = {
    "lockstep.subject": (
        "Admitted", "Config", "Counted", "Evicted", "Extended", "Inserted", "Matched", "Refused", "Reply", "Slot",
        "Stored", "Subject", "Unsupported", "Violation", "Wrong"),
    "lockstep.tokens": ("Tokens", "parse_tokens", "tokens_text"),
    "lockstep.play": ("Finding", "FindingError", "LockstepError", "Replayed", "Search", "explore", "replay"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)

if TYPE_CHECKING:
    from lockstep.play import Finding, FindingError, LockstepError, Replayed, Search, explore, replay
    from lockstep.subject import (Admitted, Config, Counted, Evicted, Extended, Inserted, Matched, Refused, Reply, Slot,
                                  Stored, Subject, Unsupported, Violation, Wrong)
    from lockstep.tokens import Tokens, parse_tokens, tokens_text


def __getattr__(name: str) -> object:
    import importlib
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
