"""The base class of a cache or a server written in Python, its replies and its exceptions."""
from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, ClassVar, Mapping, Sequence

from lockstep.tokens import Tokens, tokens_text

REFUSALS = ("no_kv", "no_state_slot", "no_row", "same_step", "too_long")


# --- Exceptions -----------------------------------------------------------------------------------

class Refused(Exception):
    """The server refuses the operation. It has changed nothing, except for what it evicted before.

    reason: no_kv, no_state_slot, no_row, same_step or too_long.
    evicted_kv, evicted_states: tokens and state slots that were evicted before it refused; None: not said.
    """

    def __init__(self, reason: str, *, evicted_kv: int | None = None, evicted_states: int | None = None) -> None:
        if reason not in REFUSALS:
            raise ValueError(f"there is no refusal {reason!r}; they are {', '.join(REFUSALS)}")
        super().__init__(reason)
        self.reason = reason
        self.reply = Reply(evicted_kv=evicted_kv, evicted_states=evicted_states)


class Unsupported(Exception):
    """The server never does this form of operation, and has changed nothing. The form is sent to no subject again."""


class Violation(Exception):
    """The subject found one of its own rules broken; the text says which. Reported as `broken-invariant`."""


class Wrong(Exception):
    """An answer of the server differs from its answer with an empty cache. The text says which one, and by how much.
    Reported as `output-differs`."""


# --- Replies --------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply to an operation without results, except for what it evicted. None: not told, and not compared.

    evicted_kv: KV tokens. evicted_states: state slots.
    """

    evicted_kv: int | None = None
    evicted_states: int | None = None

    def text(self) -> str:
        """The line of the reply: `cached=3 evicted_kv=0`, or `ok`."""
        words = []
        for name in _names(type(self)):
            value = getattr(self, name)
            if value is None:
                continue
            if name.endswith("_tokens") or name == "salt":
                words.append(f"{name}={value if name == 'salt' else tokens_text(value)}")
                continue
            try:
                words.append(f"{name}={operator.index(value)}")
            except TypeError:
                raise TypeError(f"{type(self).__name__}: {name} is {value!r}, not an integer") from None
        return " ".join(words) or "ok"


@dataclass(frozen=True)
class Admitted(Reply):
    """The hit of a request in the cache.

    cached: tokens of the prompt whose KV, and state, it reuses; at most all but one.
    state, conv: length in tokens of the recurrent and conv state that it starts from (Subject.labels).
    junction: tokens after which a branch leaves what is cached.
    kv: KV tokens that were free or could be evicted beside its prefix, where `room` was asked.
    host: tokens of `cached` that a load from the host tier adds to what the device has.
    state_tokens, conv_tokens, cached_tokens: the tokens that the state, or the KV, was computed for.
    salt: the salt under which these were computed.
    """

    cached: int
    state: int | None = None
    conv: int | None = None
    junction: int | None = None
    kv: int | None = None
    host: int | None = None
    state_tokens: Sequence[int] | None = None
    conv_tokens: Sequence[int] | None = None
    cached_tokens: Sequence[int] | None = None
    salt: str | None = None


@dataclass(frozen=True)
class Extended(Reply):
    """The result of a forward.

    n: tokens that were really scheduled. blocks: blocks of the request.
    output: the token that the server would sample greedily after the last of them; None: not said, as where two
        tokens are so near to each other that rounding decides.
    """

    n: int
    blocks: int | None = None
    output: int | None = None


@dataclass(frozen=True)
class Stored(Reply):
    """exist: tokens that the cache had already. length: tokens of this request that the cache owns now."""

    exist: int | None = None
    length: int | None = None


@dataclass(frozen=True)
class Evicted(Reply):
    """kv: tokens, and state: slots, that were evicted. kv_free: tokens that are free now, where `room` was asked."""

    kv: int | None = None
    state: int | None = None
    kv_free: int | None = None


@dataclass(frozen=True)
class Counted(Reply):
    """Free and locked KV tokens and state slots.

    contents: a digest of all that the cache holds, for policies that define one (vllm-align).
    host_kv_free, host_states_free: of the host tier.
    window_free, window_locked: KV tokens of layers with a sliding window.
    """

    kv_free: int | None = None
    states_free: int | None = None
    kv_locked: int | None = None
    states_locked: int | None = None
    contents: int | None = None
    host_kv_free: int | None = None
    host_states_free: int | None = None
    window_free: int | None = None
    window_locked: int | None = None


@dataclass(frozen=True)
class Matched(Reply):
    """kv: matched tokens. state: length of the offered state, 0 for none. branch: tokens up to where a branch leaves.

    host: tokens beyond `state` up to the deepest state that the host tier alone has.
    cached: tokens that a request could use, where a cache without states has sliding windows.
    """

    kv: int
    state: int | None = None
    branch: int | None = None
    host: int | None = None
    cached: int | None = None
    state_tokens: Sequence[int] | None = None
    conv_tokens: Sequence[int] | None = None
    cached_tokens: Sequence[int] | None = None
    salt: str | None = None


@dataclass(frozen=True)
class Inserted(Reply):
    """exist: 1 where the tree had a state there already. freed_kv: tokens that were there twice and are freed."""

    exist: int
    freed_kv: int | None = None


@dataclass(frozen=True)
class Slot(Reply):
    """slot: a state slot's number. length: tokens that its state stands for."""

    slot: int | None = None
    length: int | None = None


