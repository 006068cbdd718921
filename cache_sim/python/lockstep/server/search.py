"""Plays lives of a server, each with another configuration and other requests, until a limit is reached.

A finding is shrunk and written, and the search goes on: later lives leave out one of the features that it needs, so that
they show other findings."""
from __future__ import annotations

import dataclasses
import pathlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from lockstep.counted import counted
from lockstep.server import reproduction
from lockstep.server.child import NoServer
from lockstep.server.drawing import Drawing
from lockstep.server.engines import CLIENTS, Engine
from lockstep.server.life import Life, play
from lockstep.server.shrinking import Shrinker
from lockstep.server.steps import Config, Finding, Kept, Step
from lockstep.server.truth import Truths
from lockstep.server.verdict import judge, write_log

LIFE_SIZES = (10, 20, 40, 80)  # answers of a life; short lives try many configurations


@dataclass
class Options:
    seed: int = 1
    requests: int = 1000
    seconds: float = 0.0  # time limit of the search; 0: none
    findings: int = 0  # the search stops after this many different ones; 0: it goes on
    shrink_seconds: float = 120.0  # to shrink one finding
    shrink_lives: int = 2000
    gap: float = 0.02
    fixed: Config = field(default_factory=dict)
    avoid: list[str] = field(default_factory=list)
    life: int = 0  # answers of each life; 0: drawn
    out: pathlib.Path = pathlib.Path("findings")
    log: pathlib.Path | None = None
    quiet: bool = False


@dataclass
class Found:
    """A finding, and the later findings that need the same features."""

    name: str
    finding: Finding
    features: Config  # features of the configuration without which it does not show
    known: list[str]  # reported bugs that its configuration does not avoid
    first_answer: int
    lives: int = 1
    steps: int = 0
    tokens: int = 0
    shrunk: bool = False
    shrink_seconds: float = 0.0
    shrink_lives: int = 0


@dataclass
class Outcome:
    answers: int = 0
    lives: int = 0
    bad_lives: int = 0
    unexplained_lives: int = 0
    near_ties: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    truths: int = 0
    seconds: float = 0.0  # time of requests and checks, without shrinking
    found: list[Found] = field(default_factory=list)
    stopped: str = ""  # the reason why a search ended early

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Search:
    def __init__(self, engine: Engine, options: Options) -> None:
        self.engine, self.options, self.outcome = engine, options, Outcome()
        self.shrink_seconds = 0.0
        self.needed: list[Config] = []  # for each finding: the features without which it does not show

    def run(self) -> Outcome:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lockstep-server-") as name:
            folder = pathlib.Path(name)
            truths = Truths(self.engine, folder)
            try:
                while not self.is_over(time.monotonic() - begin - self.shrink_seconds):
                    self.live(truths, folder)
                    self.outcome.seconds = time.monotonic() - begin - self.shrink_seconds
                    self.tell()
            except KeyboardInterrupt:
                self.outcome.stopped = "interrupted"
            finally:
                truths.close()
                self.engine.close()
                self.outcome.truths = sum(truth.asked for truth in truths.by_model.values())
        return self.outcome

    def is_over(self, seconds: float) -> bool:
        options, outcome = self.options, self.outcome
        return (outcome.answers >= options.requests or bool(options.findings) and len(outcome.found) >= options.findings
                or bool(options.seconds) and seconds >= options.seconds)

    def live(self, truths: Truths, folder: pathlib.Path) -> None:
        outcome, options = self.outcome, self.options
        rng = random.Random(f"{options.seed}/{outcome.lives}")
        config = self.engine.draw(rng, options.fixed)
        for name in options.avoid:
            self.engine.known[name](config)
        self.keep_away(config, rng)
        count = min(options.life or rng.choice(LIFE_SIZES), options.requests - outcome.answers)
        steps = Drawing(self.engine, config, rng, truths.of(config)).steps(count)
        life = play(self.engine, config, steps, folder)
        verdict = judge(life, truths.of(config), folder, options.gap)
        self.count(life, verdict.near_ties)
        if verdict.findings:
            outcome.bad_lives += 1
            begin = time.monotonic()
            self.keep(config, steps, verdict.findings[0], life, truths, folder)
            self.shrink_seconds += time.monotonic() - begin

    def count(self, life: Life, near_ties: int) -> None:
        outcome = self.outcome
        outcome.lives += 1
        outcome.answers += life.answers
        outcome.cached += life.cached
        outcome.prompt_tokens += sum(len(line["prompt"]) for line in life.lines)
        outcome.near_ties += near_ties
        if self.options.log is not None:
            with self.options.log.open("a") as file:
                write_salted(life, outcome.lives, file)

    def keep_away(self, config: Config, rng: random.Random) -> None:
        """For each finding whose features the configuration has, leaves one of them out, unless all are fixed."""
        for needed in self.needed:
            free = sorted(set(needed) - set(self.options.fixed))
            if free and tags(needed) <= tags(self.features(config)):
                name = rng.choice(free)
                config[name] = (self.engine.fields | CLIENTS)[name].off
                self.engine.repair(config, self.options.fixed)

    # --- What was found ---

    def keep(self, config: Config, steps: list[Step], finding: Finding, life: Life, truths: Truths,
             folder: pathlib.Path) -> None:
        """Shrinks a finding that no earlier one explains, and writes it."""
        options, outcome = self.options, self.outcome
        begin = time.monotonic()
        at = outcome.answers - life.answers + next(
            (k + 1 for k, line in enumerate(life.lines) if line["id"].startswith(finding.step)), life.answers)
        shrinker = Shrinker(self.engine, config, steps, finding, truths, folder, options.gap, options.shrink_seconds,
                            options.shrink_lives)
        again = shrinker.reduce_configuration()
        if again:
            self.needed.append(self.features(shrinker.config))
        if (explained := self.explained(finding.kind, shrinker.config)) is not None:
            explained.lives += 1
            return
        if again:
            shrinker.reduce_steps()
            shrinker.leave_features_out()  # fewer requests need fewer features
            self.needed[-1] = self.features(shrinker.config)
        else:
            outcome.unexplained_lives += 1
        features = self.features(shrinker.config)
        name = f"{self.engine.name}-{len(outcome.found) + 1}"
        found = Found(name, shrinker.finding, features, self.known(shrinker.config), at, 1, len(shrinker.steps),
                      sum(len(prompt) for step in shrinker.steps for prompt in step.prompts), again,
                      time.monotonic() - begin, shrinker.lives)
        outcome.found.append(found)
        self.write(found, shrinker)

    def known(self, config: Config) -> list[str]:
        """The reported bugs that the configuration does not avoid."""
        return [name for name, rule in self.engine.known.items() if kept_away(config, rule) != config]

    def explained(self, kind: str, config: Config) -> Found | None:
        """An earlier finding that may be the same: its features are all in the configuration, or the same bugs are possible."""
        known, here = self.known(config), tags(self.features(config))
        for one in self.outcome.found:
            if one.shrunk and one.finding.kind == kind and (tags(one.features) <= here or known and one.known == known):
                return one
        return None

    def features(self, config: Config) -> Config:
        return {name: config[name] for name, one in (self.engine.fields | CLIENTS).items() if config[name] != one.off}

    def write(self, found: Found, shrinker: Shrinker) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        path = self.options.out / found.name
        kept = Kept(self.engine.name, shrinker.config, shrinker.steps, shrinker.finding, shrinker.plays)
        kept.write(path.with_suffix(".json"))
        reproduction.write(self.engine, kept, path.with_suffix(".py"))
        self.clear()
        print(finding_text(found, kept, path, self.options), flush=True)

    # --- Progress ---

    def tell(self) -> None:
        if not self.options.quiet and sys.stderr.isatty():
            outcome = self.outcome
            print(f"\r\033[K{counted(outcome.answers, 'answer')} of {counted(outcome.lives, 'life', 'lives')}, "
                  f"{len(outcome.found)} found", end="",
                  file=sys.stderr, flush=True)

    def clear(self) -> None:
        if not self.options.quiet and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)


