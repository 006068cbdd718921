"""Engines: each class starts one kind of server, sends it requests, and starts it without a cache for the truth."""
from __future__ import annotations

import collections
import itertools
import math
import pathlib
import random
import shlex
import time
from dataclasses import dataclass, field
from typing import Any, Callable

from lockstep.server import child
from lockstep.server.steps import ASK, Config, Step, Tokens

Rule = Callable[[Config], None]


@dataclass
class Answer:
    """The answer to one prompt. ValueError if its values are impossible."""

    output: Tokens
    cached: int = 0
    gaps: list[float | None] = field(default_factory=list)  # of a truth: the lead of each token's logit; None: unknown

    def __post_init__(self) -> None:
        if type(self.output) is not list:
            raise ValueError(f"tokens are {self.output!r:.60}, not a list")
        for name, number in [("cached tokens", self.cached), *(("a token", token) for token in self.output)]:
            if type(number) is not int or not 0 <= number < 1 << 32:
                raise ValueError(f"{name}: {number!r:.60} is not a whole number from 0 to 2^32 - 1")
        for gap in self.gaps:
            if gap is not None and not math.isfinite(gap):
                raise ValueError(f"a difference of log probabilities is {gap!r:.60}")


@dataclass
class Field:
    """A field of a configuration: the value without the feature, and the values to draw (repeated ones more often)."""

    off: Any
    values: tuple[Any, ...]


#: Fields of every engine, about the behaviour of clients.
CLIENTS = {
    "clients": Field(1, (1, 1, 2, 3, 4)),  # requests under way at the same time
    "long": Field(False, (False, True)),  # some answers have 80 tokens, and other requests come meanwhile
}


