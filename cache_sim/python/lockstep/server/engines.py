"""How a kind of server is started, asked and slowed down to the truth. A new kind is a class here."""
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
    """To one prompt. ValueError where a server says what can be none."""

    output: Tokens
    cached: int = 0
    gaps: list[float | None] = field(default_factory=list)  # of a truth: by how much each logit led; None: not told

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
    """Of a configuration: the value that leaves the feature out, and those that are drawn (repeated: more often)."""

    off: Any
    values: tuple[Any, ...]


#: Fields of every engine, which say what clients do.
CLIENTS = {
    "clients": Field(1, (1, 1, 2, 3, 4)),  # requests under way at the same time
    "long": Field(False, (False, True)),  # some answers are of 80 tokens, and others come meanwhile
}


class Engine:
    """What is common to them; an answer has `timeout` seconds, and none is waited for after `end` (of time.monotonic)."""

    name = ""
    fields: dict[str, Field] = {}
    known: dict[str, Rule] = {}  # a reported bug: what in a configuration keeps it away
    tells_start = False  # started() knows
    ready_path = "/health"
    start_seconds = 60.0
    end = math.inf

    def __init__(self, program: str, models: list[str], vocabulary: tuple[int, int], timeout: float,
                 truth_program: str = "", reset: str = "") -> None:
        self.program, self.models, self.vocabulary, self.timeout = program, models, vocabulary, timeout
        self.truth_program, self.reset = truth_program, reset
        self.waiting: dict[tuple[str, ...], child.Child] = {}  # servers that a reset can empty, by their command

    def draw(self, rng: random.Random, fixed: Config) -> Config:
        """A configuration; the fields of `fixed` stay as they are."""
        config: Config = {name: rng.choice(one.values) for name, one in (CLIENTS | self.fields).items()}
        config["model"] = rng.choice(self.models)
        self.favour({**config, **fixed}, config, rng)
        config.update(fixed)
        self.repair(config, fixed)
        return config

    def favour(self, whole: Config, config: Config, rng: random.Random) -> None:
        """Draws fields of `config` again that matter together; `whole` has what is fixed, too."""

    def repair(self, config: Config, fixed: Config) -> None:
        """Makes fields fit each other."""

    def words(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        raise NotImplementedError

    def truth_words(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        """A server that reuses nothing: it is asked one thing after the other."""
        raise NotImplementedError

    environment: dict[str, str] = {}

    def patience(self) -> float:
        """Seconds for the next answer."""
        return max(0.001, min(self.timeout, self.end - time.monotonic()))  # 0 would be none at all

    def start(self, config: Config, folder: pathlib.Path, truth: bool = False) -> child.Child:
        """A server with an empty cache: a new process, or one that was released and can be reset."""
        waiting = None if truth else self.waiting.pop(tuple(self.words(config, 0, folder)), None)
        if waiting is not None and not waiting.died():
            try:
                child.post(waiting.port, self.reset, {}, self.patience())
            except BaseException:
                waiting.stop()
                raise
            return waiting
        for last in (False, True):  # another process can have taken the port meanwhile
            port = child.free_port()
            words = (self.truth_words if truth else self.words)(config, port, folder)
            server = child.Child(words, port, folder / ("truth.log" if truth else "server.log"), self.environment)
            try:
                server.wait_ready(self.ready_path, min(self.start_seconds, max(0.0, self.end - time.monotonic())))
                return server
            except child.NoServer:
                if last:
                    raise
        raise AssertionError

    def release(self, server: child.Child, config: Config, folder: pathlib.Path, usable: bool) -> None:
        """The life is over."""
        if self.reset and usable and not server.died():
            self.waiting[tuple(self.words(config, 0, folder))] = server
        else:
            server.stop()

    def close(self) -> None:
        for server in self.waiting.values():
            server.stop()
        self.waiting.clear()

    def program_size(self) -> int:
        """Words of the command that are the program's name, which a reader of a reproduction puts elsewhere."""
        return len(shlex.split(self.program))

    def request(self, step: Step) -> tuple[str, dict[str, Any]]:
        """Path and body of the POST that is a step."""
        raise NotImplementedError

    #: For reproductions: Python that reads the tokens of each answer, and that makes the body of the same prompt alone.
    outputs_source = ""
    started_source = "def started(port, body):\n    return True\n"
    alone_source = ""

    def ask(self, port: int, step: Step) -> list[Answer]:
        """Answers in the order of step.answers()."""
        raise NotImplementedError

    def started(self, port: int, step: Step) -> bool:
        """Whether the server is answering the step."""
        return True

    def verb(self, port: int, step: Step) -> None:
        raise NotImplementedError

    def truth(self, port: int, prompt: Tokens, n: int) -> Answer:
        raise NotImplementedError

    def gap(self, port: int, prompt: Tokens, token: int) -> float:
        """By how much the token after the prompt leads, or a smaller number, where truth() has not told it."""
        return 0.0


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def has_drafts(model: str) -> bool:
    """Whether a model brings a block that drafts (multi-token prediction): its header says so."""
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
    """llama-server, by its native API: one checkpoint of the recurrent state a slot, a host cache of whole slots, drafts."""

    name = "llama"
    tells_start = True
    environment = {"GGML_NO_BACKTRACE": "1"}  # or an abort starts a debugger
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
            config["drafts"] = "draft-mtp"  # few models can
        if config["clients"] > 1 and rng.random() < 0.5:
            config["clients"] = whole["slots"] + rng.randrange(2)  # all slots at work, or one request too many

    def repair(self, config: Config, fixed: Config) -> None:
        if config["drafts"] == "draft-mtp" and not has_drafts(config["model"]) and "drafts" not in fixed:
            config["drafts"] = "none"
        if config["drafts"] == "draft-mtp" and "small_batch" not in fixed:
            config["small_batch"] = False  # the release ends at its start then, by an assertion
        if config["slots"] == 1 and "copies" not in fixed:
            config["copies"] = False  # a copy needs a slot of its own

    def common(self, config: Config, port: int, folder: pathlib.Path) -> list[str]:
        # float32 without flash attention: what is left of rounding is far below the smallest gap that counts.
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
        if drafts.startswith("ngram"):  # a draft of three tokens wherever two were seen before
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
        """Made worse by this much, the token is still the best one."""
        for lead in (1.0, 0.3, 0.1, 0.03):
            body = {**self.body(prompt, 1), "cache_prompt": False, "logit_bias": [[token, -lead]]}
            if child.post(port, "/completion", body, self.patience())["tokens"] == [token]:
                return lead
        return 0.0


def gap_of(chosen: Any, best: list[tuple[Any, float]]) -> float:
    """By how much a token led: what lies above it was forbidden (the end of the text)."""
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
