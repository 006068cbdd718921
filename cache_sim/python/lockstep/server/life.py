"""One life of a server, from its start to its end: sends the steps, and writes the answers as a log."""
from __future__ import annotations

import http.client
import pathlib
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from lockstep.counted import counted
from lockstep.server.child import Child, NoServer, Refused
from lockstep.server.engines import Answer, Engine
from lockstep.server.steps import ANSWER, ASK, START, Config, Finding, Step


@dataclass
class Life:
    lines: list[dict[str, Any]] = field(default_factory=list)  # lines of the log, one for each answer
    findings: list[Finding] = field(default_factory=list)  # findings that are not in the log: missing and incomplete answers
    cached: int = 0  # tokens
    refused_verbs: int = 0

    @property
    def answers(self) -> int:
        return len(self.lines)


class _Client:
    """Sends a request in a thread of its own."""

    def __init__(self, player: _Player, step: Step) -> None:
        self.thread = threading.Thread(target=player.ask, args=(step,), daemon=True)
        self.thread.start()


class _Player:
    def __init__(self, engine: Engine, server: Child) -> None:
        self.engine, self.server = engine, server
        self.life, self.lock = Life(), threading.Lock()
        self.begin = time.monotonic()

    def ask(self, step: Step) -> None:
        start = time.monotonic() - self.begin
        try:
            answers = self.engine.ask(self.server.port, step)
        except Exception as error:  # noqa: BLE001  every failure to answer is a finding
            if finding := self.failure(step, error):
                with self.lock:
                    self.life.findings.append(finding)
            return
        self.note(step, answers, start, time.monotonic() - self.begin)

    def failure(self, step: Step, error: Exception) -> Finding | None:
        """The finding of a failed request. None if the server died, which is one finding for all requests."""
        if isinstance(error, TimeoutError):
            seconds = f"{self.engine.timeout:g} s"
            return Finding("subject-silent", step.id, f"no answer within {seconds}", "an answer", f"none for {seconds}")
        if isinstance(error, Refused):
            return Finding("reply-differs", step.id, f"the request is refused: {error}", "an answer", "a refusal")
        if isinstance(error, (OSError, http.client.HTTPException)):
            self.server_ended(0.5)
            if self.server.died():
                return None
        return Finding("subject-garbled", step.id, f"the answer cannot be read: {type(error).__name__}: {error}")

    def server_ended(self, seconds: float) -> bool:
        """Whether a server that has just closed a connection ends within `seconds`."""
        end = time.monotonic() + seconds
        while not self.server.died() and time.monotonic() < end:
            time.sleep(0.005)
        return bool(self.server.died())

    def note(self, step: Step, answers: list[Answer], start: float, end: float) -> None:
        names = step.answers()
        with self.lock:
            if len(answers) != len(names):
                text = f"{counted(len(answers), 'answer')} came for {len(names)}"
                self.life.findings.append(Finding("answer-differs", step.id, text, str(len(names)), str(len(answers))))
                return
            for k, (name, answer) in enumerate(zip(names, answers)):
                prompt = step.prompts[k // step.copies]
                self.life.lines.append({"id": name, "prompt": prompt, "output": answer.output, "cached": answer.cached,
                                        "start": round(start, 6), "end": round(end, 6), "greedy": True})
                self.life.cached += answer.cached
                if len(answer.output) != step.n:
                    text = f"asked for {counted(step.n, 'token')}, it says {len(answer.output)}"
                    self.life.findings.append(
                        Finding("answer-differs", step.id, text, str(step.n), str(len(answer.output))))

    def wait_started(self, step: Step, thread: threading.Thread) -> None:
        """Waits until the server has begun to answer the step, or has answered it."""
        while thread.is_alive():
            try:
                if self.engine.started(self.server.port, step):
                    return
            except (OSError, http.client.HTTPException, Refused, ValueError):
                return  # the answer of the step will show what is wrong
            time.sleep(0.001)

    def verb(self, step: Step) -> None:
        try:
            self.engine.verb(self.server.port, step)
        except Refused:
            self.life.refused_verbs += 1  # a missing file, or an empty slot
        except TimeoutError:
            text = f"no answer within {self.engine.timeout:g} s"
            self.life.findings.append(Finding("subject-silent", step.id, text))
        except (OSError, http.client.HTTPException):
            self.server_ended(0.5)

    def play(self, steps: list[Step], clients: int) -> Life:
        under_way: list[_Client] = []
        for step in steps:
            if self.server.died() or time.monotonic() > self.engine.end or any(one.kind == "subject-silent" for one in self.life.findings):
                break
            while len(under_way) >= clients:
                under_way.pop(0).thread.join()
            if step.do != ASK:
                self.verb(step)
            elif step.wait == ANSWER:
                self.ask(step)
            else:
                under_way.append(_Client(self, step))
                if step.wait == START:
                    self.wait_started(step, under_way[-1].thread)
            under_way = [one for one in under_way if one.thread.is_alive()]
        for one in under_way:
            one.thread.join()
        if ended := self.server.died():
            text = f"the server {ended}: {self.server.last_line()}"
            self.life.findings.insert(0, Finding("subject-died", "", text, "a running server", ended))
        return self.life


def play(engine: Engine, config: Config, steps: list[Step], folder: pathlib.Path) -> Life:
    """Starts a server, sends the steps and ends it. NoServer if it does not start."""
    for file in folder.glob("*.bin"):
        file.unlink()
    try:
        server, usable = engine.start(config, folder), False
    except NoServer as reason:
        if not reason.crashed:
            raise
        return Life(findings=[Finding("subject-died", "", str(reason), "a running server", "none")])
    try:
        life = _Player(engine, server).play(steps, config["clients"])
        usable = not any(one.kind in ("subject-silent", "subject-garbled") for one in life.findings)
        return life
    finally:
        engine.release(server, config, folder, usable)
