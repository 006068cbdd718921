"""The settings file of `lockstep nightly` and `lockstep sweep`: an INI file with one section for each search."""
from __future__ import annotations

import codecs
import configparser
import pathlib
import re
import shlex
from dataclasses import dataclass, field

from lockstep.hosting import serve_command
from lockstep.server.engines import ENGINES

CANARY = "sglang-no-buffer:frees-donated-slot"
GENERAL = ("nightly", "sweep")  # sections that are no searches


class SettingsError(Exception):
    """Bad settings: one sentence with file, section and field."""


def sentence_of(error: Exception) -> str:
    """The sentence about an error; one of the system is told as its path and its reason."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


@dataclass
class Target:
    """One search."""

    name: str
    subject: str = ""  # empty: all policies, each beside its oracle
    server: str = ""  # or the arguments of `lockstep server search`
    beside: list[str] = field(default_factory=list)
    config: str = ""
    weight: float = 1.0
    timeout: float = 10.0
    optional: bool = False

    def words(self) -> list[str]:
        """The program's arguments that name the subjects."""
        named = [word for name in [*self.beside, self.subject] if name for word in ("--subject", subject_word(name))]
        return named + (["--config", self.config] if self.config else [])


def subject_word(name: str) -> str:
    """The word for --subject: a Python target becomes the command of the child that serves it."""
    if ":" not in name or name.startswith(("exec:", "oracle:")):
        return name
    return serve_command(*name.split())


class Sections(dict[str, dict[str, str]]):
    """The fields of each section of a file."""

    def __init__(self, path: pathlib.Path, text: str, parser: configparser.ConfigParser) -> None:
        super().__init__({section: dict(parser[section]) for section in parser.sections()})
        self._path, self._text = path, text

    def refused(self, section: str, error: ValueError) -> SettingsError:
        """The error with its line: that of the field with which the sentence begins, or else that of the section."""
        field = re.match(r"(?:there is no field `)?([^:`]*)", str(error))[1]  # type: ignore[index]
        line, within = "", ""
        for at, text in enumerate(self._text.split("\n"), 1):
            text = re.split(r"(?:^|\s);", text)[0].strip()
            if heading := configparser.ConfigParser.SECTCRE.match(text):
                within = heading["header"]
                line = f":{at}" if within == section else line
            elif within == section and re.split(r"[=:]", text)[0].strip().lower() == field:
                line = f":{at}"
        return SettingsError(f"{self._path}{line}: [{section}] {error}")


def sections_of(path: pathlib.Path) -> Sections:
    """The fields of each section. A SettingsError names the file and the line."""
    parser = configparser.ConfigParser(inline_comment_prefixes=(";",), interpolation=None)
    try:
        data = path.read_bytes()
        if data.startswith(codecs.BOM_UTF8):
            raise SettingsError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
        text = data.decode("utf-8")
        parser.read_string(text)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{path}:{line}: byte {data[error.start]:#04x} is not UTF-8") from None
    except configparser.DuplicateOptionError as error:
        raise SettingsError(f"{path}:{error.lineno}: [{error.section}] {error.option} stands twice") from None
    except configparser.DuplicateSectionError as error:
        raise SettingsError(f"{path}:{error.lineno}: [{error.section}] stands twice") from None
    except configparser.MissingSectionHeaderError as error:
        raise SettingsError(f"{path}:{error.lineno}: `{str(error.line).strip()}` stands before the first [section]") from None
    except configparser.ParsingError as error:
        line = error.errors[0][0]
        raise SettingsError(f"{path}:{line}: `{text.splitlines()[line - 1].strip()}` is not a field like seconds = 60") from None
    return Sections(path, text, parser)


def number(values: dict[str, str], name: str, default: float) -> float:
    text = values.pop(name, str(default))
    try:
        taken = float(text)
    except ValueError:
        taken = -1.0
    if not 0 < taken < float("inf"):
        raise ValueError(f"{name}: `{text}` is not a positive number")
    return taken


def whole_number(values: dict[str, str], name: str, default: int) -> int:
    taken = number(values, name, default)
    if taken != int(taken):
        raise ValueError(f"{name}: `{taken}` is not a whole number")
    return int(taken)


def expect_nothing_else(values: dict[str, str], known: str) -> None:
    for name in values:
        raise ValueError(f"there is no field `{name}`; the fields are {known}")


def canaries_of(values: dict[str, str]) -> list[str]:
    named = values.pop("canary", CANARY).replace(",", " ").split()
    if not named:
        raise ValueError("canary: a search without one proves nothing")
    return named


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("a name has letters, digits, `.`, `_` and `-`")


def target_of(name: str, values: dict[str, str], more: str = "") -> Target:
    """The search of a section. `more`: fields that the caller has taken already, for the sentence about an unknown one."""
    check_name(name)
    optional = values.pop("optional", "no")
    if optional not in ("yes", "no"):
        raise ValueError(f"optional: `{optional}` is neither yes nor no")
    target = Target(name, subject=values.pop("subject", ""), server=values.pop("server", ""), config=values.pop("config", ""),
                    beside=[one.strip() for one in values.pop("beside", "").split(",") if one.strip()],
                    weight=number(values, "weight", 1), timeout=number(values, "timeout", 10),
                    optional=optional == "yes")
    if target.beside and not target.subject:
        raise ValueError("beside: there is no subject to stand beside it")
    if target.server and (target.subject or target.config):
        raise ValueError("server: its words say everything, so neither subject nor config stands beside it")
    try:
        engine = next(iter(shlex.split(target.server)), "")
    except ValueError as error:
        raise ValueError(f"server: {error}") from None
    if target.server and engine not in ENGINES:
        raise ValueError(f"server: `{engine}` is no engine: {', '.join(sorted(ENGINES))}")
    expect_nothing_else(values, "subject, beside, server, config, weight, timeout, optional" + more)
    return target
