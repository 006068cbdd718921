"""Runs the program with subjects that live in this process.

The program starts `python -m lockstep.serve TARGET` as for any child. Started below a Host, that process hands its
standard input and output over a socket to the Host and waits, so this process reads the program's lines and answers
them: classes defined in a test or in a function work, breakpoints and coverage work, and exceptions keep their
traceback. One thread does it all: the one that called `run`.
"""
from __future__ import annotations

import array
import contextlib
import ctypes
import io
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple, Sequence

from lockstep import program
from lockstep.serve import HANDOVER
from lockstep.session import Factory, Overdue, Session

_READ_SIZE = 1 << 16
_LINE_MAX = 1 << 16  # bytes of the arguments that a child hands over
_GRACE = 0.5  # seconds between the program's timeout and the interruption of the method


class Ran(NamedTuple):
    """The result of a run of the program."""

    status: int
    output: str
    complaint: str  # its standard error
    error: BaseException | None  # the last exception of a subject
    hang: str  # the place in a method that did not answer in time; empty: none
    unsupported: dict[str, str]  # the texts of Unsupported, by verb


def python_word() -> str:
    """The command of this Python in traces: `python3` if that is this Python, otherwise its path."""
    found = shutil.which("python3")
    same = found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)
    return "python3" if same else sys.executable


def serve_command(*words: str) -> str:
    """The command of a child that serves a target with these arguments."""
    return "exec:" + shlex.join([python_word(), "-m", "lockstep.serve", *words])


def children_environment() -> dict[str, str]:
    """The environment in which `python -m lockstep.serve` finds this package."""
    source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def target_of(factory: Factory) -> str:
    """`path/file.py:Class` or `module:Class`, so that a trace names the class in a way that can be played again."""
    made: Any = factory
    while hasattr(made, "func"):  # functools.partial
        made = made.func
    name = getattr(made, "__qualname__", type(made).__qualname__)
    module = getattr(made, "__module__", None) or "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or "site-packages" in file.split(os.sep):
        return f"{module}:{name}"
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{name}"


class _Channel:
    """A child of the program that has handed its standard input and output over to this process."""

    def __init__(self, streams: Sequence[int], factory: Factory) -> None:
        self.lines, self.answers, self.life = streams
        self.session = Session(factory)
        self.rest = b""
        os.write(self.life, b"s")

    def close(self) -> None:
        for stream in (self.lines, self.answers, self.life):
            os.close(stream)