_fields_of: dict[type, tuple[str, ...]] = {}


def _names(reply: type) -> tuple[str, ...]:
    if reply not in _fields_of:
        _fields_of[reply] = tuple(field.name for field in dataclasses.fields(reply))
    return _fields_of[reply]


# --- The configuration ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Config:
    """The configuration of a run (cache_sim/trace/grammar.md, "Config fields"). Sizes are in tokens, unless they say else."""

    policy: str = ""
    kv_tokens: int = 131072  # KV slots that requests can use
    state_slots: int = 256  # state slots that requests can use
    page: int = 1  # tokens of a KV page
    chunked_prefill: int = 8192  # tokens that one prefill step spends at most
    max_running: int = 256  # requests that run at once
    request_rows: int = 0  # rows of the request table; 0: max_running
    step_time: int = 1_000_000  # nanoseconds
    model_chunk: int = 64
    track_interval: int = 256
    overlap: bool = False  # decisions are one step ahead of results
    lazy: bool = False
    strip_thinking: bool = False
    skip_decode_lock: bool = False
    path_cap: int = -1  # states of a path; -1: no cap
    replay_ring: int = 0  # decode steps for each write of a state; 0: every step writes it
    host_kv: int = 0  # KV tokens of the host tier; 0: there is none
    host_states: int = 0  # state slots of the host tier
    write_policy: str = "write_through"  # or write_through_selective, write_back: when the host tier gets its copies
    prefetch_policy: str = "timeout"  # or best_effort, wait_complete: whether a request waits for the disk behind it
    prefetch_least: int = 256  # tokens for which a prefetch from there is made
    window: int = 0  # tokens that a token sees in layers with a sliding window; 0: there are none
    window_kv: int = 0  # KV tokens of these layers; 0: kv_tokens
    window_interval: int = 128  # tokens that a window leaves behind before they are given back
    window_release: int = 0  # 1: decoding gives up the lock on the window of its prefix
    host_window_kv: int = 0  # KV tokens of these layers on the host tier; 0: host_kv
    blocks: int = 4096
    block: int = 256
    hash_block: int = 256
    retention: str = "none"
    groups: str = ""
    eagle: int = 0  # 1: hashes cover the next token; 2: a hit loses its last unit
    drafts: int = 0
    checkpoint: int = 0  # kernels store a state inside a prompt's last chunk, a multiple of so many tokens from its start
    modules: int = 1  # of multi-token prediction
    shared_prefix_checkpoint: bool = False  # a junction inside a block is kept
    cpu_chunks: int = 0  # chunks of a connector's CPU tier; 0: there is none
    cpu_blocks: int = 0  # blocks of the host's own block manager; 0: there is none
    lazy_offload: int = 0  # it stores what the device evicts next
    blocks_per_chunk: int = 1  # of a group
    disk: int = 0  # 1: there is one behind the CPU tier, or the host
    graph_batches: str = ""
    ranks: int = 1
    routing: str = ""
    scheduler: str = ""
    pool_bytes: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    state_share: int = 0  # per mille
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)  # fields that this version does not know

    @property
    def rows(self) -> int:
        """The number of rows of the request table."""
        return self.request_rows or self.max_running

    @staticmethod
    def of_fields(fields: Mapping[str, str]) -> Config:
        """The configuration of the fields of a `hello` line. ValueError if a value should be a number and is not."""
        known: dict[str, Any] = {}
        others = {}
        for name, text in fields.items():
            kind = _CONFIG_TYPES.get(name)
            if kind is None:
                others[name] = text
            else:
                known[name] = (text if kind == "str" else text == "1" if kind == "bool" else
                               _nanoseconds(text) if name == "step_time" else int(text))
        return Config(**known, others=others)


