"""The subject protocol: each line that is read becomes a call of a Subject's method, and its result the answering line."""
from __future__ import annotations

import inspect
import json
import keyword
import linecache
import os
import pathlib
import sys
import traceback
from typing import Any, Callable, NamedTuple

from lockstep.subject import Config, Refused, Reply, Subject, Unsupported, Violation, Wrong
from lockstep.tokens import parse_tokens

Factory = Callable[[Config], Subject]

_MESSAGE_MAX = 180  # characters of an exception's text; the program shows 300 characters of an answer


class _Field(NamedTuple):
    parameter: str
    read: Callable[[str], Any]
    default: Any = inspect.Parameter.empty  # empty: the field is always there
    ignorable: bool = False


class _Verb(NamedTuple):
    fields: dict[str, _Field]
    number: str = ""  # the reply's field for a plain int
    must: bool = False  # the reply must have it


def _flag(text: str) -> bool:
    return text == "1"


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _images(text: str) -> list[tuple[int, int, str]]:
    """OFFSET:LENGTH:NAME,…"""
    pieces = (piece.split(":", 2) for piece in text.split(",") if piece)
    return [(int(offset), int(length), name) for offset, length, name in pieces]


# The words of the protocol, as `lockstep list verbs --json` writes them (python_package_test.py).
_VOCABULARY = json.loads((pathlib.Path(__file__).parent / "vocabulary.json").read_text())
_READERS: dict[str, Callable[[str], Any]] = {
    "flag": _flag, "images": _images, "name": str, "names": _names, "number": int, "numbers": _numbers, "tokens": parse_tokens}
_DEFAULTS = {"name": "", "number": 0}  # of missing fields, by kind; an empty list for other kinds
_ABSENT = {"prompt", "up_to", "limit", "padded", "rank", "slot"}  # fields that are None if they are missing
_IGNORABLE = {"prompt", "ids", "padded", "prev"}  # a method without these parameters still does the operation
_DEFAULT_FLAGS = {"insert": True}


def _field(row: dict[str, Any]) -> _Field:
    name, kind = row["name"], row["kind"]
    default = inspect.Parameter.empty
    if not row["required"]:
        default = (None if name in _ABSENT else _DEFAULT_FLAGS.get(name, False) if kind == "flag"
                   else _DEFAULTS.get(kind, ()))
    return _Field(name + "_" if keyword.iskeyword(name) or name == "async" else name, _READERS[kind], default,
                  name in _IGNORABLE)


def _verb(row: dict[str, Any]) -> _Verb:
    must = [field["name"] for field in row["answer"] if field["required"]]
    number = must[0] if must else "n" if any(field["name"] == "n" for field in row["answer"]) else ""
    return _Verb({field["name"]: _field(field) for field in row["fields"]}, number, bool(must) and number != "n")


VERBS: dict[str, _Verb] = {row["name"]: _verb(row) for row in _VOCABULARY["verbs"]}


def _needing(capability: str) -> list[tuple[str, str]]:
    """The pairs of verb and field that need the capability."""
    return [(verb["name"], field["name"]) for verb in _VOCABULARY["verbs"] for field in verb["fields"]
            if field["needs"] == capability]


# By word of `takes=`: the fields that a class must ask for.
TAKES = {word["word"]: [field for capability in word["means"] for field in _needing(capability)]
         for word in _VOCABULARY["words"] if word["field"] == "takes"}
# By word of `levels=`: verbs, one of which a class must have.
_LEVELS = {word["word"]: {verb["name"] for verb in _VOCABULARY["verbs"] if verb["needs"] in word["means"]}
           for word in _VOCABULARY["words"] if word["field"] == "levels"}
HONOURS = ("kv_tokens", "state_slots", "page", "request_rows", "blocks", "checkpoint", "modules",
           "shared_prefix_checkpoint")
_OF_BLOCKS = ("block", "hash_block", "retention", "groups", "eagle", "drafts")


class _Known(NamedTuple):
    """A verb and the parameters of one class's method for it."""

    method: str
    readers: dict[str, tuple[str, Callable[[str], Any]]]  # by field: the parameter, and the parser of its value
    ignored: frozenset[str]  # fields that the class ignores
    defaults: dict[str, Any]
    number: str
    must: bool


