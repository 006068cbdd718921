"""explore and replay: the program's search and replay with subjects of this process."""
from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence, Union

from lockstep.counted import counted, milliseconds
from lockstep.hosting import Host, Ran
from lockstep.session import Factory, capabilities

SubjectLike = Union[str, Factory]
PathLike = Union[str, "os.PathLike[str]"]

_FINDING_STATUS = range(10, 14)


class LockstepError(RuntimeError):
    """The program could not run: bad input, or something missing in the environment."""


class FindingError(AssertionError):
    """A finding. The text has the trace, the sentence, the expected and the actual answer."""

    def __init__(self, text: str, findings: Sequence[Finding]) -> None:
        super().__init__(text)
        self.findings = list(findings)

    @property
    def trace(self) -> pathlib.Path:
        """The first finding's trace file."""
        return self.findings[0].trace


@dataclass(frozen=True)
class Finding:
    """One finding.

    kind: a word of cache_sim/check/findings.md. text: one sentence. expected, actual: the two answers. trace: the
    file. trace_text: its lines, without comments. tests_to_detect: number of traces played until this one.
    lines_before: lines of the trace before it was shrunk.
    """

    kind: str
    text: str
    expected: str
    actual: str
    trace: pathlib.Path
    trace_text: str
    tests_to_detect: int = 0
    lines_before: int = 0


@dataclass(frozen=True)
class Search:
    """The result of a search. seconds: searching and shrinking. unsupported: the reasons why operations were left out."""

    traces: int
    operations: int
    seconds: float
    seed: int
    findings: list[Finding] = field(default_factory=list)
    marks_missed: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Replayed:
    """A replay without findings. traces: the files. output: the text of the program."""

    traces: list[pathlib.Path]
    output: str


def explore(subject: SubjectLike, *, beside: SubjectLike | Sequence[SubjectLike] | None = None, seconds: float = 30.0,
            traces: int | None = None, seed: int = 1, findings: int = 1, out: PathLike = "findings",
            config: Mapping[str, object] | None = None, check: str = "all", timeout: float = 10.0,
            shrink: bool = True) -> Search:
    """Plays random traces and raises FindingError with the first finding, shrunk.

    subject: a class derived from Subject, or a function of a Config that makes one; or a word as the program's
        --subject takes it, such as "sglang-no-buffer" or "exec:python3 my_server.py".
    beside: the subjects that its replies are compared with, one or several: "oracle:radix", "oracle:sglang-no-buffer",
        another class. None: the subject runs alone, and only its own rules and impossible replies are checked.
    seconds: how long the search may take; traces: instead, how many traces. seed: decides every trace.
    findings: how many before it stops. out: the folder for their traces, made when there is one.
    config: fields that stay as they are, as {"page": 4}; the others are drawn. timeout: seconds for one answer.
    check: "all", "labels" or "off". shrink: False writes traces as they were found.

    Raises LockstepError where the search cannot be made. Names in traces are paths from the working directory.
    """
    __tracebackhide__ = True  # pytest leaves this frame out
    host = Host()
    subjects = [*_several(beside), subject]
    fixed = {str(name): _config_text(value) for name, value in (config or {}).items()}
    words = ["explore", "--seed", str(seed), "--findings", str(findings), "--check", check,
             "--timeout", milliseconds(timeout), *_subject_words(host, subjects)]
    words += ["--time", milliseconds(seconds)] if traces is None else ["--traces", str(traces)]
    if not shrink:
        words.append("--no-shrink")
    if fixed:
        words += ["--config", ",".join(f"{name}={value}" for name, value in fixed.items())]
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        json_path = os.path.join(folder, "search.json")
        there = pathlib.Path(folder, "found")
        try:
            ran = host.run([*words, "--out", str(there), "--json", json_path], timeout, quiet=True)
        finally:  # an interrupted search keeps its findings
            moved = _keep_traces(there, pathlib.Path(out), _name_of(subject))
        if ran.status != 0 and (ran.status not in _FINDING_STATUS or not os.path.exists(json_path)):
            raise _refusal(ran)
        with open(json_path, encoding="utf-8") as file:
            data = json.load(file)
    search = _search(data, moved, ran)
    if search.findings:
        raise _found(search, subjects, ran, check, timeout)
    return search


