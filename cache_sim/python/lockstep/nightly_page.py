"""The page of a nightly search: one static file in the style of `lockstep report`, which loads nothing."""
from __future__ import annotations

import contextlib
import html
import pathlib
from typing import Any, Iterable

from lockstep import program
from lockstep.counted import counted

_CHIPS = {"new": "bad", "came back": "bad", "still there": "found", "gone": "pass", "cannot be played": "public"}
_SIGNS = {"bad": "✗", "found": "◆", "pass": "✓", "public": "?"}
_NUMBER = ' class="number"'
_VERDICTS = {
    0: "Nothing new was found.",
    10: "There are new findings.",
    3: "This night proves nothing: a canary was not found, or a search could not start.",
    130: "The night was interrupted.",
}


def style() -> str:
    """The style sheet that `lockstep report` has in cache_sim/report/templates/style.css, which is installed with the program."""
    here = pathlib.Path(__file__).resolve().parent
    places = [here / "share" / "lockstep" / "style.css", here.parents[1] / "report" / "templates" / "style.css"]
    with contextlib.suppress(FileNotFoundError):  # a Debian package: /usr/bin/lockstep, /usr/share/lockstep
        places.append(pathlib.Path(program.path()).resolve().parents[1] / "share" / "lockstep" / "style.css")
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    return ""


def page(report: dict[str, Any]) -> str:
    """The whole page, from the data that nightly.json holds."""
    return "".join([
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>\n',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n",
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n',
        f"<title>Lockstep · night {report['night']}</title>\n<style>{style()}</style></head><body><main>\n",
        f"<h1>Night {report['night']} of the search</h1>\n",
        _banner(report), _tiles(report), _canaries(report), _subjects(report), _findings(report), _marks(report),
        _nights(report), "</main></body></html>\n"])


def _text(value: object) -> str:
    return html.escape(str(value))


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _chip(state: str) -> str:
    kind = _CHIPS[state]
    return f'<span class="chip {kind}">{_SIGNS[kind]} {_text(state)}</span>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[tuple[str, bool]]]) -> str:
    """Cells are HTML, and whether they are numbers, which is so for a whole column."""
    rows = [list(row) for row in rows]
    numbers = [number for _, number in rows[0]] if rows else []
    head = "".join(f'<th{_NUMBER if number else ""}>{name}</th>' for name, number in zip(heads, numbers))
    body = "".join("<tr>" + "".join(f'<td class="number">{cell}</td>' if number else f"<td>{cell}</td>"
                                    for cell, number in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'


def _states(report: dict[str, Any], *states: str) -> int:
    return sum(one["state"] in states for subject in report["subjects"] for one in subject["findings"])


def _banner(report: dict[str, Any]) -> str:
    good = " all" if report["status"] == 0 else ""
    return f'<p class="banner{good}">{_VERDICTS[report["status"]]} {_text(report["timing"]["date"])}.</p>\n'


def _tiles(report: dict[str, Any]) -> str:
    new = _states(report, "new", "came back")
    tiles = [(_count(sum(one["operations"] for one in report["subjects"])), "operations", ""),
             (_count(sum(one["traces"] for one in report["subjects"])), "traces", ""),
             (str(len(report["subjects"])), "searches", ""),
             (str(new), "new findings", "bad" if new else ""),
             (str(_states(report, "still there")), "known findings that are still there", ""),
             (str(_states(report, "gone")), "known findings that are gone", "")]
    items = "".join(f'<li class="{kind}"><data>{number}</data><span>{name}</span></li>' for number, name, kind in tiles)
    return f'<ul class="tiles">{items}</ul>\n'


def _canaries(report: dict[str, Any]) -> str:
    rows = [[(f"<code>{_text(one['defect'])}</code>", False),
             (f"found: <code>{_text(one['kind'])}</code>" if one["found"] else
              f'<span class="chip bad">✗ not found</span> {_text(one["said"])}', False),
             (_count(one["tests_to_detect"]), True), (str(one["seed"]), True)] for one in report["canaries"]]
    return ("<h2>Canaries</h2>\n<p>Defects that were planted into a policy on purpose. A search that does not find them "
            "would not find others either.</p>\n" + _table(("defect", "", "traces up to it", "seed"), rows))


def _subjects(report: dict[str, Any]) -> str:
    rows = []
    for one in report["subjects"]:
        beside = f" beside {_text(', '.join(one['beside']))}" if one["beside"] else ""
        what = f"<code>{_text(one['subject'])}</code>{beside}"
        if one["cannot_run"]:
            kind = "public" if one["optional"] else "bad"
            what += f'<br/><span class="chip {kind}">cannot run</span> {_text(one["cannot_run"])}'
        if one["unsupported"]:
            left_out = "".join(f"<li>{_text(text)}</li>" for text in one["unsupported"])
            what += f"<details><summary>{counted(len(one['unsupported']), 'form')} of operation left out</summary><ul>{left_out}</ul></details>"
        seeds = one["seeds"]
        rows.append([(_text(one["name"]), False), (what, False), (_count(one["operations"]), True),
                     (_count(one["operations_ever"]), True), (f"{len(one['marks'])} of {report['marks']}", True),
                     (f"{one['marks_ever']}", True),
                     (_text(f"{seeds[0]} … {seeds[-1]}" if len(seeds) > 1 else ", ".join(map(str, seeds))), True)])
    return ("<h2>Searches</h2>\n" + _table(("name", "subject", "operations", "of all nights", "marks reached",
                                            "of all nights", "seeds"), rows))


def _findings(report: dict[str, Any]) -> str:
    order = list(_CHIPS)
    found = sorted(((one, subject["name"]) for subject in report["subjects"] for one in subject["findings"]),
                   key=lambda pair: (order.index(pair[0]["state"]), pair[1]))
    parts = ["<h2>Findings</h2>\n" if found else ""]
    for one, name in found:
        lines = "".join(f"<li{_comment(line)}><code>{_text(line)}</code></li>" for line in one["trace_text"].splitlines())
        parts.append(
            f'<section class="run{" bad" if _CHIPS[one["state"]] == "bad" else ""}"><header><h3>{_text(name)}: '
            f'<code>{_text(one["kind"])}</code></h3>{_chip(one["state"])}</header>\n'
            f'<div class="finding"><p class="sentence">{_text(one["text"])}</p></div>\n'
            f'<p class="where">First found in night {one["first_night"]}. '
            f'<a href="{_text(one["trace"])}">{_text(one["trace"])}</a></p>\n<ol class="trace">{lines}</ol></section>\n')
    return "".join(parts)


def _comment(line: str) -> str:
    return ' class="comment"' if line.startswith("#") else ""


def _marks(report: dict[str, Any]) -> str:
    parts = ["<h2>Marks that no night has reached</h2>\n<p>Marks are places in the code of policies, oracles and the "
             "scheduler. A subject in a process of its own has none.</p>\n"]
    for one in report["subjects"]:
        names = ", ".join(f"<code>{_text(name)}</code>" for name in one["marks_missed_ever"]) or "none"
        parts.append(f"<details><summary>{_text(one['name'])}: {len(one['marks_missed_ever'])}</summary><p>{names}</p></details>\n")
    return "".join(parts)


def _nights(report: dict[str, Any]) -> str:
    rows = [[(str(one["night"]), True), (_text(one["date"]), False), (_count(one["operations"]), True),
             (str(one["new"]), True), (str(one["status"]), True)] for one in reversed(report["nights"])]
    return "<h2>Nights</h2>\n" + _table(("night", "date", "operations", "new findings", "exit status"), rows)