def _overrides(subject: type, verb: str) -> Callable[..., Any] | None:
    method = getattr(subject, verb, None)
    return None if method is None or method is getattr(Subject, verb) else method


def where(function: Callable[..., Any]) -> str:
    """The place of a function's definition, as `file.py:12`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "unknown place" if code is None else f"{shown_path(code.co_filename)}:{code.co_firstlineno}"


def shown_path(path: str) -> str:
    """The path, relative if it is below the working directory."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _know(subject: type, verb: str, method: Callable[..., Any]) -> _Known:
    fields = VERBS[verb].fields
    parameters = inspect.signature(method).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    by_parameter = {field.parameter for field in fields.values()}
    named = [p for p in list(parameters.values())[1:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for parameter in named:
        if parameter.kind is parameter.POSITIONAL_ONLY or (
                parameter.name not in by_parameter and parameter.default is parameter.empty):
            raise TypeError(
                f"{where(method)}: {subject.__name__}.{verb} has a parameter `{parameter.name}` that nothing is passed "
                f"for; `{verb}` is a verb, whose parameters, by keyword, are {', '.join(sorted(by_parameter)) or 'none'}")
    taken = by_parameter if takes_all else {parameter.name for parameter in named} & by_parameter
    asked = set(taken)
    if verb == "extend":  # drafts and asynchronous steps get their result from another operation
        asked -= {"drafts"} if _overrides(subject, "accept") is None else set()
        asked -= {"async_"} if _overrides(subject, "complete") is None else set()
    required = inspect.Parameter.empty
    return _Known(
        method=verb,
        readers={name: (field.parameter, field.read) for name, field in fields.items() if field.parameter in asked},
        ignored=frozenset(name for name, field in fields.items() if field.ignorable or field.default is required),
        defaults={field.parameter: field.default for field in fields.values()
                  if field.parameter in taken and field.default is not required},
        number=VERBS[verb].number, must=VERBS[verb].must)


class Capabilities:
    """The verbs and fields that a class of subjects overrides. TypeError if a method has a parameter that its verb lacks."""

    def __init__(self, subject: type) -> None:
        self.verbs: dict[str, _Known] = {}
        for verb in VERBS:
            method = _overrides(subject, verb)
            if method is not None:
                self.verbs[verb] = _know(subject, verb, method)
        levels = ",".join(word for word, verbs in _LEVELS.items() if word == "request" or verbs & set(self.verbs))
        honoured = _honoured(subject)
        if "extend" in self.verbs and "async" in self.verbs["extend"].readers:
            honoured.add("overlap")  # a step can be asked for before the previous result
        labels = " labels=1" if getattr(subject, "labels", False) else ""
        words = [word for word, fields in TAKES.items()
                 if all(verb in self.verbs and name in self.verbs[verb].readers for verb, name in fields)
                 and (word != "disaggregation" or "load" in self.verbs)]
        takes = f" takes={','.join(words)}" if words else ""
        self.hello = f"levels={levels} again=1{labels}{takes} honours={','.join(sorted(honoured))}"


def _honoured(subject: type) -> set[str]:
    names = getattr(subject, "honours", ())
    for name in names:
        if name not in HONOURS:
            raise TypeError(f"{subject.__qualname__}.honours: there is no `{name}`; the fields are {', '.join(HONOURS)}")
    honoured = set(names)
    if "request_rows" in honoured:
        honoured.add("max_running")  # the number of rows, unless request_rows is set
    if "blocks" in honoured:
        honoured.update(_OF_BLOCKS)
    return honoured


_capabilities: dict[type, Capabilities] = {}


def capabilities(subject: type) -> Capabilities:
    """The capabilities of the class, cached."""
    if subject not in _capabilities:
        if not issubclass(subject, Subject):
            raise TypeError(f"{subject.__qualname__} is no lockstep.Subject: derive it from that class")
        _capabilities[subject] = Capabilities(subject)
    return _capabilities[subject]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_MAX else line[:_MESSAGE_MAX - 3] + "..."


def told(error: BaseException, subject: type | None) -> str:
    """An exception as one line: its text, and its innermost place in the subject's own file."""
    ours = os.path.dirname(os.path.abspath(__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if os.path.dirname(os.path.abspath(frame.filename)) != ours]
    home = getattr(sys.modules.get(subject.__module__), "__file__", None) if subject is not None else None
    own = [frame for frame in frames if home is not None and os.path.abspath(frame.filename) == os.path.abspath(home)]
    frame = (own or frames)[-1] if frames else None
    try:
        text = _one_line(str(error))
    except Exception:  # noqa: BLE001  str() itself fails: the exception's name must do
        text = ""
    if not text and frame is not None:
        text = _one_line(linecache.getline(frame.filename, frame.lineno or 0))
    name = type(error).__name__
    said = text if isinstance(error, (Violation, Wrong, Overdue)) else f"{name}: {text}" if text else name
    return said if frame is None else f"{said} ({shown_path(frame.filename)}:{frame.lineno}, in {frame.name})"


class Session:
    """One connection. `factory` makes a subject at each hello; `error` is the last exception that was reported."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._subject: Subject | None = None
        self._verbs: dict[str, _Known] = {}
        self.error: BaseException | None = None
        self.unsupported: dict[str, str] = {}  # the texts of Unsupported, by the first words of the operation

    def answer(self, line: str) -> str:
        """The answer to `line`; both are without end of line."""
        __tracebackhide__ = True
        verb, _, rest = line.partition(" ")
        try:
            if verb == "hello":
                return self._greet(rest)
            known = self._verbs.get(verb)
            if known is None:
                return "unsupported"
            arguments = known.defaults.copy()
            readers = known.readers
            if rest:
                for word in rest.split(" "):
                    name, _, value = word.partition("=")
                    reader = readers.get(name)
                    if reader is not None:
                        arguments[reader[0]] = reader[1](value)
                    elif name not in known.ignored:
                        return "unsupported"
            if "prompt" in arguments and arguments["prompt"] is None:
                arguments["prompt"] = len(arguments.get("tokens", ()))
            return self._text(known, getattr(self._subject, known.method)(**arguments), rest)
        except Refused as refused:
            evicted = refused.reply.text()
            return f"refused={refused.reason}" + ("" if evicted == "ok" else " " + evicted)
        except Unsupported as unsupported:
            self.unsupported.setdefault(verb, str(unsupported))
            return "unsupported"
        except (Violation, AssertionError) as violation:
            self.error = violation
            return "violation=" + told(violation, type(self._subject))
        except Wrong as wrong:
            self.error = wrong
            return "wrong=" + _one_line(str(wrong))
        except (KeyboardInterrupt, Overdue):
            raise
        except BaseException as error:  # noqa: B902 (sys.exit and pytest.fail end the trace, not the process)
            self.error = error
            return "raised=" + told(error, type(self._subject) if self._subject is not None else None)

    def where_it_is(self, overdue: Overdue) -> str:
        """The place in the subject's method that has not answered in time."""
        return told(overdue, type(self._subject) if self._subject is not None else None)

    def _greet(self, rest: str) -> str:
        fields = dict(word.split("=", 1) for word in rest.split(" ") if word)
        fields.pop("protocol", None)
        self._subject = None  # the last subject is gone before the next one is made
        self._verbs = {}
        self._subject = self._factory(Config.of_fields(fields))
        known = capabilities(type(self._subject))
        self._verbs = known.verbs
        promises = ((name, getattr(self._subject, name)) for name in ("rehits", "chunks", "locks"))
        return known.hello + "".join(f" {name}={tokens}" for name, tokens in promises if tokens)

    def _text(self, known: _Known, value: Any, rest: str) -> str:
        if isinstance(value, Reply):
            return value.text()
        if value is None and not known.must:
            if known.method == "extend":
                return next(word for word in rest.split(" ") if word.startswith("n="))
            return "ok"
        if known.number and value is not None and not isinstance(value, bool):
            try:
                return f"{known.number}={value.__index__()}"
            except AttributeError:
                pass
        method = getattr(type(self._subject), known.method)
        raise TypeError(f"{type(self._subject).__name__}.{known.method} ({where(method)}) returned {value!r}"
                        + (f"; it returns a number, {known.number}=, or a lockstep.Reply" if known.number else
                           "; it returns a lockstep.Reply or None"))


class Overdue(BaseException):
    """Raised inside a method that has not answered in time; its traceback shows the place."""
