"""The plan of a sweep: a list of units, and the shards that they are dealt to.

A unit is the smallest piece of work: a search with one seed, the search for one defect, one cell of a comparison, some
traces to replay. A unit's result depends on the build, the plan and its own number alone. Unit U belongs to shard
U modulo the number of shards, so the merged result does not depend on that number.
"""
from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shlex
import tempfile
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from lockstep import calls, program
from lockstep.calls import last_line
from lockstep.counted import milliseconds
from lockstep.settings import (GENERAL, SettingsError, Target, canaries_of, check_name, expect_nothing_else, number,
                               sections_of, target_of, whole_number)
from lockstep.sweep.publish import digest_of, publish, read, text_of

FORMAT = 1
TRACES = 1_000_000  # of all searches together
UNIT_TRACES = 20_000
DEFECT_TRACES = 20_000
SERVER_REQUESTS, UNIT_REQUESTS = 1000, 200
FILES_A_UNIT = 20
MUTANTS, MUTANT_PROGRAM = "sweep.json", "lockstep_mutants"
LIMIT = 3600.0
SECTION_FIELDS = ", traces, unit, requests, version; of a comparison compare, policies, capacity, model, config, requests; " \
                 "of traces replay; of defects defects, traces, seeds; of mutants mutants, traces"


class Refused(Exception):
    """The environment does not fit the plan: one sentence."""


@dataclass
class Build:
    version: str
    digest: str  # of the program and of this package

    def name(self) -> str:
        return f"{self.version} ({self.digest})"


def this_build() -> Build:
    """The program that would run here."""
    package = pathlib.Path(__file__).resolve().parents[1]
    sources = sorted([*package.glob("*.py"), *package.glob("sweep/*.py"), *package.glob("server/*.py")])
    version = calls.run(["--version"], pathlib.Path.cwd()).stdout.split()[-1]
    return Build(version, program_digest(pathlib.Path(program.path()), *sources))


def program_digest(*files: pathlib.Path) -> str:
    """Reads in pieces: with debug information a program can be larger than the memory that a unit has."""
    summed = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                summed.update(piece)
    return summed.hexdigest()[:16]


def version_of(names: list[str], base: pathlib.Path, build: Build) -> str:
    """The version of subjects: that of Lockstep, or a digest of the files and folders that their commands name."""
    found = hashlib.sha256()
    has_files = False
    for name in names:
        try:
            words = shlex.split(name.removeprefix("exec:"))
        except ValueError:
            continue
        for word in words:
            path = base / word.rpartition(":")[0] if ":" in word and not (base / word).exists() else base / word
            if not word or not path.exists() or path == base:
                continue
            files = [path] if path.is_file() else sorted(path.rglob("*.py"))
            for file in files:
                found.update(file.read_bytes())
            has_files = has_files or bool(files)
    return f"files {found.hexdigest()[:12]}" if has_files else f"Lockstep {build.version}"


# --- Settings -------------------------------------------------------------------------------------

def _words(text: str, also: str = "") -> list[str]:
    for character in also:
        text = text.replace(character, " ")
    return text.split()


