"""Finds the program `lockstep`, and is the console script that becomes it."""
from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import signal
import sys
from typing import Callable

_PR_SET_PDEATHSIG = 1  # prctl(2)


def path() -> str:
    """LOCKSTEP_PROGRAM, the program of this package, that of this checkout, or the one on the PATH.

    FileNotFoundError, with a sentence, where there is none.
    """
    named = os.environ.get("LOCKSTEP_PROGRAM")
    here = pathlib.Path(__file__).resolve().parent
    candidates = [pathlib.Path(named)] if named else [here / "bin" / "lockstep"]
    if not named and (here.parents[2] / "CMakeLists.txt").is_file():
        candidates.append(here.parents[2] / "build" / "current" / "lockstep")
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = None if named else shutil.which("lockstep")
    if found is None or _is_console_script(found):
        raise FileNotFoundError(
            f"LOCKSTEP_PROGRAM is {named}, which is no program" if named else
            "the program lockstep is not here: `pip install .` builds it, and LOCKSTEP_PROGRAM names one that is there")
    return found


def bound_to_us() -> Callable[[], None]:
    """A function for a child to call before its exec: the child gets TERM when this process ends, even by SIGKILL."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return bind


def _is_console_script(found: str) -> bool:
    with open(found, "rb") as file:
        return file.read(2) == b"#!"


def main() -> None:
    """Runs `lockstep nightly`, `server` and `sweep` in Python; for any other command, this process becomes the program."""
    if sys.argv[1:2] == ["nightly"]:
        from lockstep import nightly
        sys.exit(nightly.main(sys.argv[2:]))
    if sys.argv[1:2] == ["server"]:
        from lockstep.server import command
        sys.exit(command.main(sys.argv[2:]))
    if sys.argv[1:2] == ["sweep"]:
        from lockstep.sweep import command as sweep
        sys.exit(sweep.main(sys.argv[2:]))
    try:
        program = path()
    except FileNotFoundError as error:
        sys.exit(f"lockstep: {error}")
    os.execv(program, [program, *sys.argv[1:]])
