"""Shrinks a finding to few requests: every try starts the server again."""
from __future__ import annotations

import copy
import math
import pathlib
import time
from typing import Callable, Iterator

from lockstep.server.child import NoServer
from lockstep.server.engines import CLIENTS, Engine
from lockstep.server.life import play
from lockstep.server.steps import ANSWER, ASK, START, NOTHING, Config, Finding, Step, Tokens
from lockstep.server.truth import Truths
from lockstep.server.verdict import judge

PLAYS_FIRST = 4  # plays that measure how often a finding shows again
PLAYS_AGAIN = 12  # the same for a smaller script
PLAYS_MAX = 10  # plays of one smaller script
FEW = 12  # requests; such short scripts are fast, so they are played more often
PLAYS_MAX_OF_FEW = 30
LONG = 60  # tokens of an answer that surely overlaps the next requests
SURE = 0.02  # the accepted probability that a finding is missed
COUNT_SHARE = 0.25  # of the time, to count how often the last script shows a rare finding
SILENT_SECONDS = 4.0  # the timeout while a script that showed silence is shrunk

Steps = list[Step]


class Shrinker:
    """Shrinks one finding. `config` and `steps` are the smallest so far; `finding` is the finding that they showed."""

    def __init__(self, engine: Engine, config: Config, steps: Steps, finding: Finding, truths: Truths,
                 folder: pathlib.Path, gap: float, seconds: float = 120, lives: int = 2000) -> None:
        self.engine, self.config, self.steps, self.finding = engine, dict(config), copy.deepcopy(steps), finding
        self.truths, self.folder, self.gap = truths, folder, gap
        self.end, self.lives_max = time.monotonic() + seconds, lives
        self.count_seconds = COUNT_SHARE * seconds
        self.plays = 1  # how often a smaller script is played
        self.lives = 0
        self.counted = (self.config, self.steps, self.finding, self.plays)  # the last state whose plays were counted

    def reduce_configuration(self) -> bool:
        """Shrinks the configuration. False if the finding does not show again; then nothing was shrunk."""
        whole = self.steps
        if self.finding.step:  # requests that were sent later may have overlapped the wrong answer
            self.cut_behind(next(k for k, step in enumerate(self.steps) if step.id == self.finding.step))
        if not self.comes_again():
            self.steps = whole
            return False
        self.keep_the_last_steps()
        self.leave_features_out()
        return True

    def reduce_steps(self) -> None:
        for _ in range(3):
            before = self.size()
            self.remove_steps()
            if not self.is_over():
                self.count_plays()
            self.simplify_steps()
            self.shorten_prompts()
            if self.is_over() or self.size() == before:
                break
            self.count_plays()
        self.count_plays()  # of the kept script, even if there is no time for more

    def size(self) -> tuple[int, int]:
        return len(self.steps), sum(step.n + sum(map(len, step.prompts)) for step in self.steps)

    # --- Trying ---

    def seen(self, config: Config, steps: Steps) -> Finding | None:
        """Plays one life. Returns a finding of the same kind at the same step, or at any step of overlapping requests.
        A life that is cut short by the time limit shows nothing."""
        self.lives += 1
        timeout = self.engine.timeout
        self.engine.end = self.end
        if self.finding.kind == "subject-silent":
            self.engine.timeout = min(timeout, SILENT_SECONDS)
        try:
            life = play(self.engine, config, steps, self.folder)
        except NoServer:
            return None  # the options contradict each other
        except TimeoutError:
            if not self.is_late():
                raise
        finally:
            self.engine.timeout, self.engine.end = timeout, math.inf
        if self.is_late():
            return None
        for one in judge(life, self.truths.of(config), self.folder, self.gap).findings:
            if one.kind == self.finding.kind and (one.step == self.finding.step or config["clients"] > 1):
                return one
        return None

    def comes_again(self) -> bool:
        """Plays the script a few times, unchanged and with requests that each begin before the next one is sent. Keeps the
        form that shows the finding more often."""
        forms, most, of = [self.steps], 0, PLAYS_FIRST
        if self.config["clients"] > 1:
            forms += [in_order(self.steps), in_order(self.steps, LONG)]
        for steps in forms:
            found, played = self.play_often(steps, PLAYS_FIRST)
            if len(found) > most:
                self.steps, self.finding, most, of = steps, found[0], len(found), played
            if most == PLAYS_FIRST or self.is_late():
                break
        self.plays = plays_for(most, of, len(self.steps))
        self.counted = (self.config, self.steps, self.finding, self.plays)
        return most > 0

    def play_often(self, steps: Steps, times: int) -> tuple[list[Finding], int]:
        """Plays up to `times` lives within the time. Returns their findings, and the number of lives."""
        found, played = [], 0
        while played < times and not self.is_late():
            one = self.seen(self.config, steps)
            if self.is_late():
                break
            played += 1
            found += [one] if one is not None else []
        return found, played

    def is_counted(self) -> bool:
        return self.plays > 1 or self.config["clients"] > 1

    def count_plays(self) -> None:
        """Counts how often the current script shows the finding. If it never does, it was kept by chance, and the last
        counted script is restored."""
        if not self.is_counted():
            return
        found, played = self.play_often(self.steps, PLAYS_AGAIN)
        if not found:
            self.config, self.steps, self.finding, self.plays = self.counted
            return
        self.plays = plays_for(len(found), played, len(self.steps))
        self.counted = (self.config, self.steps, self.finding, self.plays)

    def is_late(self) -> bool:
        return time.monotonic() >= self.end

    def is_over(self) -> bool:
        """Whether the time for shrinking is over; the rest of the time is for counting plays."""
        left = self.end - time.monotonic() - (self.count_seconds if self.is_counted() else 0)
        return left <= 0 or self.lives >= self.lives_max

    def takes(self, config: Config, steps: Steps) -> bool:
        """Whether this script shows the finding as well; if so, it becomes the smallest so far."""
        for _ in range(self.plays):
            if self.is_over():
                return False
            if (found := self.seen(config, steps)) is not None:
                self.config, self.steps, self.finding = config, steps, found
                return True
        return False

    # --- Smaller ---

    def cut_behind(self, last: int) -> None:
        behind = self.steps[last + 1:]
        if self.steps[last].wait == ANSWER or not behind:
            self.steps = self.steps[:last + 1]
        else:
            self.steps = self.steps[:last + 1] + behind[:self.config["clients"]]

    def keep_the_last_steps(self) -> None:
        """Keeps the last steps alone: if requests overlap, a wrong answer rarely depends on much earlier requests."""
        at = next((k for k, step in enumerate(self.steps) if step.id == self.finding.step), None)
        if at is None or self.config["clients"] == 1:
            return
        size = 2
        while size < at:
            if self.takes(self.config, self.steps[at - size:]):
                return
            size *= 2

    def leave_features_out(self) -> None:
        """Leaves out each feature of the configuration in turn; the finding needs those that stay."""
        for name, one in (self.engine.fields | CLIENTS).items():
            if self.config.get(name) in (one.off, None):
                continue
            config, steps = {**self.config, name: one.off}, copy.deepcopy(self.steps)
            fit(config, steps)
            if not self.takes(config, steps) and name == "slots" and self.config["slots"] > 2:
                config, steps = {**self.config, "slots": 2}, copy.deepcopy(self.steps)
                fit(config, steps)
                self.takes(config, steps)

    def remove_steps(self) -> None:
        size = max(1, len(self.steps) // 2)
        while True:
            at = 0
            while at < len(self.steps):
                rest = self.steps[:at] + self.steps[at + size:]
                if not self.has_target(rest) or not self.takes(self.config, rest):
                    at += size
            if size == 1:
                return
            size //= 2

    def has_target(self, steps: Steps) -> bool:
        if not self.finding.step:
            return True
        if self.config["clients"] > 1:
            return bool(steps)
        return any(step.id == self.finding.step for step in steps)

    def simplify_steps(self) -> None:
        for k in range(len(self.steps)):
            for change in simpler(self.steps[k]):
                steps = copy.deepcopy(self.steps)
                change(steps[k])
                if steps[k] != self.steps[k]:
                    self.takes(self.config, steps)

    def shorten_prompts(self) -> None:
        """Cuts off the ends of prompts, and cuts the same tokens out of all prompts with a common beginning."""
        for k, step in enumerate(self.steps):
            for p in range(len(step.prompts)):
                size = len(self.steps[k].prompts[p]) // 2
                while size:
                    steps = copy.deepcopy(self.steps)
                    prompt = steps[k].prompts[p]
                    if size < len(prompt):
                        del prompt[-size:]
                        if self.takes(self.config, steps):
                            continue
                    size //= 2
        for k in range(len(self.steps)):
            for p in range(len(self.steps[k].prompts)):
                size = len(self.steps[k].prompts[p]) // 2
                while size:
                    self.cut_out(k, p, size)
                    size //= 2

    def cut_out(self, k: int, p: int, size: int) -> None:
        at = 0
        while at + size < len(self.steps[k].prompts[p]):
            steps = copy.deepcopy(self.steps)
            head = self.steps[k].prompts[p][:at + size]
            for prompt in (prompt for step in steps for prompt in step.prompts):
                if prompt[:at + size] == head and len(prompt) > size:
                    del prompt[at:at + size]
            if not self.takes(self.config, steps):
                at += size


def plays_for(found: int, of: int, size: int) -> int:
    """The number of plays of which at least one shows the finding, except with probability SURE."""
    most = PLAYS_MAX_OF_FEW if size <= FEW else PLAYS_MAX
    if found == of:
        return 1
    return most if found == 0 else min(most, math.ceil(math.log(SURE) / math.log(1 - found / of)))


def in_order(steps: Steps, n: int = 0) -> Steps:
    """The same steps; a request that is not waited for begins before the next one is sent, and has a long answer."""
    steps = copy.deepcopy(steps)
    for step in steps:
        if step.wait != ANSWER:
            step.wait, step.n = START, max(step.n, n)
    return steps


def fit(config: Config, steps: Steps) -> None:
    """Changes steps so that a server with a smaller configuration can be asked them."""
    slots = config.get("slots", 1)
    for step in steps:
        step.copies = min(step.copies, slots) if config.get("copies", True) else 1
        if step.slot is not None and step.do == ASK and not config.get("named_slots", True):
            step.slot = None
        if step.slot is not None:
            step.slot = min(step.slot, slots - 1)
        if config["clients"] == 1:
            step.wait = ANSWER
        if not config.get("together", True):
            step.prompts = step.prompts[:1]
        if not config.get("long", True):
            step.n = min(step.n, 12)
    if not config.get("files", True):
        steps[:] = [step for step in steps if step.do == ASK]


def simpler(step: Step) -> Iterator[Callable[[Step], None]]:
    """Changes that simplify a step; each is tried by itself."""
    def put(name: str, value: object) -> Callable[[Step], None]:
        return lambda one: setattr(one, name, value)

    def keep(tokens: list[Tokens]) -> Callable[[Step], None]:
        return lambda one: setattr(one, "prompts", copy.deepcopy(tokens))

    if step.do != ASK:
        return
    if step.wait != ANSWER:
        yield put("wait", ANSWER)
    if step.wait == NOTHING:
        yield put("wait", START)  # no race: the next request is sent while this one is being answered
    if step.copies > 1:
        yield put("copies", 1)
        yield put("copies", 2)
    if step.slot is not None:
        yield put("slot", None)
        yield put("slot", 0)
    for k in range(len(step.prompts)):
        if len(step.prompts) > 1:
            yield keep(step.prompts[:k] + step.prompts[k + 1:])
    for n in (1, 2, 4, 8, 16, 40):
        if n < step.n:
            yield put("n", n)
