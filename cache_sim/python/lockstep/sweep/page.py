"""The page of a sweep: one static file in the style of `lockstep report`, from the data of sweep.json."""
from __future__ import annotations

import math
from typing import Any

from lockstep import html_parts
from lockstep.counted import counted
from lockstep.html_parts import count, table, text, trace

_CHIPS = {"new": "bad", "came back": "bad", "still there": "found", "gone": "pass", "cannot be played": "public"}
_SIGNS = {"bad": "✗", "found": "◆", "pass": "✓", "public": "?"}
_VERDICTS = {
    0: "Nothing was found.",
    3: "This sweep proves nothing yet: shards are missing, a canary was not found, or a search could not run.",
    10: "There are findings.",
    12: "A unit was over its time limit.",
    13: "The same unit gave two different results.",
}
_STYLE = """
.histograms { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 12px 24px; }
.histograms h3 { margin: 0 0 4px; font-size: 1em; }
.histograms svg, .plots svg { width: 100%; height: auto; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 24px; }
svg text { fill: var(--ink); font: 11px sans-serif; }
"""
BARS = 24
_COLOURS = ("--blue", "--good", "--bad", "--wrong", "--orange", "--grey", "--dim")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


def page(report: dict[str, Any]) -> str:
    """The whole page."""
    return html_parts.page(f"sweep, round {report['round']}", [
        f"<h1>Round {report['round']} of the sweep</h1>\n", _banner(report), _tiles(report), _missing(report), _findings(report),
        _canaries(report), _sections(report), _defects(report), _marks(report), _comparisons(report), _replays(report),
        _drawn(report), _corpus(report)], _STYLE)


def _banner(report: dict[str, Any]) -> str:
    good = " all" if report["status"] == 0 else ""
    return (f'<p class="banner{good}">{_VERDICTS[report["status"]]} Plan {text(report["plan"])}, build {text(report["version"])} '
            f'({text(report["build"])}). <a href="times.html">Times</a></p>\n')


def _tiles(report: dict[str, Any]) -> str:
    totals = report["totals"]
    new = sum(one["state"] in ("new", "came back") for one in report["findings"])
    there = sum(one["state"] == "still there" for one in report["findings"])
    return html_parts.tiles([
        (count(totals["traces"]), "traces", ""), (count(totals["operations"]), "operations", ""),
        (count(totals["requests"]), "requests compared", ""), (f"{count(totals['units'])} of {count(totals['units_planned'])}", "units", ""),
        (count(new), "new findings", "bad" if new else ""), (count(there), "known findings that are still there", ""),
        (count(totals["occurrences"]), "times something was found", "")])


