"""Folds the shards that are there into one report, at any time and any number of times.

Folding is sums, unions and minima, so the order of the shards and their number change nothing. One shard is in memory at a time.
"""
from __future__ import annotations

import json
import math
import pathlib
import statistics
from typing import Any, Iterator

from lockstep.calls import FOUND, write_whole
from lockstep.sweep import times
from lockstep.sweep.corpus import keep_smallest, smallest_cover
from lockstep.sweep.keys import field_of, final_key, verb_of
from lockstep.sweep.page import page
from lockstep.sweep.plan import Plan, read_plan
from lockstep.sweep.publish import publish, text_of
from lockstep.sweep.shard import PLAYED, SHRUNK, data_of

NEW, THERE, GONE, BACK, UNPLAYABLE = "new", "still there", "gone", "came back", "cannot be played"
OPEN = (NEW, BACK, THERE)
RANKS = {NEW: 0, BACK: 0, THERE: 0, UNPLAYABLE: 1, GONE: 2}
NOT_DETERMINISTIC, OVER_LIMIT = "sweep-not-deterministic", "sweep-over-limit"


class Shards:
    """The results of one set of shards, one after another."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self.name = plan, name
        self.missing: list[int] = []
        self.foreign: list[str] = []  # files that are of another build or plan, or no results at all

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        folder = self._plan.folder / self.name
        names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
        self.foreign = sorted(f"{self.name}/{name}" for name in names if ".foreign-" in name)
        for index in range(self._plan.shards):
            if f"{index}.json" not in names:
                self.missing.append(index)
                continue
            path = folder / f"{index}.json"
            data = data_of(self._plan, path, path.read_text(encoding="utf-8", errors="replace"))
            if data is None:
                self.foreign.append(f"{self.name}/{index}.json")
                self.missing.append(index)
                continue
            yield data["units"]


class Merged:
    """The fold of all results of the first set of shards."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.findings: dict[str, dict[str, Any]] = {}  # by early key: the smallest trace, and the number of all
        self.corpora: dict[str, dict[tuple[str, ...], str]] = {}
        self.sections: dict[str, dict[str, Any]] = {one["name"]: {"traces": 0, "operations": 0, "units": 0, "findings": 0, "marks_missed": None,
                                       "unsupported": set(), "cannot_run": None} for one in plan.sections}
        self.drawn: dict[str, dict[str, int]] = {}
        self.cells: list[dict[str, Any]] = []
        self.defects: dict[tuple[str, bool], dict[str, Any]] = {}
        self.over_limit: list[dict[str, Any]] = []
        self.replays: dict[str, Any] = {"files": 0, "failed": []}
        self.known: dict[str, dict[str, Any]] = {}
        self.shards = Shards(plan, PLAYED)
        self._kinds = {one["name"]: one for one in plan.sections}
        for results in self.shards:
            for one in results:
                self._take(one)

    def _take(self, one: dict[str, Any]) -> None:
        section = self._kinds[one["section"]]
        total = self.sections[one["section"]]
        total["units"] += 1
        if "over_limit" in one:
            self.over_limit.append({"unit": one["unit"], "section": one["section"], "limit": one["over_limit"]})
            return
        if one.get("cannot_run"):
            total["cannot_run"] = min(filter(None, (total["cannot_run"], one["cannot_run"])))
            return
        total["traces"] += one.get("traces", 0)
        total["operations"] += one.get("operations", 0)
        total["unsupported"].update(one.get("unsupported", []))
        kind = section["kind"]
        if kind == "search" and one.get("marks_missed") is not None:
            missed = set(one["marks_missed"])
            total["marks_missed"] = missed if total["marks_missed"] is None else total["marks_missed"] & missed
        if kind in ("defects", "mutants"):
            found = one["findings"][0] if one["findings"] else None
            self._take_defect({"unit": one["unit"], "defect": one["defect"], "seed": one["seed"], "canary": bool(section.get("canary")),
                                 "found": found is not None, "kind": found["kind"] if found else "", "traces": one["traces"],
                                 "tests_to_detect": found["tests_to_detect"] if found else 0,
                                 "text": found["text"] if found else "", "trace": found["trace"] if found else ""})
        elif kind == "compare":
            self.cells.append(one)
        elif kind == "replay":
            self.replays["files"] += one["files"]
            self.replays["failed"] += one["failed"]
        elif kind == "known":
            self.known[one["key"]] = one
        if kind in ("search", "server"):
            self._take_search(section, one, total)

    def _take_defect(self, entry: dict[str, Any]) -> None:
        """Of the searches for one defect, by its seeds, or one mutant, by its policies, the one that found it first stands for it."""
        name = entry["defect"], entry["canary"]
        first = min(entry, self.defects.get(name, entry), key=lambda one: (not one["found"], one["tests_to_detect"], one["unit"]))
        tests = [*self.defects.get(name, {}).get("tests", []), entry["tests_to_detect"] if entry["found"] else math.inf]
        self.defects[name] = {**first, "tests": tests}

    def _take_search(self, section: dict[str, Any], one: dict[str, Any], total: dict[str, Any]) -> None:
        for field, values in one["drawn"].items():
            counts = self.drawn.setdefault(field, {})
            for value, count in values.items():
                counts[value] = counts.get(value, 0) + count
        keep_smallest(self.corpora.setdefault(section["name"], {}), one["corpus"])
        for found in one["findings"]:
            total["findings"] += found["count"]
            entry = {**found, "section": section["name"], "version": section["version"], "server": section.get("server", ""),
                     "unit": one["unit"], "seed": one["seed"]}
            before = self.findings.get(found["key"])
            if before is None:
                self.findings[found["key"]] = entry
                continue
            count = before["count"] + found["count"]
            tests = min(before["tests_to_detect"], found["tests_to_detect"])
            if (entry["lines"], entry["trace"], entry["unit"]) < (before["lines"], before["trace"], before["unit"]):
                before = self.findings[found["key"]] = entry
            before["count"], before["tests_to_detect"] = count, tests

    def is_complete(self) -> bool:
        return not self.shards.missing

    def to_shrink(self) -> list[dict[str, Any]]:
        """The findings of the second set of shards: each early key's smallest trace."""
        return [{"key": key, "section": one["section"], "trace": one["trace"], "words": one["words"]} for key, one in sorted(self.findings.items())
                if not one["server"] and one["kind"] != "nondeterministic" and one["trace"]]