class Engine:
    """The base of all engines. An answer may take `timeout` seconds; no answer is waited for after `end` (time.monotonic)."""

    name = ""
    fields: dict[str, Field] = {}
    known: dict[str, Rule] = {}  # reported bugs: changes of a configuration that avoid them
    tells_start = False  # started() is implemented
    ready_path = "/health"
    start_seconds = 60.0
    end = math.inf

    def __init__(self, program: str, models: list[str], vocabulary: tuple[int, int], timeout: float,
                 truth_program: str = "", reset: str = "") -> None:
        self.program, self.models, self.vocabulary, self.timeout = program, models, vocabulary, timeout
        self.truth_program, self.reset = truth_program, reset
        self.waiting: dict[tuple[str, ...], child.Child] = {}  # by command: idle servers whose cache a reset can empty

    def draw(self, rng: random.Random, fixed: Config) -> Config:
        """Draws a configuration that has the fields of `fixed`."""
        config: Config = {name: rng.choice(one.values) for name, one in (CLIENTS | self.fields).items()}
        config["model"] = rng.choice(self.models)
        self.favour({**config, **fixed}, config, rng)
        config.update(fixed)
        self.repair(config, fixed)
        return config

    def favour(self, whole: Config, config: Config, rng: random.Random) -> None:
        """Draws again fields of `config` that matter in combination; `whole` has the fixed fields as well."""

    def repair(self, config: Config, fixed: Config) -> None:
        """Makes fields fit each other."""

    def words(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        raise NotImplementedError

    def truth_words(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        """The command of a server that reuses nothing and is asked one prompt after another."""
        raise NotImplementedError

    environment: dict[str, str] = {}

    def patience(self) -> float:
        """The seconds that the next answer may take."""
        return max(0.001, min(self.timeout, self.end - time.monotonic()))  # 0 would mean no limit

    def start(self, config: Config, folder: pathlib.Path, truth: bool = False) -> child.Child:
        """Starts a server with an empty cache: a new process, or a released one after a reset."""
        waiting = None if truth else self.waiting.pop(tuple(self.words(config, 0, folder)), None)
        if waiting is not None and not waiting.died():
            try:
                child.post(waiting.port, self.reset, {}, self.patience())
            except BaseException:
                waiting.stop()
                raise
            return waiting
        for last in (False, True):  # a second try, because another process may have taken the port
            port = child.free_port()
            words = (self.truth_words if truth else self.words)(config, port, folder)
            server = child.Child(words, port, folder / ("truth.log" if truth else "server.log"), self.environment)
            try:
                server.wait_ready(self.ready_path, min(self.start_seconds, max(0.0, self.end - time.monotonic())))
                return server
            except child.NoServer as gone:
                if last or gone.slow:
                    raise
            except BaseException:  # an interrupted search leaves no server behind
                server.stop()
                raise
        raise AssertionError

    def release(self, server: child.Child, config: Config, folder: pathlib.Path, usable: bool) -> None:
        """Ends the life of a server: keeps it for a reset, or stops it."""
        if self.reset and usable and not server.died():
            self.waiting[tuple(self.words(config, 0, folder))] = server
        else:
            server.stop()

    def close(self) -> None:
        for server in self.waiting.values():
            server.stop()
        self.waiting.clear()

    def program_size(self) -> int:
        """The number of words that name the program in the command; in a reproduction the reader replaces them."""
        return len(shlex.split(self.program))

    def request(self, step: Step) -> tuple[str, dict[str, Any]]:
        """The path and the body of the POST request of a step."""
        raise NotImplementedError

    #: For reproductions: Python that reads the tokens of each answer, and that makes the body of the same prompt alone.
    outputs_source = ""
    started_source = "def started(port, body):\n    return True\n"
    alone_source = ""

    def ask(self, port: int, step: Step) -> list[Answer]:
        """Sends a step. Returns its answers in the order of step.answers()."""
        raise NotImplementedError

    def started(self, port: int, step: Step) -> bool:
        """Whether the server has begun to answer the step."""
        return True

    def verb(self, port: int, step: Step) -> None:
        raise NotImplementedError

    def truth(self, port: int, prompt: Tokens, n: int) -> Answer:
        raise NotImplementedError

    def gap(self, port: int, prompt: Tokens, token: int) -> float:
        """The lead of this token after the prompt, or a smaller number; for truths that have no gaps."""
        return 0.0


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def has_drafts(model: str) -> bool:
    """Whether a model has layers for multi-token prediction, by the header of its file."""
    try:
        with open(model, "rb") as file:
            return b"nextn_predict_layers" in file.read(1 << 16)
    except OSError:
        return False


def without_stale_checkpoints(config: Config) -> None:
    config["checkpoints"] = 0


def without_busy_slots(config: Config) -> None:
    if config["named_slots"] and config["clients"] > 1:
        config["host_cache"] = 0


def without_moved_snapshots(config: Config) -> None:
    if config["drafts"] == "draft-mtp":
        config["slots"] = min(config["slots"], 2)


def without_queued_copies(config: Config) -> None:
    if config["slots"] > 1:
        config["unified"] = True


class Llama(Engine):
    """llama-server through its native API: checkpoints of recurrent states, a host cache of whole slots, drafts."""

    name = "llama"
    tells_start = True
    environment = {"GGML_NO_BACKTRACE": "1"}  # otherwise an abort starts a debugger
    fields = {
        "slots": Field(1, (1, 2, 2, 3, 3, 4)),
        "unified": Field(False, (False, True)),  # -kvu: one KV buffer for all slots
        "drafts": Field("none", ("none", "none", "draft-mtp", "ngram-simple", "ngram-map-k")),
        "host_cache": Field(0, ("default", "default", 0, 1)),  # MiB: --cache-ram
        "checkpoints": Field(0, ("default", "default", 0, 1, 3)),  # --ctx-checkpoints
        "checkpoint_step": Field("default", ("default", "default", 0, 8)),  # tokens between two: --checkpoint-min-step
        "small_batch": Field(False, (False, True)),  # -b 32 -ub 16
        "named_slots": Field(False, (False, True)),  # id_slot
        "copies": Field(False, (False, True)),  # n_cmpl
        "together": Field(False, (False, True)),  # several prompts in one request
        "files": Field(False, (False, False, True)),  # slots saved, restored, erased
    }
    known = {
        "stale-checkpoint": without_stale_checkpoints,
        "busy-slot": without_busy_slots,
        "moved-snapshots": without_moved_snapshots,
        "queued-copy": without_queued_copies,
    }

    def favour(self, whole: Config, config: Config, rng: random.Random) -> None:
        if has_drafts(whole["model"]) and rng.random() < 0.5:
            config["drafts"] = "draft-mtp"  # few models have it
        if config["clients"] > 1 and rng.random() < 0.5:
            config["clients"] = whole["slots"] + rng.randrange(2)  # as many requests as slots, or one more

    def repair(self, config: Config, fixed: Config) -> None:
        if config["drafts"] == "draft-mtp" and not has_drafts(config["model"]) and "drafts" not in fixed:
            config["drafts"] = "none"
        if config["drafts"] == "draft-mtp" and "small_batch" not in fixed:
            config["small_batch"] = False  # with it, the release fails an assertion at its start
        if config["slots"] == 1 and "copies" not in fixed:
            config["copies"] = False  # each copy needs a slot

    def common(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        # float32 without flash attention: differences by rounding are far below the smallest gap that counts.
        return [*shlex.split(self.program), "-m", config["model"], "--host", "127.0.0.1", "--port", str(port), "-t", "1",
                "-tb", "1", "--no-warmup", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--offline", "-c", "4096"]

    def words(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        words = self.common(config, port, folder) + ["--slots", "--slot-save-path", str(folder)]
        words += ["-np", str(config["slots"]), "-kvu" if config["unified"] else "-no-kvu"]
        for name, option in (("host_cache", "--cache-ram"), ("checkpoints", "--ctx-checkpoints"),
                             ("checkpoint_step", "--checkpoint-min-step")):
            words += [] if config[name] == "default" else [option, str(config[name])]
        if (drafts := config["drafts"]) != "none":
            words += ["--spec-type", drafts]
        if drafts.startswith("ngram"):  # drafts of three tokens after two that were seen before
            words += [f"--spec-{drafts}-size-n", "2", f"--spec-{drafts}-size-m", "3", f"--spec-{drafts}-min-hits", "1"]
        return words + (["-b", "32", "-ub", "16"] if config["small_batch"] else [])

    def truth_words(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        return self.common(config, port, folder) + ["-np", "1", "--cache-ram", "0", "--ctx-checkpoints", "0"]

    def body(self, prompt: Any, n: int) -> dict[str, Any]:
        return {"prompt": prompt, "n_predict": n, "temperature": 0, "top_k": 1, "samplers": ["top_k"],
                "return_tokens": True, "cache_prompt": True, "ignore_eos": True}

    outputs_source = '''def outputs(answer):
    answers = answer if isinstance(answer, list) else [answer]
    return [one["tokens"] for one in sorted(answers, key=lambda one: one.get("index", 0)) if "tokens" in one]
'''
    started_source = '''def started(port, body):
    """Whether the server is answering it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/slots", timeout=60) as answer:
        return any(slot["is_processing"] for slot in json.load(answer) if body.get("id_slot") in (None, slot["id"]))
'''
    alone_source = '{**body, "prompt": prompt, "cache_prompt": False, "id_slot": -1, "n_cmpl": 1}'

    def request(self, step: Step) -> tuple[str, dict[str, Any]]:
        if step.do != ASK:
            return f"/slots/{step.slot}?action={step.do}", {"filename": step.file}
        body = self.body(step.prompts if len(step.prompts) > 1 else step.prompts[0], step.n)
        if step.slot is not None:
            body["id_slot"] = step.slot
        if step.copies > 1:
            body["n_cmpl"] = step.copies
        return "/completion", body

    def ask(self, port: int, step: Step) -> list[Answer]:
        whole = child.post(port, *self.request(step), self.patience())
        return self.in_order([whole] if isinstance(whole, dict) else whole)

    def started(self, port: int, step: Step) -> bool:
        slots = child.get(port, "/slots", self.patience())
        return any(one["is_processing"] for one in slots if step.slot in (None, one["id"]))

    def in_order(self, whole: list[dict[str, Any]]) -> list[Answer]:
        whole.sort(key=lambda one: one.get("index", 0))
        return [Answer(one["tokens"], one["timings"]["cache_n"]) for one in whole]

    def verb(self, port: int, step: Step) -> None:
        child.post(port, *self.request(step), self.patience())

    def truth(self, port: int, prompt: Tokens, n: int) -> Answer:
        body = {**self.body(prompt, n), "cache_prompt": False, "n_probs": 4}
        whole = child.post(port, "/completion", body, self.patience())
        # A token that ends within a character of UTF-8 has no entry here. Where an id has as many entries as it was
        # said, they are those tokens' in their order.
        entries: dict[int, list[float]] = {}
        for one in whole.get("completion_probabilities", []):
            best = [(top["id"], top["logprob"]) for top in one["top_logprobs"]]
            entries.setdefault(one["id"], []).append(gap_of(one["id"], best))
        said = collections.Counter(whole["tokens"])
        told = {token for token, gaps in entries.items() if len(gaps) == said[token]}
        gaps = [entries[token].pop(0) if token in told else None for token in whole["tokens"]]
        return Answer(whole["tokens"], whole["timings"]["cache_n"], gaps)

    def gap(self, port: int, prompt: Tokens, token: int) -> float:
        """A lower bound: with its logit reduced by the gap, the token is still the best one."""
        for lead in (1.0, 0.3, 0.1, 0.03):
            body = {**self.body(prompt, 1), "cache_prompt": False, "logit_bias": [[token, -lead]]}
            if child.post(port, "/completion", body, self.patience())["tokens"] == [token]:
                return lead
        return 0.0


def gap_of(chosen: Any, best: list[tuple[Any, float]]) -> float:
    """The lead of a token over the best one below it. Tokens above it were forbidden (the end of the text)."""
    ranked = sorted(best, key=lambda one: -one[1])
    at = next((k for k, one in enumerate(ranked) if one[0] == chosen), None)
    if at is None or at + 1 == len(ranked):
        return 0.0
    return ranked[at][1] - ranked[at + 1][1]


# --- Servers with OpenAI's completions --------------------------------------------------------------------------------


class OpenAI(Engine):
    """Any server with /v1/completions, started by a command with {port} and {model}.

    Prompts are token ids where the server answers with `token_ids` (vLLM does, where `return_token_ids` asks), or with
    `text`, where each character stands for a token: then its count of cached tokens says nothing and is not judged.
    """

    name = "openai"
    fields = {"texts": Field(False, (False,))}
    ready_path = "/v1/models"
    start_seconds = 300.0

    def words(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        return self.filled(self.program, config, port)

    def truth_words(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        return self.filled(self.truth_program, config, port)

    def filled(self, program: str, config: Config, port: int) -> list[str]:
        return [word.replace("{port}", str(port)).replace("{model}", config["model"]) for word in shlex.split(program)]

    def start(self, config: Config, folder: pathlib.Path, truth: bool = False) -> child.Child:
        self.texts = bool(config["texts"])
        return super().start(config, folder, truth)

    def body(self, prompt: Tokens, n: int) -> dict[str, Any]:
        sent: Any = "".join(map(chr, prompt)) if self.texts else prompt
        return {"model": "", "prompt": sent, "max_tokens": n, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}

    outputs_source = '''def outputs(answer):
    choice = answer["choices"][0]
    return [choice.get("token_ids") or choice["text"]]
'''
    alone_source = "body"

    def program_size(self) -> int:
        return 0

    def request(self, step: Step) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", self.body(step.prompts[0], step.n)

    def ask(self, port: int, step: Step) -> list[Answer]:
        whole = child.post(port, *self.request(step), self.patience())
        choice = whole["choices"][0]
        if self.texts:
            return [Answer([ord(letter) for letter in choice["text"]])]
        if choice.get("token_ids") is None:
            raise child.Refused("the answer has no token_ids: search it with --config texts=yes")
        details = whole.get("usage", {}).get("prompt_tokens_details") or {}
        return [Answer(choice["token_ids"], details.get("cached_tokens") or 0)]

    def truth(self, port: int, prompt: Tokens, n: int) -> Answer:
        whole = child.post(port, "/v1/completions", {**self.body(prompt, n), "logprobs": 4}, self.patience())
        choice = whole["choices"][0]
        says = choice["logprobs"]
        gaps: list[float | None] = [gap_of(token, list(best.items()))
                                    for token, best in zip(says["tokens"], says["top_logprobs"])]
        if not self.texts:
            return Answer(choice["token_ids"], 0, gaps)
        letters = itertools.chain.from_iterable([gap] * len(token) for token, gap in zip(says["tokens"], gaps))
        return Answer([ord(letter) for letter in choice["text"]], 0, list(letters))


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Llama, OpenAI)}