def _ranges(numbers: list[int]) -> str:
    """`0…3, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}…{last}" for first, last in parts)


def _missing(report: dict[str, Any]) -> str:
    said = []
    if report["missing"]:
        said.append(f"{counted(len(report['missing']), 'shard')} missing: {_ranges(report['missing'])}")
    if report["missing_to_shrink"]:
        said.append(f"Findings are not shrunk: {counted(len(report['missing_to_shrink']), 'shard')} of the second set missing: "
                    f"{_ranges(report['missing_to_shrink'])}")
    said += [f"<code>{text(name)}</code> is of another build or plan, or is damaged; it is not counted" for name in report["foreign"]]
    said += [f"{text(one['text'])} ({counted(one['times'], 'time')})" for one in report["lost"]]
    said += [f"{text(one['name'])} was left out when the sweep was planned: {text(one['text'])}" for one in report["left_out"]]
    return "<ul>" + "".join(f"<li>{one}</li>\n" for one in said) + "</ul>\n" if said else ""


def _findings(report: dict[str, Any]) -> str:
    parts = ["<h2>Findings</h2>\n" if report["findings"] or report["own_findings"] else ""]
    for one in report["own_findings"]:
        what = {"sweep-not-deterministic": "two copies of this unit had different results",
                "sweep-over-limit": f"the unit had not ended after {one.get('limit')} s"}[one["kind"]]
        parts.append(f'<section class="run bad"><header><h3><code>{one["kind"]}</code>: {text(one["section"])}</h3></header>\n'
                     f'<div class="finding"><p class="sentence">Unit {text(one["unit"])}: {what}. '
                     f"<code>lockstep sweep run DIR --unit {text(one['unit'])}</code> plays it again.</p></div></section>\n")
    for one in report["findings"]:
        kind = _CHIPS[one["state"]]
        chip = f'<span class="chip {kind}">{_SIGNS[kind]} {text(one["state"])}</span>'
        where = f"{text(one['subject'])}, {text(one['version'])}; key {one['key']}"
        where += f"; {counted(one['count'], 'time')}, first by test {count(one['tests_to_detect'])} of seed {one['seed']}" if one["count"] else ""
        where += f"; first found in round {one['first_round']}" + ("" if one["shrunk"] else "; not shrunk")
        said = f'<p>{text(one["said"])}</p>' if one["said"] else ""
        file = f' <a href="{text(one["file"])}">{text(one["file"])}</a>' if one.get("file") else ""
        parts.append(f'<section class="run{" bad" if kind == "bad" else ""}"><header><h3>{text(one["section"])}: <code>{text(one["kind"])}</code></h3>'
                     f'{chip}</header>\n<div class="finding"><p class="sentence">{text(one["text"])}</p>{said}</div>\n'
                     f'<p class="where">{where}.{file}</p>\n{trace(one["trace"])}</section>\n')
    return "".join(parts)


def _canaries(report: dict[str, Any]) -> str:
    rows = [[(f"<code>{text(one['defect'])}</code>", False),
             (f"found: <code>{text(one['kind'])}</code>" if one["found"] else '<span class="chip bad">✗ not found</span>', False),
             (count(one["tests_to_detect"]), True), (str(one["seed"]), True)] for one in report["canaries"]]
    traces = "".join(f"<details><summary>{text(one['text'])}</summary>{trace(one['trace'])}</details>\n" for one in report["canaries"] if one["found"])
    return ("<h2>Canaries</h2>\n<p>Defects that were planted into a policy on purpose. A sweep that does not find them has failed.</p>\n" +
            table(("defect", "", "traces up to it", "seed"), rows) + traces)


def _sections(report: dict[str, Any]) -> str:
    rows = []
    for one in report["sections"]:
        beside = f" beside {text(', '.join(one['beside']))}" if one.get("beside") else ""
        what = f"<code>{text(one.get('subject', one['kind']))}</code>{beside}"
        if one["cannot_run"]:
            what += f'<br/><span class="chip bad">cannot run</span> {text(one["cannot_run"])}'
        if one["unsupported"]:
            left_out = "".join(f"<li>{text(form)}</li>" for form in one["unsupported"])
            what += f"<details><summary>{counted(len(one['unsupported']), 'form')} of operation left out</summary><ul>{left_out}</ul></details>"
        seeds = " … ".join(map(str, one["seeds"])) if "seeds" in one else ""
        rows.append([(text(one["name"]), False), (what, False), (text(one["version"]), False),
                     (f"{count(one['units'])} of {count(one['units_planned'])}", True), (count(one["traces"]), True),
                     (count(one["operations"]), True), (count(one["occurrences"]), True), (seeds, True)])
    return "<h2>Sections</h2>\n" + table(("name", "subject", "version", "units", "traces", "operations", "found", "seeds"), rows)


def _defects(report: dict[str, Any]) -> str:
    if not report["defects"]:
        return ""
    rows = [[(f"<code>{text(one['defect'])}</code>", False),
             (f"<code>{text(one['kind'])}</code>" if one["found"] else '<span class="chip public">? not found</span>', False),
             (f"{count(one['found_by'])} of {count(one['searches'])}", True), ("" if one["median"] is None else count(one["median"]), True),
             (count(one["tests_to_detect"] if one["found"] else one["traces"]), True), (str(one["seed"]), True)] for one in report["defects"]]
    found = sum(one["found"] for one in report["defects"])
    return (f"<h2>Planted defects by tests to detect</h2>\n<p>{found} of {len(rows)} were found. The others were not, within the number of traces "
            "that stands there.</p>\n" + table(("defect", "found as", "found by", "median traces", "fewest traces", "seed"), rows))


def _marks(report: dict[str, Any]) -> str:
    if report["marks_never_reached"] is None:
        return ""
    names = ", ".join(f"<code>{text(name)}</code>" for name in report["marks_never_reached"]) or "none"
    parts = ["<h2>Marks never reached</h2>\n<p>Marks are places in the code of policies, oracles and the scheduler. A subject in a "
             f"process of its own has none. By no search: {names}.</p>\n"]
    for one in report["sections"]:
        if one["marks_missed"]:
            names = ", ".join(f"<code>{text(name)}</code>" for name in one["marks_missed"])
            parts.append(f"<details><summary>{text(one['name'])}: {len(one['marks_missed'])}</summary><p>{names}</p></details>\n")
    return "".join(parts)


def _replays(report: dict[str, Any]) -> str:
    replays = report["replays"]
    if not replays["files"]:
        return ""
    rows = [[(f"<code>{text(one['file'])}</code>", False), (text(one["finds"] or "nothing"), False), (str(one["status"]), True),
             (text(one["text"]), False)] for one in replays["failed"]]
    return (f"<h2>Replayed traces</h2>\n<p>{count(replays['files'])} were played as their run lines say; {len(rows)} did not end so.</p>\n" +
            (table(("file", "should find", "exit status", ""), rows) if rows else ""))


def _corpus(report: dict[str, Any]) -> str:
    rows = [[(text(one["section"]), False), (count(one["sets_of_marks"]), True), (count(one["traces"]), True)]
            for one in report["corpus"] if one["traces"]]
    return ("<h2>Corpus of the next round</h2>\n<p>Of each set of marks the smallest trace was taken, and of these the ones that reach a pair of "
            "marks that no smaller one does.</p>\n" + table(("section", "sets of marks", "traces"), rows)) if rows else ""


# --- Pictures -------------------------------------------------------------------------------------

def _drawn(report: dict[str, Any]) -> str:
    shown = [one for one in report["drawn"] if len(one["values"]) > 1]
    if not shown:
        return ""
    parts = ["<h2>Drawn configurations</h2>\n<p>How many fresh traces drew each value. Numbers above 16 are counted at the power of two below them.</p>\n"
             '<div class="histograms">']
    for one in shown:
        parts.append(f"<figure><h3><code>{text(one['field'])}</code></h3>{_histogram(one['values'])}</figure>\n")
    return "".join([*parts, "</div>\n"])


def _histogram(values: list[dict[str, Any]]) -> str:
    if len(values) > BARS:  # a text with many forms
        often = sorted(values, key=lambda one: (-one["traces"], one["value"]))
        rest = often[BARS - 1:]
        values = [*often[:BARS - 1], {"value": f"{len(rest)} others", "traces": sum(one["traces"] for one in rest)}]
    most = max(one["traces"] for one in values)
    rows = []
    for at, one in enumerate(values):
        y = at * 16
        width = 130 * one["traces"] / most
        rows.append(f'<text x="96" y="{y + 12}" text-anchor="end">{text(one["value"] or "none")[:18]}</text>'
                    f'<rect x="100" y="{y + 2}" width="{width:.1f}" height="12" fill="var(--blue)"/>'
                    f'<text x="{104 + width:.1f}" y="{y + 12}">{count(one["traces"])}</text>')
    return f'<svg viewBox="0 0 300 {16 * len(values)}" role="img">{"".join(rows)}</svg>'


def _comparisons(report: dict[str, Any]) -> str:
    if not report["comparisons"]:
        return ""
    parts = ["<h2>Comparisons</h2>\n<p>Hit ratio of prompt tokens by capacity. The thick line is the frontier: the best policy of each capacity.</p>\n"
             '<div class="plots">']
    for grid in report["comparisons"]:
        best = "; ".join(f"{_capacity(one['capacity'])}: {text(one['policy'])} {100 * one['hit_ratio']:.1f} %" for one in grid["frontier"])
        parts.append(f"<figure><h3><code>{text(grid['workload'])}</code>, {text(grid['model'])}</h3>{_plot(grid)}<figcaption>{best}</figcaption></figure>\n")
    return "".join([*parts, "</div>\n"])


def _capacity(value: Any) -> str:
    if value == "inf":
        return "∞"
    return f"{value / 2**30:g} GiB" if value >= 2**30 else f"{value / 2**20:g} MiB"


def _plot(grid: dict[str, Any]) -> str:
    capacities = sorted({_number(row["capacity"]) for row in grid["rows"]})
    finite = [one for one in capacities if math.isfinite(one)]
    low, high = math.log(finite[0]) if finite else 0.0, math.log(finite[-1]) if finite else 1.0
    steps = len(capacities)

    def x(capacity: float) -> float:
        if not math.isfinite(capacity):
            return 400.0
        right = 340.0 if len(finite) < steps else 400.0
        return 50 + (right - 50) * ((math.log(capacity) - low) / (high - low) if high > low else 0.5)

    def y(ratio: float) -> float:
        return 210 - 190 * ratio

    parts = [f'<line x1="50" y1="{y(one)}" x2="400" y2="{y(one)}" stroke="var(--rule)"/><text x="44" y="{y(one) + 4}" text-anchor="end">'
             f'{100 * one:.0f} %</text>' for one in (0, 0.25, 0.5, 0.75, 1)]
    parts += [f'<text x="{x(one):.1f}" y="226" text-anchor="middle">{_capacity(int(one) if math.isfinite(one) else "inf")}</text>' for one in capacities]
    frontier = [(x(_number(one["capacity"])), y(one["hit_ratio"])) for one in grid["frontier"]]
    parts.append(f'<polyline points="{_points(frontier)}" fill="none" stroke="var(--grey)" stroke-width="7" opacity="0.5"/>')
    policies = sorted({row["policy"] for row in grid["rows"]})
    for at, policy in enumerate(policies):
        points = sorted((x(_number(row["capacity"])), y(row["hit_ratio"])) for row in grid["rows"] if row["policy"] == policy)
        colour, dash = _COLOURS[at % len(_COLOURS)], _DASHES[at // len(_COLOURS) % len(_DASHES)]
        parts.append(f'<polyline points="{_points(points)}" fill="none" stroke="var({colour})" stroke-width="1.5" stroke-dasharray="{dash}"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="var({colour})"/>' for px, py in points]
        row = 244 + 14 * at
        parts.append(f'<line x1="50" y1="{row}" x2="80" y2="{row}" stroke="var({colour})" stroke-width="1.5" stroke-dasharray="{dash}"/>'
                     f'<text x="86" y="{row + 4}">{text(policy)}</text>')
    return f'<svg viewBox="0 0 420 {250 + 14 * len(policies)}" role="img">{"".join(parts)}</svg>'


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _number(capacity: Any) -> float:
    return math.inf if capacity == "inf" else float(capacity)
