"""The steps of clients of a server, and the files in which findings keep them."""
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
ANSWER, START, NOTHING = "answer", "start", "nothing"  # the event that the client waits for before its next step


class BadFile(Exception):
    """A file is no kept finding; the text says why in one sentence."""


@dataclass
class Step:
    """One request. A client that does not wait for the answer goes on with the next step."""

    id: str
    do: str = ASK
    prompts: list[Tokens] = field(default_factory=list)  # several prompts are sent in one request
    n: int = 1  # tokens of the answer
    copies: int = 1  # answers to the prompt
    slot: int | None = None
    wait: str = ANSWER
    file: str = ""  # of save and restore

    def answers(self) -> list[str]:
        """The ids of the answers in the log, ordered by prompt, then by copy."""
        count = len(self.prompts) * self.copies
        return [self.id] if count == 1 else [f"{self.id}.{k}" for k in range(count)]

    def text(self) -> str:
        """The step as text, for the reader of a finding."""
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
    """A server's text as one line without characters that a terminal would execute."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


@dataclass
class Finding:
    """A finding about an answer, or about the server as a whole."""

    kind: str  # a word of cache_sim/check/findings.md
    step: str  # the id of the step; empty: it belongs to no step
    text: str
    expected: str = ""
    actual: str = ""

    def __post_init__(self) -> None:
        self.text = printable(self.text)


@dataclass
class Kept:
    """A finding as a file: the server, its configuration, the steps and the wrong answer."""

    engine: str
    config: Config
    steps: list[Step]
    finding: Finding
    plays: int = 1  # this many plays show it with a probability of about 0.98

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
