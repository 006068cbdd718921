"""python -m lockstep.serve TARGET [WORD...]: a Subject as the child of `lockstep --subject 'exec:…'`.

TARGET is module:Class or path/file.py:Class. For each trace, the class is called with the configuration and the words.
Its printed output goes to standard error. If `lockstep.explore` has started the program, the class that explore was
called with answers, in the process of explore.
"""
from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.session import Factory

HANDOVER = "LOCKSTEP_SERVE_SOCKET"  # number of the inherited socket; set by lockstep.hosting


class TargetError(Exception):
    """A target is no subject; the text says why in one sentence."""


def load(target: str) -> type:
    """Loads the class that `module:Class` or `path/file.py:Class` names. TargetError if there is none."""
    import importlib
    home, colon, name = target.rpartition(":")
    if not colon or not home or not name:
        raise TargetError(f"`{target}` is neither module:Class nor path/file.py:Class")
    if "<locals>" in name:
        raise TargetError(f"{name} is defined inside a function: only lockstep.explore and lockstep.replay, called "
                          "there, can play it")
    if home.endswith(".py"):
        path = os.path.abspath(home)
        if not os.path.isfile(path):
            raise TargetError(f"there is no file {home}")
        folder, module = os.path.dirname(path), os.path.basename(path)[:-3]
        while os.path.isfile(os.path.join(folder, "__init__.py")):  # a package is imported from above it
            folder, package = os.path.split(folder)
            module = f"{package}.{module}"
        sys.path.insert(0, folder)
    else:
        module = home
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
    found: object = importlib.import_module(module)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise TargetError(f"{home} has no `{name}`") from None
    if not callable(found):
        raise TargetError(f"`{name}` of {home} is no class")
    return found  # type: ignore[return-value]


def serve(factory: Factory, lines: int, answers: int) -> None:
    """Reads lines from the descriptor `lines` and writes their answers to the descriptor `answers`, until the lines end."""
    from lockstep.session import Session
    session = Session(factory)
    with open(lines, "rb", closefd=False) as source, open(answers, "wb", buffering=0, closefd=False) as target:
        for line in source:
            answer = session.answer(line.decode("utf-8", "replace").rstrip("\n"))
            if answer.startswith("raised=") and session.error is not None:
                import traceback
                traceback.print_exception(session.error)
            target.write(answer.encode("utf-8", "replace") + b"\n")


def hand_over(words: list[str]) -> int | None:
    """Gives standard input and output to the process that called explore or replay, and waits for its end.

    Returns the exit status; None if that process has no subject with these words.
    """
    import array
    import socket
    ours, theirs = os.pipe()
    with socket.socket(fileno=os.dup(int(os.environ[HANDOVER]))) as control:
        streams = array.array("i", [0, 1, theirs])
        control.sendmsg(["\0".join(words).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    os.close(theirs)
    if os.read(ours, 1) != b"s":
        os.close(ours)
        return None
    os.read(ours, 1)  # returns when the other side closes the socket
    return 0


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 0 if words else 2
    if HANDOVER in os.environ:
        status = hand_over(words)
        if status is not None:
            return status
    try:
        made = load(words[0])
    except TargetError as error:
        print(f"lockstep.serve: {error}", file=sys.stderr)
        return 2
    answers = os.dup(1)
    os.dup2(2, 1)  # printed output of a subject must not become an answer
    serve(lambda config: made(config, *words[1:]), 0, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
