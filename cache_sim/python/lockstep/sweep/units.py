"""Plays one unit of a plan. Its result holds no time, no path and no name of a machine: the same unit gives the same bytes."""
from __future__ import annotations

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
from typing import Any

from lockstep import calls, nightly_server
from lockstep.calls import FOUND, last_line, run_for_json, words_of
from lockstep.counted import milliseconds
from lockstep.sweep.corpus import smallest_cover
from lockstep.sweep.keys import early_key, field_of, verb_of
from lockstep.sweep.plan import FILES_A_UNIT, MUTANT_PROGRAM, Plan, cell_of, corpus_files, program_digest
from lockstep.sweep.publish import digest_of

FINDINGS_A_UNIT = 10
CORPUS_A_UNIT = 32
DEFECT_TIMEOUT = "60s"
MUTANT_MEMORY = 2 << 30  # bytes; a search takes a fraction, and one that allocates without end dies of it
MUTANT_TIMEOUT = "15s"  # a trace takes a fraction of a millisecond; one of a mutant may never end
SHRINK_SECONDS = "1000000"  # of a server's finding: the number of lives ends its shrinking, not a clock
_TRACE = re.compile(r"trace (\d+) of seed \d+ ([^\n]*)")
DIED, SILENT = 11, 12  # statuses of a search that a trace has ended: it leaves no data


class Lost(Exception):
    """The unit was neither played nor failed: the program was killed, or had no memory or no room. One sentence."""


def play(plan: Plan, unit: int) -> dict[str, Any]:
    """The unit's result. Lost is raised where there is none."""
    section, at = plan.section_of(unit)
    result: dict[str, Any] = {"unit": unit, "section": section["name"]}
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        folder = pathlib.Path(name)
        try:
            result.update(_PLAYERS[section["kind"]](plan, section, at, folder))
        except calls.OverLimit:
            result["over_limit"] = plan.data["limit"]
    return result


