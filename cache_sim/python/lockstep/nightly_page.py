"""The page of a nightly search: one static file in the style of `lockstep report`, which loads nothing."""
from __future__ import annotations

from typing import Any

from lockstep import html_parts
from lockstep.counted import counted
from lockstep.html_parts import count, table, text, trace

_CHIPS = {"new": "bad", "came back": "bad", "still there": "found", "gone": "pass", "cannot be played": "public"}
_SIGNS = {"bad": "✗", "found": "◆", "pass": "✓", "public": "?"}
_VERDICTS = {
    0: "Nothing new was found.",
    10: "There are new findings.",
    3: "This night proves nothing: a canary was not found, or a search could not start.",
    130: "The night was interrupted.",
}


def page(report: dict[str, Any]) -> str:
    """The whole page, from the data that nightly.json holds."""
    return html_parts.page(f"night {report['night']}", [
        f"<h1>Night {report['night']} of the search</h1>\n",
        _banner(report), _tiles(report), _canaries(report), _subjects(report), _findings(report), _marks(report),
        _nights(report)])


def _chip(state: str) -> str:
    kind = _CHIPS[state]
    return f'<span class="chip {kind}">{_SIGNS[kind]} {text(state)}</span>'


def _states(report: dict[str, Any], *states: str) -> int:
    return sum(one["state"] in states for subject in report["subjects"] for one in subject["findings"])


def _banner(report: dict[str, Any]) -> str:
    good = " all" if report["status"] == 0 else ""
    return f'<p class="banner{good}">{_VERDICTS[report["status"]]} {text(report["timing"]["date"])}.</p>\n'


def _tiles(report: dict[str, Any]) -> str:
    new = _states(report, "new", "came back")
    tiles = [(count(sum(one["operations"] for one in report["subjects"])), "operations", ""),
             (count(sum(one["traces"] for one in report["subjects"])), "traces", ""),
             (str(len(report["subjects"])), "searches", ""),
             (str(new), "new findings", "bad" if new else ""),
             (str(_states(report, "still there")), "known findings that are still there", ""),
             (str(_states(report, "gone")), "known findings that are gone", "")]
    return html_parts.tiles(tiles)


def _canaries(report: dict[str, Any]) -> str:
    rows = [[(f"<code>{text(one['defect'])}</code>", False),
             (f"found: <code>{text(one['kind'])}</code>" if one["found"] else
              f'<span class="chip bad">✗ not found</span> {text(one["said"])}', False),
             (count(one["tests_to_detect"]), True), (str(one["seed"]), True)] for one in report["canaries"]]
    return ("<h2>Canaries</h2>\n<p>Defects that were planted into a policy on purpose. A search that does not find them "
            "would not find others either.</p>\n" + table(("defect", "", "traces up to it", "seed"), rows))


def _subjects(report: dict[str, Any]) -> str:
    rows = []
    for one in report["subjects"]:
        beside = f" beside {text(', '.join(one['beside']))}" if one["beside"] else ""
        what = f"<code>{text(one['subject'])}</code>{beside}"
        if one["cannot_run"]:
            kind = "public" if one["optional"] else "bad"
            what += f'<br/><span class="chip {kind}">cannot run</span> {text(one["cannot_run"])}'
        if one["unsupported"]:
            left_out = "".join(f"<li>{text(form)}</li>" for form in one["unsupported"])
            what += f"<details><summary>{counted(len(one['unsupported']), 'form')} of operation left out</summary><ul>{left_out}</ul></details>"
        seeds = one["seeds"]
        rows.append([(text(one["name"]), False), (what, False), (count(one["operations"]), True),
                     (count(one["operations_ever"]), True), (f"{len(one['marks'])} of {report['marks']}", True),
                     (f"{one['marks_ever']}", True),
                     (text(f"{seeds[0]} … {seeds[-1]}" if len(seeds) > 1 else ", ".join(map(str, seeds))), True)])
    return ("<h2>Searches</h2>\n" + table(("name", "subject", "operations", "of all nights", "marks reached",
                                            "of all nights", "seeds"), rows))


def _findings(report: dict[str, Any]) -> str:
    order = list(_CHIPS)
    found = sorted(((one, subject["name"]) for subject in report["subjects"] for one in subject["findings"]),
                   key=lambda pair: (order.index(pair[0]["state"]), pair[1]))
    parts = ["<h2>Findings</h2>\n" if found else ""]
    for one, name in found:
        parts.append(
            f'<section class="run{" bad" if _CHIPS[one["state"]] == "bad" else ""}"><header><h3>{text(name)}: '
            f'<code>{text(one["kind"])}</code></h3>{_chip(one["state"])}</header>\n'
            f'<div class="finding"><p class="sentence">{text(one["text"])}</p></div>\n'
            f'<p class="where">First found in night {one["first_night"]}. '
            f'<a href="{text(one["trace"])}">{text(one["trace"])}</a></p>\n{trace(one["trace_text"])}</section>\n')
    return "".join(parts)


def _marks(report: dict[str, Any]) -> str:
    parts = ["<h2>Marks that no night has reached</h2>\n<p>Marks are places in the code of policies, oracles and the "
             "scheduler. A subject in a process of its own has none.</p>\n"]
    for one in report["subjects"]:
        names = ", ".join(f"<code>{text(name)}</code>" for name in one["marks_missed_ever"]) or "none"
        parts.append(f"<details><summary>{text(one['name'])}: {len(one['marks_missed_ever'])}</summary><p>{names}</p></details>\n")
    return "".join(parts)


def _nights(report: dict[str, Any]) -> str:
    rows = [[(str(one["night"]), True), (text(one["date"]), False), (count(one["operations"]), True),
             (str(one["new"]), True), (str(one["status"]), True)] for one in reversed(report["nights"])]
    return "<h2>Nights</h2>\n" + table(("night", "date", "operations", "new findings", "exit status"), rows)
