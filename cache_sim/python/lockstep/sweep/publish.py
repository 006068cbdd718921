"""Files that several machines may write at the same time in one shared folder, without a lock or a server.

The first writer wins by link(2), which is atomic on local file systems and on NFS: a file is there whole or not at all.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import socket
import threading
from typing import Any


def text_of(data: Any) -> str:
    """JSON with the same bytes for equal data, on every machine."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), sort_keys=True) + "\n"


def digest_of(data: Any) -> str:
    return hashlib.sha256((data if isinstance(data, str) else text_of(data)).encode()).hexdigest()[:16]


def publish(path: pathlib.Path, text: str) -> bool:
    """Puts the file there whole, and says whether this call did: False if another one was first, whose file stays.

    OSError: the disk is full, or the folder cannot be written; then nothing is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path)
        except FileExistsError:
            # The answer of an NFS server can be lost, so that the link is repeated and says that it is there already.
            return os.path.samefile(part, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def read(path: pathlib.Path) -> Any:
    """The file's data; None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