def differing(plan: Plan) -> list[dict[str, Any]]:
    """Units of which two copies of a shard had different results."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((plan.folder / "differs").glob("*.json")):
        for one in json.loads(file.read_text(encoding="utf-8")):
            name = str(one["first"].get("unit", one["first"].get("key")))
            found.setdefault(name, {"set": one["set"], "unit": name, "section": one["first"].get("section", ""), "copies": 2})
    return [found[name] for name in sorted(found)]


def _entry_of(plan: Plan, early: dict[str, Any], shrunk: dict[str, Any] | None) -> dict[str, Any]:
    """A finding of the report from its early and its shrunk form."""
    entry = {name: early[name] for name in ("section", "subject", "version", "kind", "text", "trace", "lines", "count", "tests_to_detect",
                                            "unit", "seed", "words", "server")}
    entry.update(verb=verb_of(early), field=field_of(early), key=early["key"], shrunk=bool(early["server"]), said="",
                 early_keys=[early["key"]])
    if shrunk is None:
        return entry
    if "trace" not in shrunk:
        entry["said"] = shrunk.get("said") or "it was not shrunk within the time limit"
        return entry
    entry.update({name: shrunk[name] for name in ("kind", "subject", "text", "verb", "field", "trace", "lines")})
    entry.update(key=final_key(shrunk, early["version"]), shrunk=True)
    return entry


def findings_of(plan: Plan, merged: Merged, shrunk: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One finding a key, ranked: failing before gone, cheaper, older."""
    by_key: dict[str, dict[str, Any]] = {}
    for early_key in sorted(merged.findings):
        entry = _entry_of(plan, merged.findings[early_key], shrunk.get(early_key))
        before = by_key.get(entry["key"])
        if before is None:
            by_key[entry["key"]] = entry
            continue
        folded = {"count": before["count"] + entry["count"], "tests_to_detect": min(before["tests_to_detect"], entry["tests_to_detect"]),
                  "early_keys": sorted({*before["early_keys"], *entry["early_keys"]})}
        smaller = min(before, entry, key=lambda one: (one["lines"], one["trace"], one["unit"]))
        by_key[entry["key"]] = {**smaller, **folded}
    known = {one["key"]: one for one in plan.known()}
    for key, entry in by_key.items():
        before = known.get(key) or next((one for one in known.values() if set(one["early_keys"]) & set(entry["early_keys"])), None)
        entry["first_round"] = before["first_round"] if before else plan.data["round"]
        entry["state"] = NEW if before is None else BACK if before["state"] == GONE else THERE
        if entry["said"]:
            entry["state"] = UNPLAYABLE
    for key, before in known.items():
        if any(key == one["key"] or set(before["early_keys"]) & set(one["early_keys"]) for one in by_key.values()):
            continue
        played = merged.known.get(key)
        status = played["status"] if played else None
        state = before["state"] if status is None else GONE if status == 0 else \
            (BACK if before["state"] == GONE else THERE) if status in FOUND else UNPLAYABLE
        by_key[key] = {**before, "state": state, "said": played["said"] if played else "", "count": 0}
    return sorted(by_key.values(), key=lambda one: (RANKS[one["state"]], one["lines"], one["tests_to_detect"], one["first_round"],
                                                    one["seed"], one["key"]))