class _Reader:
    """Makes the sections of a plan from those of a settings file."""

    def __init__(self, path: pathlib.Path | None, build: Build) -> None:
        self.base = path.resolve().parent if path else pathlib.Path.cwd()
        self._build = build
        self._sections = sections_of(path) if path else None
        sections = self._sections or {}
        self._traces, self._unit, self.limit = TRACES, UNIT_TRACES, LIMIT
        self._canaries = canaries_of({})
        for section, values in sections.items():
            if section in GENERAL:
                self._checked(section, lambda values=values, section=section: self._general(section, values))
        searches: list[tuple[Target, dict[str, Any]]] = []
        self.sections: list[dict[str, Any]] = []
        for section, values in sections.items():
            if section not in GENERAL:
                self._checked(section, lambda values=values, section=section: self._section(section, values, searches))
        if not sections.keys() - set(GENERAL):
            searches.append((Target("policies"), {}))
            self.sections.append({"name": "policies"})
        weights = sum(target.weight for target, own in searches if "traces" not in own and not target.server)
        for target, own in searches:
            traces = own.get("traces") or (max(1, round(self._traces * target.weight / weights)) if weights else 0)
            entry = next(one for one in self.sections if one["name"] == target.name)
            entry.update(self._search(target, traces, own))
        canaries = {"name": "canary", "kind": "defects", "defects": self._canaries, "traces": DEFECT_TRACES,
                    "units": len(self._canaries), "canary": True, "version": version_of([], self.base, build)}
        self.sections.insert(0, canaries)

    def _checked(self, section: str, take: Any) -> None:
        try:
            take()
        except ValueError as error:
            assert self._sections is not None
            raise self._sections.refused(section, error) from None

    def _general(self, section: str, values: dict[str, str]) -> None:
        self._canaries = canaries_of(values) if "canary" in values else self._canaries
        if section == "nightly":  # a night's seconds say nothing about a sweep
            values.pop("seconds", None), values.pop("folder", None)
            return expect_nothing_else(values, "seconds, folder, canary")
        self._traces = whole_number(values, "traces", self._traces)
        self._unit = whole_number(values, "unit", self._unit)
        self.limit = number(values, "limit", self.limit)
        expect_nothing_else(values, "traces, unit, limit, canary")

    def _section(self, name: str, values: dict[str, str], searches: list[tuple[Target, dict[str, Any]]]) -> None:
        check_name(name)
        if name in ("canary", "known"):
            raise ValueError("this name belongs to a part of every plan")
        version = values.pop("version", "")
        if "compare" in values:
            entry = self._comparison(values)
        elif "replay" in values:
            entry = self._traces_to_replay(values)
        elif "defects" in values:
            entry = self._defects(values)
        elif "mutants" in values:
            entry = self._mutants(values)
        else:
            own: dict[str, Any] = {key: whole_number(values, key, 1) for key in ("traces", "unit", "requests") if key in values}
            searches.append((target_of(name, values, SECTION_FIELDS), {**own, "version": version}))
            self.sections.append({"name": name})
            return
        self.sections.append({"name": name, "version": version or version_of([], self.base, self._build), **entry})

    def _search(self, target: Target, traces: int, own: dict[str, Any]) -> dict[str, Any]:
        named = [target.subject, *target.beside]
        entry: dict[str, Any] = {"subject": target.subject or target.server or "every policy", "beside": target.beside,
                                 "named": [target.server] if target.server else [one for one in named if one],
                                 "optional": target.optional, "timeout": target.timeout}
        entry["version"] = own.get("version") or version_of(entry["named"], self.base, self._build)
        if target.server:
            requests, size = own.get("requests", SERVER_REQUESTS), own.get("unit", UNIT_REQUESTS)
            return {**entry, "kind": "server", "server": target.server, "budget": requests, "unit": size,
                    "units": -(-requests // size)}
        size = min(own.get("unit", self._unit), traces)
        return {**entry, "kind": "search", "words": target.words(), "budget": traces, "unit": size, "units": -(-traces // size)}

    def _comparison(self, values: dict[str, str]) -> dict[str, Any]:
        entry: dict[str, Any] = {"kind": "compare", "workloads": _words(values.pop("compare")), "policies": _words(values.pop("policies", ""), ","),
                 "capacities": _words(values.pop("capacity", ""), ","), "models": _words(values.pop("model", "qwen3-next"), ","),
                 "config": values.pop("config", ""), "requests": whole_number(values, "requests", 1) if "requests" in values else 0}
        for part, field in (("workloads", "compare"), ("policies", "policies"), ("capacities", "capacity"), ("models", "model")):
            if not entry[part]:
                raise ValueError(f"{field}: a comparison needs it")
        expect_nothing_else(values, "compare, policies, capacity, model, config, requests, version")
        cells = [len(entry[part]) for part in ("workloads", "models", "capacities", "policies")]
        return {**entry, "units": cells[0] * cells[1] * cells[2] * cells[3]}

    def _traces_to_replay(self, values: dict[str, str]) -> dict[str, Any]:
        folders = _words(values.pop("replay"))
        expect_nothing_else(values, "replay, version")
        return {"kind": "replay", "folders": folders, **traces_in(folders, self.base)}

    def _defects(self, values: dict[str, str]) -> dict[str, Any]:
        named = _words(values.pop("defects"), ",")
        known = [line.split()[0] for line in calls.run(["list", "defects"], self.base).stdout.splitlines() if line.strip()]
        chosen = [one for one in known if named == ["all"] or any(one == name or one.split(":")[0] == name for name in named)]
        for name in named:
            if name != "all" and not any(one == name or one.split(":")[0] == name for one in known):
                raise ValueError(f"defects: there is neither a defect nor a subject `{name}`; `lockstep list defects` lists them")
        traces = whole_number(values, "traces", DEFECT_TRACES)
        seeds = whole_number(values, "seeds", 1)
        expect_nothing_else(values, "defects, traces, seeds, version")
        return {"kind": "defects", "defects": chosen, "traces": traces, "units": len(chosen) * seeds}

    def _mutants(self, values: dict[str, str]) -> dict[str, Any]:
        file = self.base / values.pop("mutants") / MUTANTS
        traces = whole_number(values, "traces", DEFECT_TRACES)
        expect_nothing_else(values, "mutants, traces, version")
        try:
            mutants = json.loads(file.read_text(encoding="utf-8"))
            digest = program_digest(file.parent / MUTANT_PROGRAM)
        except (OSError, ValueError) as error:
            raise ValueError(f"mutants: {file.parent} is not what `properties/mutants/run.py --sweep` makes: {error}") from None
        return {"kind": "mutants", "folder": os.path.relpath(file.parent, self.base), "program": digest,
                "mutants": mutants, "traces": traces, "units": len(mutants)}


def traces_in(folders: list[str], base: pathlib.Path) -> dict[str, Any]:
    """The traces of folders with the digests of their texts, and the number of units that play them."""
    files = []
    for folder in folders:
        found = sorted((base / folder).rglob("*.trace"))
        if not found:
            raise ValueError(f"replay: there is no trace in {folder}")
        files += [{"file": os.path.relpath(file, base), "digest": digest_of(file.read_text(encoding="utf-8"))} for file in found]
    return {"files": files, "units": -(-len(files) // FILES_A_UNIT)}


def _start_problem(section: dict[str, Any], base: pathlib.Path) -> str:
    """The sentence with which a search's subjects cannot start here; empty if they start."""
    if section["kind"] != "search":
        return ""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        ran = calls.run(["explore", *section["words"], "--traces", "1", "--no-shrink", "--out", folder, "-q",
                         "--timeout", milliseconds(section["timeout"])], base)
    return last_line(ran) or f"the program ended with status {ran.returncode}" if ran.returncode in (2, 3) else ""


# --- Plans ----------------------------------------------------------------------------------------

class Plan:
    """The data of plan.json, with what follows from it."""

    def __init__(self, folder: pathlib.Path, data: dict[str, Any]) -> None:
        self.folder, self.data = folder, data
        self.base = pathlib.Path(data["base"])
        self.shards: int = data["shards"]
        self.sections: list[dict[str, Any]] = data["sections"]
        self.digest: str = data["digest"]
        self._firsts = []
        total = 0
        for section in self.sections:
            self._firsts.append(total)
            total += section["units"]
        self.units: int = total

    def section_of(self, unit: int) -> tuple[dict[str, Any], int]:
        """The section of a unit, and the unit's number within it."""
        for section, first in zip(self.sections, self._firsts):
            if 0 <= unit < first + section["units"]:
                return section, unit - first
        raise ValueError(f"there is no unit {unit}: the plan has {self.units}")

    def units_of(self, shard: int) -> range:
        return range(shard, self.units, self.shards)

    def known(self) -> list[dict[str, Any]]:
        return _as_written(self.folder / "known.json", lambda data: digest_of(data or []) == self.data["known"]) or []

    def check_build(self, build: Build) -> None:
        """Refused if the plan was made by another build, or for another version of a subject."""
        if self.data["build"] != build.digest:
            raise Refused(f"{self.folder}: the plan is of build {self.data['version']} ({self.data['build']}), "
                          f"and this is build {build.name()}")

    def check_subject(self, section: dict[str, Any], build: Build) -> None:
        now = version_of(section.get("named", []), self.base, build)
        if section["version"].startswith("files ") and section["version"] != now:
            raise Refused(f"{self.folder}: [{section['name']}] the plan is for a subject of {section['version']}, "
                          f"and here are {now}")


def _as_written(file: pathlib.Path, is_whole: Callable[[Any], bool]) -> Any:
    try:
        data = read(file)
    except (ValueError, OSError) as error:
        raise SettingsError(f"{file}: {error}") from None
    if not is_whole(data):
        raise SettingsError(f"{file}: is not as `lockstep sweep plan` wrote it")
    return data


def read_plan(folder: pathlib.Path) -> Plan:
    file = folder / "plan.json"
    if not file.exists():
        raise SettingsError(f"{file}: there is no plan; `lockstep sweep plan FILE -o {folder}` makes one")

    def is_whole(data: Any) -> bool:
        if not isinstance(data, dict) or data.get("lockstep_sweep") != FORMAT:
            raise SettingsError(f"{file}: field lockstep_sweep: this version reads {FORMAT}")
        summed = {name: data[name] for name in data.keys() - {"digest", "shards", "base"}}
        return data.get("digest") == digest_of(summed) and isinstance(data.get("shards"), int) and isinstance(data.get("base"), str)

    return Plan(folder, _as_written(file, is_whole))


def make_plan(path: pathlib.Path | None, shards: int, folder: pathlib.Path) -> Plan:
    """Reads the settings and writes the plan of the first round."""
    build = this_build()
    reader = _Reader(path, build)
    return write_plan(folder, reader.sections, shards, build, reader.base, reader.limit)


def write_plan(folder: pathlib.Path, sections: list[dict[str, Any]], shards: int, build: Build, base: pathlib.Path, limit: float,
               round_number: int = 1, next_seed: int = 1, known: list[dict[str, Any]] | None = None,
               corpus: dict[str, list[str]] | None = None) -> Plan:
    """Writes plan.json, and before it what it names: known.json and corpus/SECTION/DIGEST.trace."""
    if (folder / "plan.json").exists():
        raise SettingsError(f"{folder}: there is a plan already")
    planned, left_out = [], []
    for section in sections:
        problem = _start_problem(section, base)
        if problem and not section["optional"]:
            raise Refused(f"[{section['name']}] cannot start: {problem}")
        if problem:
            left_out.append({"name": section["name"], "text": problem})
            continue
        if section["kind"] in ("search", "server", "defects", "mutants"):
            section = {**section, "first_seed": next_seed}
            next_seed += section["units"]
        planned.append(section)
    if known:
        planned.append({"name": "known", "kind": "known", "version": "", "units": len(known)})
    names = {}
    for name, traces in (corpus or {}).items():
        for text in traces:
            publish(folder / "corpus" / name / f"{digest_of(text)}.trace", text)
        names[name] = sorted(digest_of(text) for text in traces)
    publish(folder / "known.json", text_of(known or []))
    data: dict[str, Any] = {"lockstep_sweep": FORMAT, "round": round_number, "version": build.version, "build": build.digest,
                            "sections": planned, "left_out": left_out, "limit": limit, "next_seed": next_seed,
                            "corpus": names, "known": digest_of(known or [])}
    data["digest"] = digest_of(data)  # without the folder and the number of shards, on which no result depends
    publish(folder / "plan.json", text_of({**data, "shards": shards, "base": str(base)}))
    return read_plan(folder)


def cell_of(section: dict[str, Any], at: int) -> dict[str, str]:
    """Workload, model, capacity and policy of a unit of a comparison."""
    cell = {}
    for part, name in (("policies", "policy"), ("capacities", "capacity"), ("models", "model"), ("workloads", "workload")):
        at, which = divmod(at, len(section[part]))
        cell[name] = section[part][which]
    return cell


def corpus_files(plan: Plan, name: str) -> Iterator[pathlib.Path]:
    for digest in plan.data["corpus"].get(name, []):
        yield plan.folder / "corpus" / name / f"{digest}.trace"