def tags(features: Config) -> set[str]:
    """The features by which findings are told apart, without their sizes."""
    return {f"{name}={value}" if name == "drafts" else name for name, value in features.items()}


def kept_away(config: Config, rule: Any) -> Config:
    other = dict(config)
    rule(other)
    return other


def write_salted(life: Life, number: int, file: Any) -> None:
    """Adds a life to a log of many lives. A salt for each life keeps their prefixes apart, as their caches are."""
    import json
    for line in life.lines:
        file.write(json.dumps({**line, "id": f"{number}.{line['id']}", "salt": f"life-{number}"}) + "\n")


def features_text(features: Config) -> str:
    words = [name if value is True else f"{name}={value}" for name, value in features.items()]
    return ", ".join(words) or "nothing beyond one slot and one client"


def finding_text(found: Found, kept: Kept, path: pathlib.Path, options: Options) -> str:
    lines = [f"{found.name}: {found.finding.kind}, found after {counted(found.first_answer, 'answer')}: {found.finding.text}"]
    shrink_lives = counted(found.shrink_lives, "life", "lives")
    if not found.shrunk:
        lines.append(f"  it did not come again in {shrink_lives} and {found.shrink_seconds:.1f} s; all of its requests are kept")
    lines.append(f"  needs     {features_text(found.features)} (model {pathlib.Path(kept.config['model']).name or 'of the server'})")
    if found.known:
        lines.append(f"  has the conditions of {', '.join(found.known)}")
    lines.append(f"  shrunk to {counted(len(kept.steps), 'request')}, {counted(found.tokens, 'token')} of prompts, in "
                 f"{found.shrink_seconds:.1f} s "
                 f"and {shrink_lives}" + (f"; seen in one of {kept.plays} plays" if kept.plays > 1 else ""))
    if len(kept.steps) <= 12:
        lines += [f"    {step.id:5} {step.text()}" for step in kept.steps]
    lines.append(f"  replay    lockstep server replay {path.with_suffix('.json')}, or python3 {path.with_suffix('.py')}")
    return "\n".join(lines)


def summary_text(outcome: Outcome, seed: int) -> str:
    rate = outcome.answers / outcome.seconds if outcome.seconds else 0
    share = outcome.cached / outcome.prompt_tokens if outcome.prompt_tokens else 0
    lines = [f"{one.name}  {one.finding.kind}  {features_text(one.features)}: found after "
             f"{counted(one.first_answer, 'answer')}, in {counted(one.lives, 'life', 'lives')}, "
             f"{'shrunk to' if one.shrunk else 'kept whole,'} {counted(one.steps, 'request')}" for one in outcome.found]
    lines.append(f"seed {seed}: {counted(outcome.answers, 'answer')} of {counted(outcome.lives, 'life', 'lives')} in "
                 f"{outcome.seconds:.1f} s, {rate:.0f} a second; {share:.0%} of the prompts' tokens cached; "
                 f"{counted(outcome.truths, 'truth')}, {counted(outcome.near_ties, 'near tie')}; "
                 + (f"{counted(outcome.bad_lives, 'life', 'lives')} with findings, {len(outcome.found)} different"
                    if outcome.found else "nothing found"))
    return "\n".join(lines)


__all__ = ["NoServer", "Options", "Outcome", "Search", "summary_text"]
