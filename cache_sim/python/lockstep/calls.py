"""Runs the program for searches that are made of many of its runs, and reads what it wrote: for `nightly` and `sweep`."""
from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import shlex
import subprocess
from typing import Any

from lockstep import program
from lockstep.hosting import children_environment

FOUND = range(10, 14)  # exit statuses of a run with a finding
GRACE = 10.0  # seconds for a program that was asked to end


class OverLimit(Exception):
    """The program had not ended within its time."""


def run(words: list[str], base: pathlib.Path, limit: float | None = None, program_path: str = "", memory: int = 0,
        **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `lockstep WORDS…`, or another program, in the folder `base`, for `limit` seconds at most: then it is ended with
    its children, and OverLimit is raised. It has an address space of `memory` bytes; 0: as large as it may be."""
    bind = program.bound_to_us()

    def prepare() -> None:
        bind()
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    with subprocess.Popen([program_path or program.path(), *words], cwd=base, env={**children_environment(), **environment},
                          stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                          preexec_fn=prepare) as process:
        try:
            output, complaint = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            for ask in (process.terminate, process.terminate, process.kill):
                ask()
                try:
                    process.communicate(timeout=GRACE / 2)
                    break
                except subprocess.TimeoutExpired:
                    pass
            raise OverLimit from None
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, complaint)


def run_for_json(words: list[str], base: pathlib.Path, folder: pathlib.Path, limit: float | None = None,
                 **more: Any) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The finished process and its JSON; None if it wrote none. `folder` is for this run alone."""
    path = folder / "run.json"
    ran = run([*words, "--json", str(path)], base, limit, **more)
    return ran, json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def last_line(ran: subprocess.CompletedProcess[str]) -> str:
    """The program's last sentence on standard error."""
    lines = [line for line in ran.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("lockstep: ") if lines else ""


def words_of(replay: str) -> list[str]:
    """The arguments of a replay command after the file, which name its subjects."""
    return shlex.split(replay)[3:]


_CHILD = re.compile(r"child `[^`]*`|exec:.*?(?= answered| says| and |$)")
_PLACE = re.compile(r" \(\S*:\d+, in \w+\)")
_TOKENS_OR_NUMBER = re.compile(r"(?:[a-z]*\d[\w:]*|\[[\d,]*\])(?:\+(?:[a-z]*\d[\w:]*|\[[\d,]*\]))*")


def signature(kind: str, text: str) -> str:
    """The common part of findings with one cause: the kind, and the sentence without numbers, tokens and places."""
    return f"{kind}: " + _TOKENS_OR_NUMBER.sub("#", _PLACE.sub("", _CHILD.sub("the child", text)))


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replaces the file, so that it has the old or the new text whenever the process or the machine ends."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