def frontier(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The policies that hit most for a capacity, and more than any policy with less memory."""
    best: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda one: (bytes_of(one["capacity"]), -one["hit_ratio"], one["policy"])):
        if not best or row["hit_ratio"] > best[-1]["hit_ratio"]:
            best.append({name: row[name] for name in ("capacity", "policy", "hit_ratio")})
    return best


def bytes_of(capacity: Any) -> float:
    return float("inf") if capacity == "inf" else float(capacity)


def _comparisons(merged: Merged) -> list[dict[str, Any]]:
    grids: dict[tuple[str, str, str], dict[str, Any]] = {}
    for cell in sorted(merged.cells, key=lambda one: one["unit"]):
        grid = grids.setdefault((cell["section"], cell["workload"], cell["model"]),
                                {"section": cell["section"], "workload": cell["workload"], "model": cell["model"], "rows": []})
        grid["rows"].append({**cell["row"], "policy": cell["policy"], "asked": cell["capacity"]})
    for grid in grids.values():
        grid["frontier"] = frontier(grid["rows"])
    return list(grids.values())


def _median(tests: list[float]) -> int | None:
    """The median number of traces up to a finding; None where half of the searches or more found nothing."""
    median = statistics.median_low(tests)
    return None if median == math.inf else int(median)


def report_of(plan: Plan, merged: Merged, shrunk: dict[str, dict[str, Any]], missing_to_shrink: list[int], foreign: list[str],
              lost: list[dict[str, Any]]) -> dict[str, Any]:
    findings = findings_of(plan, merged, shrunk)
    canaries = [one for one in merged.defects.values() if one["canary"]]
    own = [{"kind": NOT_DETERMINISTIC, **one} for one in differing(plan)]
    own += [{"kind": OVER_LIMIT, **one} for one in sorted(merged.over_limit, key=lambda one: one["unit"])]
    sections = []
    never: set[str] | None = None
    for section in plan.sections:
        total = merged.sections[section["name"]]
        missed = total["marks_missed"]
        row: dict[str, Any] = {name: section[name] for name in ("name", "kind", "subject", "beside", "version") if name in section}
        row.update(traces=total["traces"], operations=total["operations"], units=total["units"], units_planned=section["units"],
                   occurrences=total["findings"], marks_missed=None if missed is None else sorted(missed),
                   unsupported=sorted(total["unsupported"]), cannot_run=total["cannot_run"] or "")
        if "first_seed" in section:
            row["seeds"] = [section["first_seed"], section["first_seed"] + section["units"] - 1]
        sections.append(row)
        if missed is not None:
            never = missed if never is None else never & missed
    complete = merged.is_complete()
    shrunk_all = complete and not missing_to_shrink
    status = _status(findings, own, canaries, sections, merged, complete)
    corpora = {name: smallest_cover(kept.values()) for name, kept in sorted(merged.corpora.items())}
    return {
        "lockstep_sweep": 1, "round": plan.data["round"], "plan": plan.digest, "version": plan.data["version"], "build": plan.data["build"],
        "status": status, "verdict": {0: "nothing found", 3: "failed", 10: "findings", 12: "findings", 13: "findings"}[status],
        "complete": complete, "shrunk": shrunk_all, "missing": merged.shards.missing, "missing_to_shrink": missing_to_shrink,
        "foreign": foreign, "lost": lost, "left_out": plan.data["left_out"],
        "totals": {"units": sum(one["units"] for one in sections), "units_planned": plan.units,
                   "traces": sum(one["traces"] for one in sections), "operations": sum(one["operations"] for one in sections),
                   "requests": sum(cell["row"]["requests"] for cell in merged.cells),
                   "occurrences": sum(one["occurrences"] for one in sections)},
        "canaries": [{name: one[name] for name in ("defect", "seed", "found", "kind", "tests_to_detect", "text", "trace")}
                     for one in sorted(canaries, key=lambda one: one["unit"])],
        "sections": sections, "findings": findings, "own_findings": own,
        "defects": [{**{name: one[name] for name in ("defect", "found", "kind", "tests_to_detect", "traces", "seed")},
                     "searches": len(one["tests"]), "found_by": len(one["tests"]) - one["tests"].count(math.inf), "median": _median(one["tests"])}
                    for one in sorted(merged.defects.values(), key=lambda one: (-statistics.median_low(one["tests"]), one["defect"]))
                    if not one["canary"]],
        "marks_never_reached": None if never is None else sorted(never),
        "drawn": [{"field": field, "values": [{"value": value, "traces": count} for value, count in sorted(counts.items(), key=_by_value)]}
                  for field, counts in sorted(merged.drawn.items())],
        "comparisons": _comparisons(merged),
        "replays": {"files": merged.replays["files"], "failed": sorted(merged.replays["failed"], key=lambda one: one["file"])},
        "corpus": [{"section": name, "traces": len(traces), "sets_of_marks": len(merged.corpora[name])} for name, traces in corpora.items()],
    }


def _by_value(item: tuple[str, int]) -> tuple[bool, float, str]:
    value = item[0]
    number = value.lstrip("-").isdigit()
    return not number, float(value) if number else 0.0, value


def _status(findings: list[dict[str, Any]], own: list[dict[str, Any]], canaries: list[dict[str, Any]], sections: list[dict[str, Any]],
            merged: Merged, complete: bool) -> int:
    if complete and not all(one["found"] for one in canaries):
        return 3
    if any(one["state"] in OPEN for one in findings) or merged.replays["failed"]:
        return 10
    if own:
        return 13 if any(one["kind"] == NOT_DETERMINISTIC for one in own) else 12
    if not complete or any(one["cannot_run"] for one in sections) or any(one["state"] == UNPLAYABLE for one in findings):
        return 3
    return 0


def lost_of(plan: Plan, missing: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Why shards that are missing still are, as far as their runs could say it."""
    found: dict[tuple[str, int, str], int] = {}
    for file in sorted((plan.folder / "lost").glob("*.json")):
        one = json.loads(file.read_text(encoding="utf-8"))
        if one["index"] in missing.get(one["set"], []):
            found[one["set"], one["index"], one["text"]] = found.get((one["set"], one["index"], one["text"]), 0) + 1
    return [{"set": key[0], "index": key[1], "text": key[2], "times": number} for key, number in sorted(found.items())]


def merge(folder: pathlib.Path) -> tuple[dict[str, Any], Merged]:
    """Reads all results and writes sweep.json, index.html, findings/ and, beside these, what no two runs have alike: times.json,
    times.html. Once the first set of shards is complete, writes keys.json, with which the second set begins."""
    plan = read_plan(folder)
    merged = Merged(plan)
    to_shrink = merged.to_shrink()
    if merged.is_complete():
        publish(folder / "keys.json", text_of({"plan": plan.digest, "findings": to_shrink}))
    second = Shards(plan, SHRUNK)
    shrunk = {one["key"]: one for results in second for one in results}
    wanted = {at % plan.shards for at in range(len(to_shrink))} if merged.is_complete() else set()
    missing_to_shrink = sorted(set(second.missing) & wanted)
    lost = lost_of(plan, {PLAYED: merged.shards.missing, SHRUNK: missing_to_shrink})
    report = report_of(plan, merged, shrunk, missing_to_shrink, merged.shards.foreign + second.foreign, lost)
    _write_traces(folder / "findings", report["findings"])
    write_whole(folder / "sweep.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / "index.html", page(report))
    times.write(plan, merged.sections)
    return report, merged


def _write_traces(folder: pathlib.Path, findings: list[dict[str, Any]]) -> None:
    names = set()
    for one in findings:
        if not one["trace"]:
            continue
        one["file"] = f"findings/{one['key']}.{'json' if one['server'] else 'trace'}"
        folder.mkdir(exist_ok=True)
        (folder.parent / one["file"]).write_text(one["trace"], encoding="utf-8")  # the next merge writes it again
        names.add(folder.parent / one["file"])
    for file in folder.glob("*"):
        if file not in names:
            file.unlink(missing_ok=True)  # of an earlier merge, before the finding was shrunk
