"""Random steps: prompts that are repeated, continued, forked and rewritten, by clients that may wait for answers."""
from __future__ import annotations

import random

from lockstep.server.engines import Engine
from lockstep.server.steps import ANSWER, START, NOTHING, VERBS, Config, Step, Tokens
from lockstep.server.truth import Truth

DOCUMENTS = 4  # number of texts that prompts begin with
DOCUMENT_SIZE = 200
PROMPT_SIZE_MAX = 170
KNOWN_MAX = 50  # number of prompts that later ones can continue
LENGTHS = (1, 1, 2, 3, 5, 8, 12)  # tokens of an answer
SHORT = (1, 1, 1, 2, 5)  # tokens of each of several answers to one prompt
LONG = 80


class Drawing:
    """Draws the steps of one life of a server, from the random generator, the configuration and the model."""

    def __init__(self, engine: Engine, config: Config, rng: random.Random, truth: Truth) -> None:
        self.config, self.rng, self.truth = config, rng, truth
        self.vocabulary, self.tells_start = engine.vocabulary, engine.tells_start
        self.documents = [self.fresh(DOCUMENT_SIZE) for _ in range(DOCUMENTS)]
        self.known = [document[:size] for document in self.documents for size in (1, 5, 10, 40, 90)]

    def fresh(self, size: int) -> Tokens:
        low, high = self.vocabulary
        return [self.rng.randrange(low, high) for _ in range(size)]

    def steps(self, count: int) -> list[Step]:
        return [self.step(f"r{k + 1}") for k in range(count)]

    def step(self, name: str) -> Step:
        config, rng = self.config, self.rng
        slots = config.get("slots", 1)
        if config.get("files") and rng.random() < 0.08:
            verb = rng.choice(VERBS)
            return Step(name, verb, slot=rng.randrange(slots), file="" if verb == "erase" else f"{rng.randrange(3)}.bin")
        step = Step(name, prompts=[self.prompt()], n=rng.choice(LENGTHS))
        is_long = bool(config.get("long")) and rng.random() < 0.12
        if is_long:
            step.n = LONG
        elif config.get("together") and rng.random() < 0.3:
            step.prompts += [self.prompt() for _ in range(rng.choice((1, 2, 2)))]
        elif config.get("copies") and rng.random() < 0.3:
            step.copies, step.n = rng.randint(2, slots), rng.choice(SHORT)
        if config.get("named_slots") and rng.random() < 0.3 and len(step.prompts) == step.copies == 1:
            step.slot = rng.randrange(slots)
        if config["clients"] > 1:
            step.wait = self.wait(is_long)
        for prompt in step.prompts:
            self.remember(prompt, step.n)
        return step

    def wait(self, is_long: bool) -> str:
        """The wait of a step: other steps are sent while a long answer is being generated."""
        chance = self.rng.random()
        if is_long and chance < 0.9:
            return START if self.tells_start else NOTHING
        return NOTHING if chance < 0.6 else START if chance < 0.75 and self.tells_start else ANSWER

    def remember(self, prompt: Tokens, n: int) -> None:
        kept = n if self.rng.random() < 0.6 else self.rng.randint(0, n)  # the whole answer, as in a conversation
        self.known.append(prompt + self.truth(prompt, n).output[:kept])
        if len(self.known) > KNOWN_MAX:
            self.known.pop(self.rng.randrange(len(self.known)))

    def prompt(self) -> Tokens:
        rng = self.rng
        base = rng.choice(self.known)
        chance = rng.random()
        if chance < 0.25:
            prompt = base
        elif chance < 0.5:
            prompt = base + self.fresh(rng.choice((1, 2, 5, 20)))
        elif chance < 0.75:
            prompt = base[:rng.randint(1, len(base))] + self.fresh(rng.choice((0, 1, 3, 9)))
        elif chance < 0.9:
            prompt = base[:rng.randint(1, len(base))]
        else:
            prompt = rng.choice(self.documents)[:rng.randint(1, 150)]
        return list(prompt if len(prompt) <= PROMPT_SIZE_MAX else prompt[:60])
