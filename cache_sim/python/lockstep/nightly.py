"""lockstep nightly [SETTINGS] [--seconds N] [--folder DIR] [--only NAME]: a search that goes on every night.

`python -m lockstep.nightly` is the same.

SETTINGS is an INI file; without one, every policy is searched beside its oracle.

    [nightly]
    seconds = 3600                  ; for everything together (600)
    folder = nightly                ; where the corpus, the page and the JSON are kept (nightly)
    canary = sglang-no-buffer:frees-donated-slot

    [my-cache]                      ; a name; one section for each search
    subject = my_cache.py:MyCache   ; or module:Class, a policy, or exec:COMMAND
    beside = oracle:radix           ; what it is compared with; several with commas; empty: alone
    config = kv_tokens=1048576      ; fields that stay as they are
    weight = 3                      ; its share of the time (1)
    timeout = 10                    ; seconds for one answer
    optional = yes                  ; one that cannot start here is no failure

    [my-server]                     ; a running server instead: the words of `lockstep server search`
    server = openai --program 'my_server {port}' --truth 'my_server --no-cache {port}'

Paths are relative to the settings file. The folder keeps, from night to night, the trace of each finding and the
seeds: each night begins with the traces that are there, and goes on with new seeds. A defect that is planted into a
policy, the canary, must be found each night, or else the night proves nothing.

Writes index.html, nightly.json and corpus.json into the folder.
"""
from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from lockstep import calls, nightly_page, nightly_server
from lockstep.calls import FOUND, last_line, run_for_json, signature, words_of, write_whole
from lockstep.counted import counted, milliseconds
from lockstep.help import Parser, end_help
from lockstep.server.steps import printable
from lockstep.settings import (CANARY, SettingsError, Target, canaries_of, expect_nothing_else, number, sections_of,
                               sentence_of, target_of)

CANARY_SECONDS = 120
SECONDS_MIN = 0.5  # the shortest search
FINDINGS_A_SEARCH = 10  # after this many, a search goes on with another seed
FINDINGS_A_NIGHT = 50  # of one subject, so that a subject that always fails does not fill the night
NEW, THERE, GONE, BACK, UNPLAYABLE = "new", "still there", "gone", "came back", "cannot be played"


@dataclass
class Settings:
    base: pathlib.Path  # paths are relative to it
    seconds: float = 600.0
    folder: pathlib.Path = pathlib.Path("nightly")
    canaries: list[str] = field(default_factory=lambda: [CANARY])
    targets: list[Target] = field(default_factory=list)


# --- Settings -------------------------------------------------------------------------------------

def read_settings(path: pathlib.Path | None) -> Settings:
    """Reads the settings file. A SettingsError names the file, the section and the field."""
    if path is None:
        return Settings(base=pathlib.Path.cwd(), targets=[Target("policies")])
    settings = Settings(base=path.resolve().parent)
    sections = sections_of(path)
    for section, values in sections.items():
        try:
            if section == "nightly":
                _take_general(settings, values)
            else:
                settings.targets.append(target_of(section, values))
        except ValueError as error:
            raise sections.refused(section, error) from None
    if not settings.targets:
        settings.targets = [Target("policies")]
    return settings


def _take_general(settings: Settings, values: dict[str, str]) -> None:
    settings.seconds = number(values, "seconds", settings.seconds)
    settings.folder = pathlib.Path(values.pop("folder", str(settings.folder)))
    settings.canaries = canaries_of(values)
    expect_nothing_else(values, "seconds, folder, canary")


# --- The corpus -----------------------------------------------------------------------------------