def _nanoseconds(text: str) -> int:
    """The nanoseconds of a time of the grammar, such as `1ms`."""
    for unit, size in (("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * size
    return int(text)


_CONFIG_TYPES = {field.name: str(field.type) for field in dataclasses.fields(Config) if field.name != "others"}


# --- The subject ----------------------------------------------------------------------------------

class Subject:
    """A cache or a server under test. Override the methods that it has; other operations are never sent.

    An object is made for each trace, so it starts empty. Its methods are called with keyword arguments. A parameter
    that an override leaves out is one that the server does not know: operations that carry it are not asked for
    (`def extend(self, id, n, tokens)` is never sent drafts), except `prompt`, `ids`, `padded` and `prev`, which can
    be ignored. `**others` takes and ignores everything.

    A method answers with one of the replies above, with the number that its reply must have, or with None where
    there is nothing to say. It raises Refused, Unsupported, Violation or Wrong; an AssertionError counts as
    Violation, and any other exception is reported as `subject-died` with its file and line.

    honours: the config fields that the subject obeys, of kv_tokens, state_slots, page, request_rows (with
        max_running), blocks (with block, hash_block, retention, groups, eagle and drafts), checkpoint, modules and
        shared_prefix_checkpoint. `explore` leaves the others at their defaults: memory for everything, pages of one token.
    labels: True where `admit` always answers with state= and conv=.
    rehits, chunks, locks: promises that are then checked (cache_sim/check/protocol.md), each in whole multiples of so
        many tokens; 0: none. `__init__` may set them by the configuration.
    """

    honours: ClassVar[tuple[str, ...]] = ()
    labels: ClassVar[bool] = False
    rehits: int = 0
    chunks: int = 0
    locks: int = 0

    def __init__(self, config: Config) -> None:
        self.config = config

    # Request verbs.

    def admit(self, id: str, tokens: Tokens, prompt: int, salt: str, external: int, room: int, lora: str,
              images: Sequence[tuple[int, int, str]], late: bool) -> Admitted | int:
        """A request begins, or goes on after `preempt`. Answers with what it finds in the cache.

        tokens: all that are known, on resumption outputs too; prompt: how many of them are the original prompt.
        salt: requests of different salts share nothing. external: tokens whose KV and state came by transfer.
        lora: the adapter that computes KV and states. images: offset, length and name of those in the prompt; equal
        names are equal images. Neither is sent to a class without both parameters.
        room: KV tokens that must be left beside its own, free or to be evicted; else it is refused.
        late: with a disk, the deadline of what it waits for has passed. Not sent to a class without it.
        """
        raise NotImplementedError

    def extend(self, id: str, n: int, tokens: Tokens, drafts: Tokens, async_: bool,
               parents: Sequence[int]) -> Extended | int | None:
        """One chunk of the prompt, one decoded token or one verification. None: all n tokens are scheduled.

        n: tokens to compute. tokens: inputs beyond those admitted. drafts: tokens to verify; `accept` follows.
        async_: the result arrives with `complete`. parents: of drafts that are a tree, by draft: 0 where it stands
        after the last known token, k where after the k-th draft.
        """
        raise NotImplementedError

    def accept(self, id: str, n: int, tokens: Tokens) -> Extended | int | None:
        """What a verification kept: the accepted drafts and the token sampled after them, n tokens together."""
        raise NotImplementedError

    def checkpoint(self, id: str, up_to: int | None) -> Stored | None:
        """The running request's first `up_to` tokens (None: all that are computed) go to the cache."""
        raise NotImplementedError

    def finish(self, id: str, insert: bool, up_to: int | None) -> Stored | None:
        """The request ends. insert: what it computed stays in the cache. up_to: the answer ends after so many tokens;
        those after them were accepted together with its last one.
        """
        raise NotImplementedError

    def abort(self, id: str) -> Reply | None:
        """The request's client has gone."""
        raise NotImplementedError

    def preempt(self, id: str) -> Reply | None:
        """The request gives up its memory and will be admitted again."""
        raise NotImplementedError

    def step(self, ids: Sequence[str], padded: int | None) -> Reply | None:
        """A forward begins. ids: the requests in the order of its rows. padded: rows of the captured graph."""
        raise NotImplementedError

    def complete(self, id: str) -> Reply | None:
        """The result of the request's oldest asynchronous extend arrives."""
        raise NotImplementedError

    def capture(self, id: str, as_: str, partial: bool) -> Reply | None:
        """Keeps the request's row under a name: what it has computed so far. partial: its recurrent state alone."""
        raise NotImplementedError

    def restore(self, id: str, from_: str) -> Reply | None:
        """Sets the request back to what was kept; where that was a state alone, its tokens begin the request's."""
        raise NotImplementedError

    def compact(self, mapping: Sequence[int]) -> Reply | None:
        """Moves rows: mapping[i] is the new row of row i, -1 where it is gone (slot caches)."""
        raise NotImplementedError

    def evict(self, kv: int, state: int, room: int, tier: str) -> Evicted | None:
        """Evicts at least `kv` tokens and `state` slots, or until `room` tokens are free, as far as nothing holds them.

        tier: "host" for the host tier; else the device's memory. Not sent to a class without it.
        """
        raise NotImplementedError

    def flush(self) -> Evicted | None:
        """Evicts everything that nothing holds."""
        raise NotImplementedError

    def check(self) -> Counted | None:
        """Checks the subject's own rules: raises Violation. Answers with what is free and what is locked."""
        raise NotImplementedError

    # Copies between the device, a host tier and a disk behind it.

    def land(self, tier: str, from_: str, id: str) -> Reply | int | None:
        """The oldest copy to that tier, "host" or "device", is done. Answers with the number of copies, 1 or 0.

        tier: "disk" for the oldest to the disk; from_: "disk" for the oldest from it. Not sent to a class without from_.
        tier: "decode" for the oldest of two servers; id: of this request ("": of all). Not sent to a class without id.
        """
        raise NotImplementedError

    def fail(self, tier: str, from_: str, id: str, rank: int | None) -> Reply | int | None:
        """The oldest of these copies has ended and brought nothing. Answers with the number of copies, 1 or 0.

        rank: the only rank on which it has (None: all). Not sent to a class without it.
        """
        raise NotImplementedError

    def settle(self) -> Reply | int | None:
        """The server takes note of the copies that are done. Answers with their number."""
        raise NotImplementedError

    def load(self, id: str) -> Reply | None:
        """Sends to the decode server what the prefill server has computed of the request and not sent."""
        raise NotImplementedError

    # Sequence verbs: for an engine whose requests are sequences of one memory.

    def clone(self, id: str, as_: str, up_to: int | None) -> Reply | None:
        """A new request begins with the first `up_to` tokens that this one has computed (None: with all)."""
        raise NotImplementedError

    def truncate(self, id: str, up_to: int) -> Reply | None:
        """The request keeps its first `up_to` computed tokens. Refused('no_state_slot') where no state is there."""
        raise NotImplementedError

    # Tree verbs: for a prefix tree that is driven directly.

    def match(self, tokens: Tokens, limit: int | None, salt: str) -> Matched | int:
        """The longest cached prefix of the first `limit` tokens (None: of all)."""
        raise NotImplementedError

    def insert(self, tokens: Tokens, prev: int, slot: str | None, salt: str) -> Inserted | int:
        """Stores a prefix. prev: tokens whose KV the tree owns already. slot: the name of the state's slot."""
        raise NotImplementedError

    def lock(self, tokens: Tokens, as_: str, salt: str) -> Reply | None:
        """Locks the cached prefix against eviction, under a name."""
        raise NotImplementedError

    def unlock(self, lock: str) -> Reply | None:
        """Releases the lock of that name."""
        raise NotImplementedError

    def alloc(self, as_: str) -> Slot | None:
        """Takes a free state slot and names it."""
        raise NotImplementedError

    def advance(self, slot: str, tokens: Tokens) -> Slot | None:
        """Extends the state in the slot by these tokens."""
        raise NotImplementedError

    def fork(self, slot: str, as_: str) -> Slot | None:
        """Copies the state in the slot to a new slot, and names that."""
        raise NotImplementedError

    def copy(self, from_: str, to: str) -> Slot | None:
        """Copies the state of one named slot over that of another."""
        raise NotImplementedError

    def free(self, slot: str) -> Reply | None:
        """Gives the slot back."""
        raise NotImplementedError
