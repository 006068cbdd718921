"""What clients do with a server, one step after the other, and the files that keep it."""
from __future__ import annotations

import dataclasses
import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

Tokens = list[int]
Config = dict[str, Any]  # fields of an engine's configuration: words, numbers and booleans

ASK = "ask"
VERBS = ("save", "restore", "erase")  # of a slot
ANSWER, START, NOTHING = "answer", "start", "nothing"  # what the client waits for


class BadFile(Exception):
    """Why a file is no kept finding: one sentence."""


@dataclass
class Step:
    """One request. A client that does not wait for its answer goes on with the next step meanwhile."""

    id: str
    do: str = ASK
    prompts: list[Tokens] = field(default_factory=list)  # several: one request that asks them together
    n: int = 1  # tokens wanted
    copies: int = 1  # answers wanted for the prompt
    slot: int | None = None
    wait: str = ANSWER
    file: str = ""  # of save and restore

    def answers(self) -> list[str]:
        """The ids of its answers in the log: by prompt, then by copy."""
        count = len(self.prompts) * self.copies
        return [self.id] if count == 1 else [f"{self.id}.{k}" for k in range(count)]

    def text(self) -> str:
        """What a reader of a finding sees."""
        words = [] if self.slot is None else [f"slot {self.slot}"]
        if self.do != ASK:
            return " ".join([self.do, *words, self.file])
        prompts = " and ".join(tokens_text(prompt) for prompt in self.prompts)
        words += [f"{self.copies} answers"] * (self.copies > 1)
        words += {ANSWER: [], START: ["going on when it has begun"], NOTHING: ["going on at once"]}[self.wait]
        return ", ".join([f"ask {prompts} for {self.n}", *words])


def tokens_text(tokens: Tokens, most: int = 8) -> str:
    if len(tokens) <= most:
        return str(tokens)
    return f"[{', '.join(map(str, tokens[:most]))}, … {len(tokens)} tokens]"


def step_of_answer(answer: str) -> str:
    """The id of the step that an answer of the log belongs to."""
    return answer.partition(".")[0]


def printable(text: str) -> str:
    """What a server says as one line that no terminal takes orders from."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


@dataclass
class Finding:
    """What was wrong with an answer, or with the server as a whole."""

    kind: str  # a word of cache_sim/check/findings.md
    step: str  # the step's id; empty: of none
    text: str
    expected: str = ""
    actual: str = ""

    def __post_init__(self) -> None:
        self.text = printable(self.text)


@dataclass
class Kept:
    """A finding as a file: what to start, what to ask, what was wrong then."""

    engine: str
    config: Config
    steps: list[Step]
    finding: Finding
    plays: int = 1  # play so often to see it with a probability of about 0.98

    def write(self, path: pathlib.Path) -> None:
        whole = dataclasses.asdict(self)
        steps = [{name: value for name, value in step.items() if value != default_of(name)} for step in whole.pop("steps")]
        lines = ",\n  ".join(json.dumps(step) for step in steps)
        head = json.dumps(whole, indent=1, sort_keys=True)[:-2]
        path.write_text(f'{head},\n "steps": [\n  {lines}\n ]\n}}\n')

    @staticmethod
    def read(path: pathlib.Path) -> Kept:
        try:
            whole = json.loads(path.read_text())
            steps = [Step(**step) for step in whole["steps"]]
            return Kept(whole["engine"], whole["config"], steps, Finding(**whole["finding"]), whole.get("plays", 1))
        except OSError as error:
            raise BadFile(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise BadFile(f"{path}: is not a finding that a search has written: {type(error).__name__}: {error}") from None


def default_of(name: str) -> Any:
    for one in dataclasses.fields(Step):
        if one.name == name and one.default is not dataclasses.MISSING:
            return one.default
    return []