def _checked(ran: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if ran.returncode < 0:
        raise Lost(f"the program was ended by signal {-ran.returncode}")
    if ran.returncode == 3:
        raise Lost(last_line(ran) or "the program says that the environment is not as it should be")
    return ran


def timeout_of(plan: Plan, name: str) -> list[str]:
    """The option --timeout of a search's children; nothing where the plan no longer has the search."""
    section = next((one for one in plan.sections if one["name"] == name and "timeout" in one), None)
    return ["--timeout", milliseconds(section["timeout"])] if section else []


def _own_folder(folder: pathlib.Path, name: str) -> pathlib.Path:
    made = folder / name
    made.mkdir()
    return made


# --- Searches -------------------------------------------------------------------------------------

def _search(plan: Plan, section: dict[str, Any], at: int, folder: pathlib.Path) -> dict[str, Any]:
    size = min(section["unit"], section["budget"] - at * section["unit"])
    words = [*section["words"], "--traces", str(size), "--findings", str(FINDINGS_A_UNIT), *timeout_of(plan, section["name"])]
    return _explore(plan, section, section["first_seed"] + at, words, folder)


def _defect(plan: Plan, section: dict[str, Any], at: int, folder: pathlib.Path) -> dict[str, Any]:
    defect = section["defects"][at % len(section["defects"])]
    words = ["--defect", defect, "--traces", str(section["traces"]), "--findings", "1", "--timeout", DEFECT_TIMEOUT]
    result = _explore(plan, section, section["first_seed"] + at, words, folder)
    return {**result, "defect": defect, "corpus": []}


def _mutant(plan: Plan, section: dict[str, Any], at: int, folder: pathlib.Path) -> dict[str, Any]:
    """The search for one mutant. A program that dies of it, or a trace that never ends, has found it."""
    one, seed = section["mutants"][at], section["first_seed"] + at
    path = plan.base / section["folder"] / MUTANT_PROGRAM
    if not path.is_file() or program_digest(path) != section["program"]:
        raise Lost(f"{path} is not the program that the plan has")
    words = ["explore", *one["words"], "--seed", str(seed), "--traces", str(section["traces"]), "--no-shrink", "--timeout", MUTANT_TIMEOUT,
             "--out", str(folder / "found"), "-q"]
    ran, data = run_for_json(words, plan.base, folder, plan.data["limit"], program_path=str(path), memory=MUTANT_MEMORY,
                             LOCKSTEP_MUTANT=str(one["number"]))
    if ran.returncode < 0:
        raise Lost(f"the program was ended by signal {-ran.returncode}")
    found: dict[str, Any] = {"count": 1, "text": last_line(ran), "trace": ""}
    if data is not None:
        findings = [{**found, "kind": first["kind"], "text": first["text"], "tests_to_detect": first["tests_to_detect"],
                     "trace": pathlib.Path(first["trace"]).read_text(encoding="utf-8")} for first in data["findings"][:1]]
    else:
        where = _TRACE.search(ran.stderr)
        kind = {SILENT: "never ends", DIED: "dies", 3: "dies"}.get(ran.returncode, "bad input")
        findings = [{**found, "kind": kind, "text": where[2] if where else found["text"],
                     "tests_to_detect": int(where[1]) if where else section["traces"]}]
    return {"seed": seed, "traces": data["search"]["traces_run"] if data else findings[0]["tests_to_detect"],
            "operations": data["search"]["operations"] if data else 0, "findings": findings, "defect": one["key"], "corpus": [], "drawn": {}}


def _explore(plan: Plan, section: dict[str, Any], seed: int, words: list[str], folder: pathlib.Path) -> dict[str, Any]:
    corpus = _own_folder(folder, "corpus")
    for file in corpus_files(plan, section["name"]):
        shutil.copy(file, corpus)
    before = {file.name for file in corpus.iterdir()}
    found = folder / "found"
    ran, data = run_for_json(["explore", *words, "--seed", str(seed), "--no-shrink", "--corpus", str(corpus), "--out", str(found), "-q"],
                             plan.base, folder, plan.data["limit"])
    _checked(ran)
    if ran.returncode == SILENT and data is None:  # a trace's processor time is the machine's, as the limit is
        return {"seed": seed, "over_limit": plan.data["limit"], "said": last_line(ran)}
    if ran.returncode == DIED and data is None:
        one = {"subject": section.get("subject", ""), "kind": "subject-died", "text": last_line(ran), "expected": "",
               "operation": "", "tests_to_detect": 0, "lines": 0, "trace": "", "words": words[:-6]}
        return {"seed": seed, "traces": 0, "operations": 0, "findings": _folded(section, [one]), "corpus": [], "drawn": {}}
    if data is None:
        return {"seed": seed, "cannot_run": last_line(ran) or f"the program ended with status {ran.returncode}"}
    search = data["search"]
    findings = [{"subject": one["subject"], "kind": one["kind"], "text": one["text"], "expected": one["expected"],
                 "operation": one["operation"], "tests_to_detect": one["tests_to_detect"], "lines": one["shrunk_lines"],
                 "trace": pathlib.Path(one["trace"]).read_text(encoding="utf-8"), "words": words_of(one["replay"])}
                for one in data["findings"]]
    added = [file.read_text(encoding="utf-8") for file in sorted(corpus.iterdir()) if file.name not in before]
    return {"seed": seed, "traces": search["traces_run"], "operations": search["operations"], "digest": data["digest"],
            "marks_missed": search["marks_missed"], "findings": _folded(section, findings),
            "drawn": {one["field"]: {value["value"]: value["traces"] for value in one["values"]} for one in search["drawn"]},
            "unsupported": sorted(one["text"] for one in search.get("unsupported", [])),
            "corpus": smallest_cover(added)[:CORPUS_A_UNIT]}


def _folded(section: dict[str, Any], findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One finding for each early key, the smallest one, with the number of all that have it."""
    by_key: dict[str, dict[str, Any]] = {}
    for one in findings:
        key = early_key(one, section["version"])
        before = by_key.get(key)
        count = before["count"] + 1 if before else 1
        first = min(one["tests_to_detect"], before["tests_to_detect"]) if before else one["tests_to_detect"]
        if before and (before["lines"], before["trace"]) <= (one["lines"], one["trace"]):
            one = before
        by_key[key] = {**one, "key": key, "count": count, "tests_to_detect": first}
    return [by_key[key] for key in sorted(by_key)]


def _server(plan: Plan, section: dict[str, Any], at: int, folder: pathlib.Path) -> dict[str, Any]:
    size = min(section["unit"], section["budget"] - at * section["unit"])
    seed = section["first_seed"] + at
    outcome = folder / "outcome.json"
    try:
        ran = nightly_server.run(["search", *shlex.split(section["server"]), "--seed", str(seed), "--requests", str(size),
                                  "--shrink-time", SHRINK_SECONDS, "--out", str(folder), "--json", str(outcome)], plan.base, plan.data["limit"])
    except subprocess.TimeoutExpired:
        raise calls.OverLimit from None
    _checked(ran)
    if not outcome.is_file():
        return {"seed": seed, "cannot_run": last_line(ran) or f"the search ended with status {ran.returncode}"}
    data = json.loads(outcome.read_text(encoding="utf-8"))
    findings = [{"subject": section["server"], "kind": one["finding"]["kind"], "text": one["finding"]["text"], "expected": "",
                 "operation": "", "features": sorted(one["features"]), "tests_to_detect": one["first_answer"], "lines": one["steps"],
                 "trace": (folder / f"{one['name']}.json").read_text(encoding="utf-8"), "words": []} for one in data["found"]]
    return {"seed": seed, "traces": data["lives"], "operations": data["answers"], "findings": _folded(section, findings),
            "corpus": [], "drawn": {}}


# --- Comparisons, replays, known findings ---------------------------------------------------------

def _compare(plan: Plan, section: dict[str, Any], at: int, folder: pathlib.Path) -> dict[str, Any]:
    cell = cell_of(section, at)
    words = ["compare", cell["workload"], "--policies", cell["policy"], "--capacity", cell["capacity"], "--model", cell["model"],
             "-q"]
    words += ["--config", section["config"]] if section["config"] else []
    words += ["--limit", str(section["requests"])] if section["requests"] else []
    ran, data = run_for_json(words, plan.base, folder, plan.data["limit"])
    _checked(ran)
    if data is None:
        return {**cell, "cannot_run": last_line(ran) or f"the program ended with status {ran.returncode}"}
    return {**cell, "digest": data["digest"], "row": data["policies"][0]}


def _replay(plan: Plan, section: dict[str, Any], at: int, folder: pathlib.Path) -> dict[str, Any]:
    failed = []
    files = section["files"][at * FILES_A_UNIT:(at + 1) * FILES_A_UNIT]
    for one in files:
        path = plan.base / one["file"]
        if not path.is_file() or digest_of(path.read_text(encoding="utf-8")) != one["digest"]:
            raise Lost(f"{one['file']} is not the file that the plan has")
        for words, kind in run_lines(path.read_text(encoding="utf-8"), one["file"]):
            ran = _checked(calls.run(words, plan.base, plan.data["limit"]))
            lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
            if not (ran.returncode == 0 if not kind else ran.returncode in FOUND and any(f": {kind} " in line for line in lines)):
                failed.append({"file": one["file"], "run": shlex.join(words), "finds": kind, "status": ran.returncode,
                               "text": lines[0] if lines else ""})
    return {"files": len(files), "failed": failed}


def run_lines(trace: str, file: str) -> list[tuple[list[str], str]]:
    """The `# run:` lines of a trace as words of the program, each with the kind of finding that `# finds:` states after it."""
    runs: list[tuple[list[str], str]] = []
    for line in trace.splitlines():
        if line.startswith("# run: lockstep "):
            runs.append(([file if word == "%s" else word for word in shlex.split(line)[3:]], ""))
        elif line.startswith("# finds: ") and runs:
            runs[-1] = (runs[-1][0], line.removeprefix("# finds: ").strip())
    return runs or [(["replay", file], "")]


def _known(plan: Plan, section: dict[str, Any], at: int, folder: pathlib.Path) -> dict[str, Any]:
    """Whether a finding of an earlier round is still there."""
    known = plan.known()[at]
    file = folder / ("known.json" if known["server"] else "known.trace")
    file.write_text(known["trace"], encoding="utf-8")
    if known["server"]:
        ran = nightly_server.replay(known["server"], file, plan.base)
    else:
        words = [*known["words"], *timeout_of(plan, known["section"]), "-q"]
        ran = calls.run(["replay", str(file), *words], plan.base, plan.data["limit"])
    _checked(ran)
    said = "" if ran.returncode in (0, *FOUND) else last_line(ran).replace(str(file), file.name)
    return {"key": known["key"], "status": ran.returncode, "said": said}


_PLAYERS = {"search": _search, "defects": _defect, "server": _server, "compare": _compare, "replay": _replay, "known": _known, "mutants": _mutant}


# --- Shrinking ------------------------------------------------------------------------------------

def shrink(plan: Plan, raw: dict[str, Any]) -> dict[str, Any]:
    """The shrunk form of a finding of the first set of shards: its trace, and what the trace shows."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        folder = pathlib.Path(name)
        file, small = folder / "raw.trace", folder / "small.trace"
        file.write_text(raw["trace"], encoding="utf-8")
        try:
            words = [*raw["words"], *timeout_of(plan, raw["section"]), "-q"]
            ran = _checked(calls.run(["shrink", str(file), *words, "-o", str(small)], plan.base, plan.data["limit"]))
            if ran.returncode not in FOUND or not small.is_file():
                return {"key": raw["key"], "said": last_line(ran).replace(str(file), file.name)}
            _, data = run_for_json(["replay", str(small), *words], plan.base, folder, plan.data["limit"])
        except calls.OverLimit:
            return {"key": raw["key"], "over_limit": plan.data["limit"]}
        found = next(iter((data or {}).get("findings", [])), None)
        if found is None:
            return {"key": raw["key"], "said": "the shrunk trace does not show it again"}
        trace = small.read_text(encoding="utf-8").replace(f"Shrunk from {file}.", origin_of(raw["trace"]))
        return {"key": raw["key"], "kind": found["kind"], "subject": found["subject"], "text": found["text"],
                "verb": verb_of(found), "field": field_of(found), "trace": trace,
                "lines": sum(1 for line in trace.splitlines() if line and line[0] not in "#-" and not line.startswith("config "))}


def origin_of(trace: str) -> str:
    """The sentence of a written finding that says which trace of which seed found it."""
    return next((line.removeprefix("# ") for line in trace.splitlines() if line.startswith("# Found by ")), "")
