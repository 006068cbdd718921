"""lockstep server: sends random requests to a server, and compares its answers with those from an empty cache.

    lockstep server search llama --program llama-server --model tiny.gguf [--model …] [OPTION…]
    lockstep server search openai --program 'CMD {port} {model}' --truth 'CMD --no-cache {port} {model}' [OPTION…]
    lockstep server replay FILE.json [--program …]
"""
from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import signal
import sys
import tempfile
from typing import Any

from lockstep.counted import counted
from lockstep.help import Parser, end_help
from lockstep.server.child import NoServer, Refused
from lockstep.server.engines import CLIENTS, ENGINES, Engine
from lockstep.server.life import play
from lockstep.server.search import Options, Search, summary_text
from lockstep.server.steps import BadFile, Config, Kept, printable
from lockstep.server.truth import TruthDiffers, Truths
from lockstep.server.verdict import judge


class BadWords(Exception):
    """The command line cannot be understood; the text is one sentence."""


STATUSES = {0: "nothing found", 2: "bad usage, or a file that cannot be understood",
            3: "the environment: the server does not start, or is gone", 11: "a finding",
            13: "the server without reuse answered a prompt twice, and differently", 130: "interrupted"}
TOY = "'python3 fixtures/subjects/toy_server.py --port {port}"  # the server of the help's example


def parser() -> argparse.ArgumentParser:
    words = Parser(prog="lockstep server", description=__doc__)
    actions = words.add_subparsers(dest="action", required=True)
    add_search(actions.add_parser("search", help="random requests; findings are shrunk and written"))
    add_replay(actions.add_parser("replay", help="play a kept finding; 11 where it is there, 0 where it is not"))
    end_help(words, STATUSES, example("--requests 100"))
    return words


def example(words: str) -> str:
    return f"lockstep server search openai --program {TOY}' --truth {TOY} --no-cache' {words}"


def add_search(search: argparse.ArgumentParser) -> None:
    search.add_argument("engine", choices=sorted(ENGINES), help="the API: llama-server's own, or OpenAI's completions")
    add_server(search)
    search.add_argument("--seed", type=int, default=1, help="decides options and requests (default: %(default)s)")
    search.add_argument("--requests", type=int, default=1000, help="answers to judge (default: %(default)s)")
    search.add_argument("--time", type=float, default=0,
                        help="seconds after which no server is started any more; a start that is under way and the requests of that "
                             "server are not cut short, and shrinking is not counted (default: no limit but --requests)")
    search.add_argument("--findings", type=int, default=0, help="stop after so many different ones (default: none)")
    search.add_argument("--shrink-time", type=float, default=120, help="seconds for one finding, lives that hang included (default: %(default)s)")
    search.add_argument("--shrink-lives", type=int, default=2000,
                        help="starts of the server for one (default: %(default)s)")
    search.add_argument("--config", default="", help="fields that stay as they are: slots=2,drafts=none (default: none)")
    search.add_argument("--avoid", default="", help="reported bugs whose conditions are not drawn: all, or names with "
                                                    "commas (default: none)")
    search.add_argument("--life", type=int, default=0,
                        help="requests from a start of the server to its end (default: drawn)")
    search.add_argument("--out", type=pathlib.Path, default=pathlib.Path("findings"),
                        help="the folder for findings (default: %(default)s)")
    search.add_argument("--log", type=pathlib.Path, help="write all lives as one log for check-log to this file")
    search.add_argument("--json", type=pathlib.Path, help="write the outcome to this file")
    end_help(search, STATUSES, example("--requests 100"))


def add_replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("file", type=pathlib.Path, help="a finding that a search wrote")
    add_server(replay)
    replay.add_argument("--plays", type=int, default=0, help="at most so many tries (default: as the file says)")
    end_help(replay, STATUSES, f"lockstep server replay findings/wrong-output-1.json --program {TOY}'")


def add_server(words: argparse.ArgumentParser) -> None:
    words.add_argument("--program", default="", help="the server: a command, where {port} and {model} are put in "
                                                     "(default: llama-server; openai has none)")
    words.add_argument("--truth", default="",
                       help="openai: a command for the same server without any reuse (default: none, and it is needed)")
    words.add_argument("--reset", default="", help="openai: POST to this path empties the cache (default: a new process)")
    words.add_argument("--model", action="append", default=[],
                       help="a model's file; one is drawn for each life (default: none, and llama needs one)")
    words.add_argument("--vocabulary", default="",
                       help="LOW:HIGH, token ids of prompts (default: 3:320; of texts 97:123)")
    words.add_argument("--timeout", type=float, default=20, help="seconds for an answer (default: %(default)s)")
    words.add_argument("--gap", type=float, default=0.02,
                       help="a difference where the truth leads by less is no finding (default: %(default)s)")