class Corpus:
    """The data that a night leaves for the next one: corpus.json, and the traces in findings/NAME/."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._file = folder / "corpus.json"
        try:
            self.data: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.data = {"lockstep_nightly": 1, "next_seed": 1, "nights": [], "subjects": {}}
        except ValueError as error:
            raise SettingsError(f"{self._file}: {error}") from None
        if not isinstance(self.data, dict) or self.data.get("lockstep_nightly") != 1:
            raise SettingsError(f"{self._file}: field lockstep_nightly: this version reads 1")

    def of(self, name: str) -> dict[str, Any]:
        """The record of a subject: totals over all nights, reached code marks, findings by signature."""
        empty = {"operations": 0, "traces": 0, "marks": [], "findings": {}}
        return self.data["subjects"].setdefault(name, empty)  # type: ignore[no-any-return]

    def keep(self, name: str, record: dict[str, Any]) -> None:
        self.data["subjects"][name] = record
        self.save()

    def take_seed(self) -> int:
        """A seed that no night has used. It is recorded as used before it is returned."""
        seed = int(self.data["next_seed"])
        self.data["next_seed"] = seed + 1
        self.save()
        return seed

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, json.dumps(self.data, indent=1) + "\n")


# --- A night --------------------------------------------------------------------------------------

class Night:
    """One run of this command. `report` holds the data of the page and of the JSON."""

    def __init__(self, settings: Settings, corpus: Corpus) -> None:
        self._settings = settings
        self._corpus = corpus
        self._number = len(corpus.data["nights"]) + 1
        self._end = time.monotonic() + settings.seconds
        marks = calls.run(["list", "marks"], settings.base)
        self._marks = marks.stdout.split()
        self.report: dict[str, Any] = {
            "lockstep_nightly": 1, "night": self._number, "canaries": [], "subjects": [], "marks": len(self._marks),
            "timing": {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                       "seconds": settings.seconds}}

    def status(self) -> int:
        if any(not canary["found"] for canary in self.report["canaries"]) or any(
                subject["cannot_run"] and not subject["optional"] for subject in self.report["subjects"]):
            return 3
        states = [one["state"] for subject in self.report["subjects"] for one in subject["findings"]
                  if one["state"] != UNPLAYABLE or not (subject["optional"] and subject["cannot_run"])]
        return 10 if NEW in states or BACK in states else 3 if UNPLAYABLE in states else 0

    def watch_canaries(self) -> None:
        """Plants each canary defect and searches for it with a new seed."""
        for defect in self._settings.canaries:
            seed = self._corpus.take_seed()
            with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
                words = ["explore", "--defect", defect, "--seed", str(seed), "--time", f"{CANARY_SECONDS}s"]
                ran, data = self._explore(words, folder)
            if ran.returncode == 2:
                raise SettingsError(f"canary {defect}: {last_line(ran)}")
            findings = data["findings"] if data else []
            self.report["canaries"].append({
                "defect": defect, "seed": seed, "found": ran.returncode in FOUND and bool(findings),
                "kind": findings[0]["kind"] if findings else "",
                "tests_to_detect": findings[0]["tests_to_detect"] if findings else 0,
                "said": "" if findings else last_line(ran) or "nothing was found"})

    def search(self, target: Target, seconds: float) -> None:
        """Replays the findings of earlier nights, then searches for the rest of `seconds`, but at least for SECONDS_MIN."""
        started = time.monotonic()
        record = self._corpus.of(target.name)
        row: dict[str, Any] = {
            "name": target.name, "subject": target.subject or target.server or "every policy", "beside": target.beside,
            "optional": target.optional, "operations": 0, "traces": 0, "seeds": [], "cannot_run": "", "unsupported": [],
            "findings": [], "marks": []}
        self.report["subjects"].append(row)
        try:
            self._replay_known(target, record, row)
            while sum(one["state"] == NEW for one in row["findings"]) < FINDINGS_A_NIGHT and not row["cannot_run"]:
                left = seconds - (time.monotonic() - started)
                if row["seeds"] and left < SECONDS_MIN:
                    break
                self._search_once(target, max(left, SECONDS_MIN), record, row)
        finally:  # an interrupted night keeps its findings
            record["operations"] += row["operations"]
            record["traces"] += row["traces"]
            record["marks"] = sorted({*record["marks"], *row["marks"]})
            row["operations_ever"], row["marks_ever"] = record["operations"], len(record["marks"])
            row["marks_missed_ever"] = sorted(set(self._marks) - set(record["marks"]))
            row["seconds"] = round(time.monotonic() - started, 1)
            self._corpus.keep(target.name, record)

    def _search_once(self, target: Target, seconds: float, record: dict[str, Any], row: dict[str, Any]) -> None:
        seed = self._corpus.take_seed()
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            if target.server:
                ran, data = nightly_server.search(target.server, seed, seconds, pathlib.Path(folder), self._settings.base)
            else:
                words = ["explore", *target.words(), "--seed", str(seed), "--time", milliseconds(seconds),
                         "--findings", str(FINDINGS_A_SEARCH), "--timeout", milliseconds(target.timeout)]
                ran, data = self._explore(words, folder)
            if data is None:
                row["cannot_run"] = last_line(ran) or f"the program ended with status {ran.returncode}"
                return
            row["seeds"].append(seed)
            row["operations"] += data["search"]["operations"]
            row["traces"] += data["search"]["traces_run"]
            row["unsupported"] = [one["text"] for one in data["search"].get("unsupported", [])]
            missed = data["search"]["marks_missed"]
            reached = set() if missed is None else set(self._marks) - set(missed)
            row["marks"] = sorted({*row["marks"], *reached})
            for one in data["findings"]:
                self._take_finding(target, record, row, one)

    def conclude(self, interrupted: bool) -> int:
        """Writes the page and the JSON, and returns the exit status."""
        status = 130 if interrupted else self.status()
        self.report["status"] = status
        self.report["verdict"] = {0: "nothing new", 10: "new findings", 3: "failed", 130: "interrupted"}[status]
        self._corpus.data["nights"].append({
            "night": self._number, "date": self.report["timing"]["date"], "status": status,
            "operations": sum(subject["operations"] for subject in self.report["subjects"]),
            "new": sum(one["state"] in (NEW, BACK) for subject in self.report["subjects"] for one in subject["findings"])})
        self._corpus.save()
        self.report["nights"] = self._corpus.data["nights"]
        folder = self._corpus.folder
        write_whole(folder / "nightly.json", json.dumps(self.report, indent=1) + "\n")
        write_whole(folder / "index.html", nightly_page.page(self.report))
        return status

    def _explore(self, words: list[str], folder: str) -> tuple[subprocess.CompletedProcess[str], Any]:
        return run_for_json([*words, "--out", str(pathlib.Path(folder, "found"))], self._settings.base, pathlib.Path(folder))

    def _replay_known(self, target: Target, record: dict[str, Any], row: dict[str, Any]) -> None:
        for mark, known in sorted(record["findings"].items()):
            file = self._corpus.folder / known["trace"]
            ran = (nightly_server.replay(target.server, file, self._settings.base) if target.server else
                   calls.run(["replay", str(file.resolve()), *(target.words() or known["words"]),
                               "--timeout", milliseconds(target.timeout)], self._settings.base))
            before = known["state"]
            known["state"] = GONE if ran.returncode == 0 else THERE if ran.returncode in FOUND else UNPLAYABLE
            if before == GONE and known["state"] == THERE:
                known["state"] = BACK
            if known["state"] == UNPLAYABLE:
                known["said"] = last_line(ran)
            row["findings"].append({"signature": mark, **known})

    def _take_finding(self, target: Target, record: dict[str, Any], row: dict[str, Any], one: dict[str, Any]) -> None:
        mark = one.get("signature") or signature(one["kind"], one["text"])
        known = record["findings"].get(mark)
        if known is not None and known["state"] != GONE:
            known["times"] = known.get("times", 1) + 1
            return
        folder = self._corpus.folder / "findings" / target.name
        folder.mkdir(parents=True, exist_ok=True)
        source = pathlib.Path(one["trace"])
        kept = folder / (f"{self._number}-{source.name}" if target.server else source.name)
        text = source.read_text(encoding="utf-8")
        write_whole(kept, text)
        entry = {"kind": one["kind"], "text": one["text"], "trace": str(kept.relative_to(self._corpus.folder)),
                 "first_night": known["first_night"] if known else self._number, "state": BACK if known else NEW,
                 "tests_to_detect": one["tests_to_detect"], "lines": one["shrunk_lines"], "trace_text": text,
                 "words": words_of(one.get("replay", ""))}
        record["findings"][mark] = entry
        row["findings"] = [other for other in row["findings"] if other["signature"] != mark]
        row["findings"].append({"signature": mark, **entry})

    def go_through(self, targets: list[Target]) -> None:
        """Searches all targets, and divides the remaining time between them by weight."""
        for i, target in enumerate(targets):
            left = max(0.0, self._end - time.monotonic())
            self.search(target, left * target.weight / sum(other.weight for other in targets[i:]))


def summary(report: dict[str, Any], folder: pathlib.Path) -> str:
    lines = []
    for canary in report["canaries"]:
        lines.append(f"canary {canary['defect']}: " + (
            f"found by trace {canary['tests_to_detect']}" if canary["found"] else f"NOT FOUND ({canary['said']})"))
    for subject in report["subjects"]:
        states = [one["state"] for one in subject["findings"]]
        found = ", ".join(f"{states.count(state)} {state}" for state in (NEW, BACK, THERE, GONE, UNPLAYABLE)
                          if state in states) or "nothing found"
        reached = f"{len(subject['marks'])} of {report['marks']} marks"
        if subject["cannot_run"]:
            lines.append(f"{subject['name']}: cannot run{' (optional)' * subject['optional']}: {subject['cannot_run']}")
        if subject["seeds"] or states:
            lines.append(f"{subject['name']}: {counted(subject['operations'], 'operation')}, {reached}: {found}")
        lines += [f"  {one['state']}: {folder / one['trace']}: " +
                  (one["said"] if one["state"] == UNPLAYABLE else f"{one['kind']}: {one['text']}")
                  for one in subject["findings"] if one["state"] in (NEW, BACK, UNPLAYABLE)]
    return "\n".join([*lines, f"{report['verdict']}; {folder / 'index.html'}"])


def parser() -> argparse.ArgumentParser:
    words = Parser(prog="lockstep nightly", description=__doc__)
    words.add_argument("settings", nargs="?", type=pathlib.Path, metavar="SETTINGS",
                       help="an INI file (default: every policy beside its oracle)")
    words.add_argument("--seconds", type=float, help="for everything together (default: as the settings say, else 600)")
    words.add_argument("--folder", type=pathlib.Path, help="of the corpus and the page (default: as the settings say, "
                                                           "else nightly)")
    words.add_argument("--only", action="append", default=[], metavar="NAME",
                       help="this search alone; may be repeated (default: all)")
    end_help(words, {0: "nothing new, and the canary was found", 2: "bad usage, or bad settings",
                     3: "the environment, a search that could not start, a kept finding that cannot be played, or a canary that "
                        "was not found",
                     10: "a new finding, or one that came back", 130: "interrupted"},
             "lockstep nightly --seconds 10 --folder nights")
    return words


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    try:
        settings = read_settings(options.settings)
        if options.seconds is not None:
            settings.seconds = options.seconds
        folder = options.folder if options.folder is not None else settings.base / settings.folder
        unknown = set(options.only) - {target.name for target in settings.targets}
        if unknown:
            raise SettingsError(f"--only: there is no search {', '.join(sorted(unknown))}")
        targets = [target for target in settings.targets if not options.only or target.name in options.only]
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a night that is ended early also leaves its page
        night = Night(settings, Corpus(folder))
        interrupted = False
        try:
            night.watch_canaries()
            night.go_through(targets)
        except KeyboardInterrupt:
            interrupted = True
        status = night.conclude(interrupted)
    except SettingsError as error:
        print(f"lockstep: {printable(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"lockstep: {printable(sentence_of(error))}", file=sys.stderr)
        return 3
    print(summary(night.report, folder))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