def replay(trace: PathLike, subject: SubjectLike, *, beside: SubjectLike | Sequence[SubjectLike] | None = None,
           config: Mapping[str, object] | None = None, check: str = "all", timeout: float = 10.0) -> Replayed:
    """Plays a trace file, or every .trace of a folder, and raises FindingError with what it finds.

    beside: as in explore; None: the subjects beside an `exec:` in the trace's first `# run:` line. The other arguments
    are those of explore. Output of the subject is printed.

    Raises LockstepError where a trace cannot be played.
    """
    __tracebackhide__ = True
    path = pathlib.Path(trace)
    files = sorted(path.glob("*.trace")) if path.is_dir() else [path]
    if not files:
        raise LockstepError(f"{path}: no .trace file is there")
    said = []
    for file in files:
        others = _several(beside) if beside is not None else _beside_in(file)
        host = Host()
        words = ["replay", str(file), "--check", check, "--timeout", milliseconds(timeout),
                 *_subject_words(host, [*others, subject])]
        if config:
            words += ["--config", ",".join(f"{name}={_config_text(value)}" for name, value in config.items())]
        ran, found = _replayed(host, words, file, timeout)
        said.append(ran.output)
        if found:
            text = "\n".join([f"{file}: {found[0].kind}: {found[0].text}", "", found[0].trace_text, "", *_details(ran),
                              *_hang(ran)])
            raise FindingError(_with_short_names(text, host), found) from ran.error
    return Replayed(files, "".join(said))


# --- Arguments of the program ---------------------------------------------------------------------

def _several(beside: SubjectLike | Sequence[SubjectLike] | None) -> list[SubjectLike]:
    if beside is None:
        return []
    return list(beside) if isinstance(beside, (list, tuple)) else [beside]  # type: ignore[list-item]


def _subject_words(host: Host, subjects: Sequence[SubjectLike]) -> list[str]:
    words = []
    for subject in subjects:
        if isinstance(subject, type):
            capabilities(subject)  # raises if the class is wrong, before the program starts
        elif not isinstance(subject, str) and not callable(subject):
            raise TypeError(f"{subject!r} makes no subject: give its class, which is called for each trace")
        words += ["--subject", subject if isinstance(subject, str) else host.subject(subject)]
    return words


def _config_text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _name_of(subject: SubjectLike) -> str:
    if isinstance(subject, str):
        return re.sub(r"[^A-Za-z0-9]+", "-", subject.removeprefix("exec:")).strip("-")[-40:]
    return str(getattr(subject, "__name__", type(subject).__name__)).strip("<>")


# --- Results --------------------------------------------------------------------------------------

def _refusal(ran: Ran) -> LockstepError:
    lines = [line for line in ran.complaint.splitlines() if line.strip()]
    said = lines[-1].removeprefix("lockstep: ") if lines else f"the program ended with status {ran.status}"
    error = LockstepError("\n".join([said, *_hang(ran)]))
    error.__cause__ = ran.error
    return error


def _keep_traces(found: pathlib.Path, out: pathlib.Path, name: str) -> dict[str, pathlib.Path]:
    """Moves the traces to files with the subject's name. Returns the new paths by the old ones."""
    moved = {}
    for file in sorted(found.glob("*.trace")) if found.is_dir() else []:
        out.mkdir(parents=True, exist_ok=True)
        target = out / f"{name}-{file.name}"
        shutil.move(str(file), target)
        moved[str(file)] = target
    return moved


