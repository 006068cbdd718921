"""Times of a sweep: what no two runs have alike, and so stands outside sweep.json and index.html."""
from __future__ import annotations

import json
import pathlib
from typing import Any

from lockstep import html_parts
from lockstep.calls import write_whole
from lockstep.html_parts import count, table, text
from lockstep.sweep.plan import Plan

NIGHT_HOURS, NIGHT_CORES = 8, 1000


def write(plan: Plan, totals: dict[str, dict[str, Any]]) -> None:
    seconds: dict[str, float] = {one["name"]: 0.0 for one in plan.sections}
    processor: dict[str, float] = dict(seconds)
    units: dict[str, int] = dict.fromkeys(seconds, 0)
    hosts: dict[str, dict[str, float]] = {}
    whole = 0.0
    for file in _files(plan.folder / "times-done"):
        data = json.loads(file.read_text(encoding="utf-8"))
        whole += data["seconds"]
        host = hosts.setdefault(data["host"], {"shards": 0, "seconds": 0.0})
        host["shards"] += 1
        host["seconds"] += data["seconds"]
        for unit, spent, *computed in data["units"]:
            name = plan.section_of(unit)[0]["name"]
            seconds[name] += spent
            processor[name] += sum(computed)
            units[name] += 1
    rows = []
    for name, spent in seconds.items():
        total = totals[name]
        row: dict[str, Any] = {"name": name, "units": units[name], "seconds": round(spent, 3), "processor_seconds": round(processor[name], 3)}
        if taken := processor[name]:
            row.update(seeds_per_second=round(units[name] / taken, 4), traces_per_second=round(total["traces"] / taken, 1),
                       operations_per_second=round(total["operations"] / taken, 1),
                       traces_of_a_night=round(total["traces"] / taken * NIGHT_HOURS * 3600 * NIGHT_CORES))
        rows.append(row)
    played = sum(seconds.values())
    shrinking = sum(json.loads(file.read_text(encoding="utf-8"))["seconds"] for file in _files(plan.folder / "times-shrunk"))
    data = {"lockstep_sweep_times": 1, "seconds": round(whole, 3), "seconds_in_units": round(played, 3),
            "overhead": round(whole / played - 1, 5) if played else 0.0, "seconds_of_shrinking": round(shrinking, 3), "sections": rows,
            "hosts": [{"host": name, **{key: round(value, 3) for key, value in one.items()}} for name, one in sorted(hosts.items())]}
    write_whole(plan.folder / "times.json", json.dumps(data, indent=1) + "\n")
    write_whole(plan.folder / "times.html", _page(data))


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def _page(data: dict[str, Any]) -> str:
    rows = [[(text(one["name"]), False), (count(one["units"]), True), (f"{one['seconds']:.1f}", True), (f"{one['processor_seconds']:.1f}", True),
             (f"{one.get('seeds_per_second', 0):.2f}", True), (f"{one.get('traces_per_second', 0):,.0f}".replace(",", " "), True),
             (count(one.get("traces_of_a_night", 0)), True)] for one in data["sections"]]
    hosts = [[(text(one["host"]), False), (count(int(one["shards"])), True), (f"{one['seconds']:.1f}", True)] for one in data["hosts"]]
    return html_parts.page("times of a sweep", [
        "<h1>Times of the sweep</h1>\n", '<p><a href="index.html">The findings</a></p>\n',
        f"<p>The shards took {data['seconds']:.1f} s on one core each, {data['seconds_in_units']:.1f} s of them in their units; shrinking took "
        f"{data['seconds_of_shrinking']:.1f} s.</p>\n",
        "<h2>Searches</h2>\n<p>A unit is a search with one seed. Rates are by seconds of a processor, which a busy machine does not change. The last "
        "column is what the rate gives for this section alone in "
        f"{NIGHT_HOURS} hours on {NIGHT_CORES} cores.</p>\n",
        table(("name", "units", "seconds", "of a processor", "seeds a second", "traces a second", "traces of a night"), rows),
        "<h2>Machines</h2>\n", table(("host", "shards", "seconds"), hosts)])