def engine_of(name: str, words: argparse.Namespace, texts: bool) -> Engine:
    if name not in ENGINES:
        raise BadWords(f"`{name}` is no engine: {', '.join(sorted(ENGINES))}")
    program = words.program or {"llama": "llama-server"}.get(name, "")
    if not program:
        raise BadWords(f"{name} needs --program, the command that starts the server")
    if name == "openai" and not words.truth:
        raise BadWords("openai needs --truth, a command for the same server without any reuse")
    for option, command in (("--program", program), ("--truth", words.truth)):
        try:
            shlex.split(command)
        except ValueError as error:
            raise BadWords(f"{option} `{command}`: {error}") from None
    low, colon, high = (words.vocabulary or ("97:123" if texts else "3:320")).partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise BadWords(f"--vocabulary {words.vocabulary} is not LOW:HIGH")
    return ENGINES[name](program, words.model or [""], (int(low), int(high)), words.timeout, words.truth,
                         words.reset)


def value_of(text: str) -> Any:
    if text in ("yes", "no"):
        return text == "yes"
    return int(text) if text.isdigit() else text


def config_of(name: str, text: str) -> Config:
    known = CLIENTS | ENGINES[name].fields
    config: Config = {}
    for word in filter(None, text.split(",")):
        field, equals, value = word.partition("=")
        if field not in known or not equals:
            raise BadWords(f"--config: `{word}` is not FIELD=VALUE with one of the fields {', '.join(known)}")
        config[field] = value_of(value)
    return config


def avoided(engine: Engine, text: str) -> list[str]:
    names = sorted(engine.known) if text == "all" else list(filter(None, text.split(",")))
    for name in names:
        if name not in engine.known:
            raise BadWords(f"--avoid: there is no `{name}`; the names are {', '.join(sorted(engine.known)) or 'none'}")
    return names


def search(words: argparse.Namespace) -> int:
    fixed = config_of(words.engine, words.config)
    engine = engine_of(words.engine, words, bool(fixed.get("texts")))
    if words.engine == "llama" and not words.model:
        raise BadWords("llama needs --model, a model's file")
    options = Options(words.seed, words.requests, words.time, words.findings, words.shrink_time,
                      words.shrink_lives, words.gap, fixed,
                      avoided(engine, words.avoid), words.life, words.out, words.log)
    if options.log is not None:
        options.log.write_text("")
    outcome = Search(engine, options).run()
    print(summary_text(outcome, words.seed))
    if words.json is not None:
        words.json.write_text(json.dumps({"seed": words.seed, **outcome.json()}, indent=1) + "\n")
    return 11 if outcome.found else 130 if outcome.stopped else 0


def replay(words: argparse.Namespace) -> int:
    kept = Kept.read(words.file)
    engine = engine_of(kept.engine, words, bool(kept.config.get("texts")))
    if words.model:
        kept.config["model"] = words.model[0]
    with tempfile.TemporaryDirectory(prefix="lockstep-server-") as name:
        folder = pathlib.Path(name)
        truths = Truths(engine, folder)
        try:
            plays = words.plays or kept.plays
            for _ in range(plays):
                found = judge(play(engine, kept.config, kept.steps, folder), truths.of(kept.config), folder, words.gap)
                for one in found.findings:
                    print(f"{one.kind}: {one.step or 'the server'}: {one.text}")
                if found.findings:
                    return 11
        finally:
            truths.close()
            engine.close()
    print(f"{words.file}: nothing found in {counted(plays, 'play')}")
    return 0


def main(words: list[str]) -> int:
    read = parser().parse_args(words)
    for one in (signal.SIGINT, signal.SIGTERM):  # servers end with the search, however it ends
        signal.signal(one, signal.default_int_handler)
    try:
        for name, value in vars(read).items():
            if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
                raise BadWords(f"--{name.replace('_', '-')} {value} is not a number from 0 on")
        if read.timeout == 0:
            raise BadWords("--timeout 0 leaves no time for an answer")
        return search(read) if read.action == "search" else replay(read)
    except (BadWords, BadFile) as error:
        print(f"lockstep server: {printable(str(error))}", file=sys.stderr)
        return 2
    except (NoServer, FileNotFoundError, Refused, OSError) as error:
        print(f"lockstep server: {printable(str(error))}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    except TruthDiffers as error:
        print(f"lockstep server: {printable(str(error))}", file=sys.stderr)
        return 13
