"""The truth of a prompt: its greedy output from a server that reuses nothing."""
from __future__ import annotations

import pathlib
from http.client import HTTPException

from lockstep.counted import counted
from lockstep.server.child import Child, NoServer
from lockstep.server.engines import Answer, Engine
from lockstep.server.steps import Config, Tokens

CHECK_EVERY = 200  # one prompt in this many is asked again, from a newly started server
LENGTH_MIN = 12  # the least number of tokens to ask for, so that a later, longer request rarely asks again


class TruthDiffers(Exception):
    """A server that reuses nothing gave two answers to the same prompt, so its answers are no truth."""


class Truth:
    """The truths of one model. Its server is started when an answer is needed that is not remembered."""

    def __init__(self, engine: Engine, config: Config, folder: pathlib.Path) -> None:
        self.engine, self.config, self.folder = engine, config, folder
        self.server: Child | None = None
        self.answers: dict[tuple[int, ...], Answer] = {}
        self.asked = 0

    def __call__(self, prompt: Tokens, n: int) -> Answer:
        known = self.answers.get(tuple(prompt))
        if known is None or len(known.output) < n:
            known = self.answers[tuple(prompt)] = self.ask(prompt, max(n, LENGTH_MIN))
        return Answer(known.output[:n], 0, known.gaps[:n])

    def gap(self, prompt: Tokens, at: int) -> float:
        """The lead of token `at` of the output."""
        known = self.answers[tuple(prompt)]
        found = known.gaps[at]
        if found is None:
            server = self.running()
            found = known.gaps[at] = self.engine.gap(server.port, prompt + known.output[:at], known.output[at])
        return found

    def running(self) -> Child:
        if self.server is None:
            self.server = self.engine.start(self.config, self.folder, truth=True)
        return self.server

    def ask(self, prompt: Tokens, n: int) -> Answer:
        try:
            answer = self.engine.truth(self.running().port, prompt, n)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, HTTPException) as error:
            raise NoServer(f"the truth's answer cannot be read: {type(error).__name__}: {error}") from None
        if answer.cached:
            raise TruthDiffers(f"the server that was started for the truth says cached={answer.cached}")
        if len(answer.gaps) != len(answer.output):
            raise TruthDiffers(f"{counted(len(answer.gaps), 'log probability', 'log probabilities')} came with "
                               f"{counted(len(answer.output), 'token')}")
        self.asked += 1
        if self.asked % CHECK_EVERY == 0:
            self.check(prompt, n, answer)
        return answer

    def check(self, prompt: Tokens, n: int, answer: Answer) -> None:
        self.close()
        self.server = self.engine.start(self.config, self.folder, truth=True)
        again = self.engine.truth(self.server.port, prompt, n)
        if again.output != answer.output:
            raise TruthDiffers(f"a fresh server answers {again.output} to {prompt}, an older one {answer.output}")

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


class Truths:
    """A Truth for each model, and for each value of other fields that change the output."""

    def __init__(self, engine: Engine, folder: pathlib.Path) -> None:
        self.engine, self.folder = engine, folder
        self.by_model: dict[str, Truth] = {}

    def of(self, config: Config) -> Truth:
        model = config["model"]
        if model not in self.by_model:
            self.by_model[model] = Truth(self.engine, config, self.folder)
        return self.by_model[model]

    def close(self) -> None:
        for truth in self.by_model.values():
            truth.close()
