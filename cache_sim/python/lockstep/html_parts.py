"""Parts of static pages in the style of `lockstep report`, which load nothing: for the pages of `nightly` and `sweep`."""
from __future__ import annotations

import contextlib
import html
import pathlib
from typing import Iterable

from lockstep import program

_NUMBER = ' class="number"'


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


def page(title: str, body: Iterable[str], more_style: str = "") -> str:
    return "".join([
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>\n',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n",
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n',
        f"<title>Lockstep · {text(title)}</title>\n<style>{style()}{more_style}</style></head><body><main>\n",
        *body, "</main></body></html>\n"])


def text(value: object) -> str:
    return html.escape(str(value))


def count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def table(heads: Iterable[str], rows: Iterable[Iterable[tuple[str, bool]]]) -> str:
    """Cells are HTML, and whether they are numbers, which is so for a whole column."""
    rows = [list(row) for row in rows]
    numbers = [number for _, number in rows[0]] if rows else []
    head = "".join(f'<th{_NUMBER if number else ""}>{name}</th>' for name, number in zip(heads, numbers))
    body = "".join("<tr>" + "".join(f'<td class="number">{cell}</td>' if number else f"<td>{cell}</td>"
                                    for cell, number in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'


def tiles(all_tiles: Iterable[tuple[str, str, str]]) -> str:
    """Each tile: a number, its name, and `bad` or nothing."""
    items = "".join(f'<li class="{kind}"><data>{number}</data><span>{name}</span></li>' for number, name, kind in all_tiles)
    return f'<ul class="tiles">{items}</ul>\n'


def trace(lines: str) -> str:
    items = "".join(f"<li{_comment(line)}><code>{text(line)}</code></li>" for line in lines.splitlines())
    return f'<ol class="trace">{items}</ol>'


def _comment(line: str) -> str:
    return ' class="comment"' if line.startswith("#") else ""
