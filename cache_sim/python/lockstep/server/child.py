"""A server as a child process, and plain HTTP to it."""
from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
from typing import Any


SIZE_MAX = 64 << 20  # bytes of an answer


class NoServer(Exception):
    """No server runs; the text says why in one sentence."""

    crashed = False  # True: the server was started, and a signal ended it
    slow = False  # True: it runs, and was not ready in time


class Refused(Exception):
    """The server answered with an error, or with another content than the requested one."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Child:
    """A server process. It runs from construction to stop(); its output goes to `log`."""

    def __init__(self, words: list[str], port: int, log: pathlib.Path, environment: dict[str, str]) -> None:
        self.port, self.log, self.words = port, log, words
        try:
            with log.open("wb") as out:
                self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                                env={**os.environ, **environment}, start_new_session=True)
        except OSError as error:
            raise NoServer(f"{words[0]} does not start: {error.strerror}") from None

    def wait_ready(self, path: str, seconds: float) -> None:
        """Waits until GET path is answered with 200."""
        end = time.monotonic() + seconds
        while True:
            if (status := self.process.poll()) is not None:
                reason = NoServer(f"{' '.join(self.words)} ended with {status}: {self.last_line()}")
                reason.crashed = status < 0
                raise reason
            try:
                exchange(self.port, "GET", path, None, 1)
                return
            except (OSError, http.client.HTTPException, Refused):
                if time.monotonic() > end:
                    self.stop()
                    reason = NoServer(f"{' '.join(self.words)} is not ready after {seconds:.0f} s: {self.last_line()}")
                    reason.slow = True
                    raise reason from None
                time.sleep(0.01)

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")

    def died(self) -> str:
        """The reason why the process ended; empty while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        return f"ended by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def get(port: int, path: str, timeout: float) -> Any:
    """The JSON of the answer to a GET."""
    return json.loads(exchange(port, "GET", path, None, timeout))


def post(port: int, path: str, body: dict[str, Any], timeout: float) -> Any:
    return json.loads(exchange(port, "POST", path, json.dumps(body), timeout))


def exchange(port: int, method: str, path: str, body: str | None, timeout: float) -> str:
    """The text of the answer, which must be complete within `timeout` seconds. Refused if the status is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    late = threading.Event()

    def give_up() -> None:
        late.set()
        with contextlib.suppress(OSError):  # the connection has ended meanwhile
            stream.shutdown(socket.SHUT_RDWR)

    clock = threading.Timer(timeout, give_up)  # the timeout of the connection holds for each piece alone
    try:
        connection.connect()
        stream = connection.sock
        clock.start()
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        said = answer.read(SIZE_MAX + 1)
        if late.is_set():
            raise TimeoutError
        if len(said) > SIZE_MAX:
            raise http.client.HTTPException(f"more than {SIZE_MAX >> 20} MiB")
        if answer.length:
            raise http.client.IncompleteRead(said[:60], answer.length)
        text = said.decode("utf-8", "replace")
        if answer.status != 200:
            raise Refused(f"HTTP {answer.status}: {text[:200]}")
        return text
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(f"{path} has no answer within {timeout:g} s") from None
        raise
    finally:
        clock.cancel()
        connection.close()