def _without_comments(file: pathlib.Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def _search(data: dict[str, Any], moved: dict[str, pathlib.Path], ran: Ran) -> Search:
    findings = [Finding(kind=one["kind"], text=one["text"], expected=one["expected"], actual=one["actual"],
                        trace=moved[one["trace"]], trace_text=_without_comments(moved[one["trace"]]),
                        tests_to_detect=one["tests_to_detect"], lines_before=one["lines_before"])
                for one in data["findings"]]
    left_out = [one["text"] for one in data["search"].get("unsupported", [])]
    left_out += [f"{verb}: {why}" for verb, why in ran.unsupported.items() if why]
    return Search(traces=data["search"]["traces_run"], operations=data["search"]["operations"],
                  seconds=data["timing"]["wall_s"], seed=data["seed"], findings=findings,
                  marks_missed=data["search"]["marks_missed"], unsupported=left_out)


def _details(ran: Ran) -> list[str]:
    """The lines of a replay's output with the expected and actual answer and the events before it. Empty if the finding
    belongs to no operation, or does not show again."""
    return [line for line in ran.output.splitlines() if line.startswith("  ")]


def _with_short_names(text: str, host: Host) -> str:
    for word, name in host.names().items():
        text = text.replace(f"child `{word.removeprefix('exec:')}`", name).replace(word, name)
    return text


def _hang(ran: Ran) -> list[str]:
    return [f"it was here: {ran.hang}"] if ran.hang else []


def _found(search: Search, subjects: Sequence[SubjectLike], ran: Ran, check: str, timeout: float) -> FindingError:
    """The exception that a test shows. The shrunk trace is played once more, so that the printed output of the subject is
    that of the trace alone, and an exception keeps its traceback."""
    first = search.findings[0]
    host = Host()
    words = ["replay", str(first.trace), "--check", check, "--timeout", milliseconds(timeout),
             *_subject_words(host, subjects)]
    again = host.run(words, timeout, quiet=False)
    lines = len(first.trace_text.splitlines())
    shrunk = f", shrunk to {lines}" if lines < first.lines_before else ""
    text = "\n".join([
        f"{first.kind}: {first.text}",
        f"Found by trace {first.tests_to_detect} of seed {search.seed}; {counted(first.lines_before, 'line')}{shrunk}:",
        "", first.trace_text, "", *_details(again), *_hang(again),
        f"written  {first.trace}",
        f"replay   lockstep.replay({str(first.trace)!r}, {_name_of(subjects[-1])})",
        *(f"also     {other.kind}: {other.trace}" for other in search.findings[1:])])
    error = FindingError(_with_short_names(text, host), search.findings)
    error.__cause__ = again.error
    return error


def _replayed(host: Host, words: list[str], file: pathlib.Path, timeout: float) -> tuple[Ran, list[Finding]]:
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        json_path = os.path.join(folder, "replay.json")
        ran = host.run([*words, "--json", json_path], timeout, quiet=False)
        if ran.status == 0:
            return ran, []
        if ran.status not in _FINDING_STATUS or not os.path.exists(json_path):
            raise _refusal(ran)
        with open(json_path, encoding="utf-8") as read:
            data = json.load(read)
    trace_text = _without_comments(file)
    return ran, [Finding(kind=one["kind"], text=one["text"], expected=one["expected"], actual=one["actual"],
                         trace=file, trace_text=trace_text) for one in _findings_in(data)]


def _findings_in(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A run's findings; with several subjects they stand under `subjects`."""
    own = list(data.get("findings", []))
    for subject in data.get("subjects", []):
        if isinstance(subject, dict):
            own += [one for one in subject.get("findings", []) if one not in own]
    return own


def _beside_in(file: pathlib.Path) -> list[SubjectLike]:
    """The subjects of the first `# run:` line, without children."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise LockstepError(f"{file}: {error.strerror}") from None
    for line in text.splitlines():
        if line.startswith("# run:"):
            words = shlex.split(line.removeprefix("# run:"))
            named = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--subject"]
            return [name for name in named if not name.startswith("exec:")]
    return []