class _Watch:
    """Interrupts a method that has not answered within `seconds`, by raising Overdue in it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread = threading.get_ident()
        self._in_main = threading.current_thread() is threading.main_thread()
        self._since: float | None = None
        self._stop = threading.Event()
        self._before: Any = None

    def __enter__(self) -> _Watch:
        if self._in_main:  # a signal also ends a method that sleeps or waits for a lock
            self._before = signal.signal(signal.SIGURG, self._raise)
        self._watcher = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()
        if self._in_main:
            signal.signal(signal.SIGURG, self._before)

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        self._since = None

    def _raise(self, *_: object) -> None:
        if self._since is not None:
            self._since = None
            raise Overdue()

    def _run(self) -> None:
        while not self._stop.wait(min(0.25, self._seconds / 4)):
            since = self._since
            if since is None or time.monotonic() - since < self._seconds:
                continue
            if self._in_main:
                signal.pthread_kill(self._thread, signal.SIGURG)
            else:
                self._since = None
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Overdue))


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


class Host:
    """Subjects of this process under names that the program can be given."""

    def __init__(self) -> None:
        self._factories: dict[tuple[str, ...], Factory] = {}

    def subject(self, factory: Factory) -> str:
        """The word for --subject."""
        words = [target_of(factory)]
        while self._factories.setdefault(tuple(words), factory) is not factory:
            words.append("again")  # two closures with the same name
        return serve_command(*words)

    def names(self) -> dict[str, str]:
        """The names of the classes, by the words for --subject."""
        return {serve_command(*words): re.split(r"[:.]", words[0])[-1] for words in self._factories}

    def run(self, words: Sequence[str], timeout: float, quiet: bool) -> Ran:
        """Runs `lockstep WORDS…` to its end and answers for the subjects meanwhile.

        timeout: seconds that a subject may take for one answer. quiet: what subjects print is dropped.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with ours, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
            environment = {**children_environment(), HANDOVER: str(theirs.fileno())}
            with theirs:
                process = subprocess.Popen([program.path(), *words], stdin=subprocess.DEVNULL, stdout=output,
                                           stderr=complaint, env=environment, pass_fds=[theirs.fileno()])
            serving = _Serving(self._factories, ours, timeout)
            try:
                with contextlib.redirect_stdout(_Nowhere()) if quiet else contextlib.nullcontext():
                    serving.serve_until_end_of(process)
            finally:
                _end(process)  # before its children end, which would be a finding
                serving.close()
            process.wait()
            return Ran(process.returncode, _text_of(output), _text_of(complaint), serving.error, serving.hang,
                       serving.unsupported)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends an interrupted search: at the second signal the program ends, together with all processes that it started."""
    for ask in [process.terminate] * 20 + [process.kill]:
        if process.poll() is not None:
            return
        ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.25)


def _text_of(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode("utf-8", "replace"))


class _Serving:
    def __init__(self, factories: dict[tuple[str, ...], Factory], control: socket.socket, timeout: float) -> None:
        self._factories = factories
        self._control = control
        self._timeout = timeout
        self._channels: dict[int, _Channel] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self.error: BaseException | None = None
        self.hang = ""
        self.unsupported: dict[str, str] = {}

    def serve_until_end_of(self, process: subprocess.Popen[bytes]) -> None:
        ended = os.pidfd_open(process.pid)
        try:
            self._poll.register(ended, select.POLLIN)
            with _Watch(self._timeout + _GRACE) as watch:
                while True:
                    for descriptor, _ in self._poll.poll():
                        if descriptor in self._channels:
                            self._answer(self._channels[descriptor], watch)
                        elif descriptor == ended:
                            return
                        else:
                            self._accept()
        finally:
            os.close(ended)

    def close(self) -> None:
        for channel in list(self._channels.values()):
            self._drop(channel)

    def _accept(self) -> None:
        space = socket.CMSG_SPACE(3 * array.array("i").itemsize)
        words, ancillary, _, _ = self._control.recvmsg(_LINE_MAX, space, socket.MSG_CMSG_CLOEXEC)
        streams = array.array("i")
        for _, _, data in ancillary:
            streams.frombytes(data[:len(data) - len(data) % streams.itemsize])
        factory = self._factories.get(tuple(words.decode().split("\0")))
        if factory is None or len(streams) != 3:  # not a subject of this process: the child loads the target itself
            for stream in streams:
                os.close(stream)
            return
        try:
            channel = _Channel(streams, factory)
        except BrokenPipeError:  # the child has ended
            for stream in streams:
                os.close(stream)
            return
        self._channels[channel.lines] = channel
        self._poll.register(channel.lines, select.POLLIN)

    def _drop(self, channel: _Channel) -> None:
        del self._channels[channel.lines]
        self._poll.unregister(channel.lines)
        channel.close()

    def _answer(self, channel: _Channel, watch: _Watch) -> None:
        data = os.read(channel.lines, _READ_SIZE)
        *lines, channel.rest = (channel.rest + data).split(b"\n")
        session = channel.session
        try:
            for line in lines:
                watch.begin()
                answer = session.answer(line.decode("utf-8", "replace"))
                watch.end()
                _write_all(channel.answers, answer.encode("utf-8", "replace") + b"\n")
        except Overdue as overdue:  # the program has ended the child as silent
            self.error, self.hang = overdue, session.where_it_is(overdue)
            data = b""
        except BrokenPipeError:
            data = b""
        finally:
            watch.end()
        if session.error is not None:
            self.error, session.error = session.error, None
        self.unsupported.update(session.unsupported)
        if not data:
            self._drop(channel)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data):]
