#!/usr/bin/env python3
# ctest: name=report.pages_in_a_browser labels=full timeout=1200 skip=77 args="--program {lockstep}"
"""The pages of `lockstep report` in a real browser: at a phone's and a desk's width, by day and by night, no page is wider
than its window, none writes an error to the console, every link leads to something, text is large enough to read, and the
filter of the index, the boxes of legends and folded rows hide what they should. Skipped (77) where there is no Chromium.

    properties/cache_sim/report/report_browser_test.py --program build/current/lockstep
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from typing import Any

_SKIPPED = 77
_WIDTHS = (390, 1280)
_SCHEMES = ("light", "dark")
_TALLEST_INDEX_PX = 8000  # at the last width
_LONGEST_ROW = 1_300  # bytes of the index for each trace, all else included
_SMALLEST_TEXT_PX = 9  # as it is shown: pictures that are scaled down shrink theirs

_LOOK = """(() => {
  const visible = (element) => element.checkVisibility ? element.checkVisibility() : true;
  const small = [...document.querySelectorAll("svg text")].filter(visible).map((text) => {
    const svg = text.ownerSVGElement;
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return parseFloat(getComputedStyle(text).fontSize) * (scale || 1);
  });
  return JSON.stringify({
    width: document.documentElement.scrollWidth,
    window: window.innerWidth,
    links: [...document.querySelectorAll("a[href]")].map((link) => link.getAttribute("href")),
    names: [...document.querySelectorAll("[id]")].map((element) => element.id),
    smallest: Math.min(99, ...small),
    outside: [...document.querySelectorAll(".scroll, .chart")].filter((room) => {
      const part = room.querySelector("svg .guilty, svg line.wrong");
      if (!part || !visible(part)) return false;
      const box = part.getBoundingClientRect(), around = room.getBoundingClientRect();
      return box.left > around.right || box.right < around.left;
    }).length,
  });
})()"""

_FILTER = """((words) => {
  const input = document.querySelector("[data-filter]");
  input.value = words;
  input.dispatchEvent(new Event("input"));
  const rows = [...document.querySelectorAll(input.dataset.filter)];
  return JSON.stringify({
    shown: rows.filter((row) => row.getBoundingClientRect().height > 0).map((row) => row.id),
    says: document.getElementById("shown").textContent,
    all: rows.length,
  });
})"""


class Browser:
    """Chromium by its debugging protocol: messages of JSON over two pipes, each ended by a zero byte."""

    def __init__(self, program: str, folder: pathlib.Path):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        descriptors = {3: to_browser, 4: from_browser}

        def place() -> None:
            for number, descriptor in {n: os.dup(d) for n, d in descriptors.items()}.items():
                os.dup2(descriptor, number)

        self._process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"],
            preexec_fn=place, pass_fds=(3, 4, to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._last = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str) -> None:
        """Loads a page whole."""
        self.events.clear()
        self.ask("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def value(self, script: str) -> Any:
        return json.loads(self.ask("Runtime.evaluate", expression=script)["result"]["value"])

    def complaints(self) -> list[str]:
        """Messages that the page has written to the console, and errors that it has thrown."""
        found = []
        for event in self.events:
            if event.get("method") == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"):
                found.append(str(event["params"]["args"]))
            elif event.get("method") == "Runtime.exceptionThrown":
                found.append(event["params"]["exceptionDetails"]["text"])
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def broken_links(page: pathlib.Path, look: dict[str, Any], names: dict[pathlib.Path, set[str]]) -> list[str]:
    """Links of a page that lead to no file, or to no place in it. Links to the network are not followed."""
    broken = []
    for link in look["links"]:
        parts = urllib.parse.urlsplit(link)
        if parts.scheme:
            continue
        target = (page.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else page
        if not target.is_file() or (parts.fragment and target in names and parts.fragment not in names[target]):
            broken.append(link)
    return broken


def check_page(browser: Browser, page: pathlib.Path) -> tuple[list[str], dict[str, Any]]:
    """Faults of one page, in each width and scheme; and its links and the names of its places."""
    wrong: list[str] = []
    look: dict[str, Any] = {}
    for scheme in _SCHEMES:
        browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for width in _WIDTHS:
            browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            browser.open(page.as_uri())
            look = browser.value(_LOOK)
            where = f"{page.name} at {width} px, {scheme}"
            if look["width"] > look["window"]:
                wrong.append(f"{where}: {look['width']} px wide")
            if look["smallest"] < _SMALLEST_TEXT_PX:
                wrong.append(f"{where}: text of {look['smallest']:.1f} px in a picture")
            if look["outside"]:
                wrong.append(f"{where}: {look['outside']} pictures do not show the place that the finding is about")
            wrong += [f"{where}: {text}" for text in browser.complaints()]
    return wrong, look


def check_filter(browser: Browser, index: pathlib.Path) -> list[str]:
    browser.open(index.as_uri())
    wrong = []
    height = json.loads(browser.ask("Runtime.evaluate", expression="document.documentElement.scrollHeight + ''")["result"]["value"])
    if height > _TALLEST_INDEX_PX:
        wrong.append(f"the index is {height} px high")
    some = browser.value(f"{_FILTER}('LEAK')")
    text = json.loads(browser.ask("Runtime.evaluate", expression="""JSON.stringify(
        [...document.querySelectorAll("#trace_rows > tr")].filter((row) => row.textContent.toLowerCase().includes("leak"))
        .map((row) => row.id))""")["result"]["value"])
    if not text or some["shown"] != text or some["says"] != f"{len(text)} of {some['all']}":
        wrong.append(f"the filter `LEAK` shows {len(some['shown'])} of {len(text)} rows and says {some['says']!r}")
    everything = browser.value(f"{_FILTER}('')")
    if len(everything["shown"]) != everything["all"] or everything["says"]:
        wrong.append("an empty filter hides rows")
    if browser.value(f"{_FILTER}('no such words anywhere')")["shown"]:
        wrong.append("a filter that fits nothing shows rows")
    return wrong


def check_boxes(browser: Browser, out: pathlib.Path, folded: pathlib.Path) -> list[str]:
    """A box of a legend takes its curve away, and one of a fold shows its rows."""
    wrong = []
    browser.open((out / "policies.html").as_uri())
    curves = browser.value("""(() => {
        const box = document.querySelector(".curves input"), parts = box.closest(".curves").querySelectorAll(
            `g[data-part="${box.dataset.part}"]`);
        const widths = () => [...parts].map((part) => part.getBoundingClientRect().width);
        const before = widths();
        box.click();
        return JSON.stringify([before, widths()]);
    })()""")
    if not any(curves[0]) or any(curves[1]):
        wrong.append(f"the legend's first box leaves curves as wide as {curves[1]}, before {curves[0]}")
    browser.open(folded.as_uri())
    rows = browser.value("""(() => {
        const fold = document.querySelector(".fold"), height = () => fold.rows[1].getBoundingClientRect().height;
        fold.closest("details").open = true;
        const before = height();
        fold.querySelector("input").click();
        return JSON.stringify([before, height()]);
    })()""")
    if rows[0] or not rows[1]:
        wrong.append(f"{folded.name}: a folded row is {rows[0]} px high, unfolded {rows[1]}")
    return wrong


def broken_page_is_noticed(browser: Browser, folder: pathlib.Path) -> list[str]:
    """The checks above can fail: a page that is too wide, logs an error, links to nothing and has tiny text."""
    page = folder / "broken.html"
    page.write_text('<!DOCTYPE html><html><body><div style="width:3000px">x</div><a href="nothing.html">x</a>'
                    '<svg viewBox="0 0 900 90" width="90"><text y="40" font-size="11">x</text></svg>'
                    '<div class="scroll" style="width:300px;overflow-x:auto"><svg width="2000"><rect x="1900" width="9" height="9"'
                    ' class="guilty"/></svg></div>'
                    "<script>console.error('oh')</script></body></html>", encoding="utf-8")
    complaints, look = check_page(browser, page)
    wrong = "\n".join(complaints + broken_links(page, look, {}))
    return [f"a broken page passes: nothing about {what}" for what in ("px wide", "oh", "nothing.html", "text of", "do not show")
            if what not in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--program", required=True, help="the program lockstep")
    words = parser.parse_args()
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        print("skipped: there is no Chromium here (Debian's package chromium)")
        return _SKIPPED
    root = pathlib.Path(__file__).resolve().parents[3]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        out = folder / "report"
        made = subprocess.run([words.program, "report", "--out", str(out)], cwd=root, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            print(made.stdout + made.stderr)
            return 1
        browser = Browser(program, folder / "profile")
        try:
            wrong = broken_page_is_noticed(browser, folder)
            pages = sorted(out.rglob("*.html"))
            looks = {}
            for page in pages:
                complaints, looks[page] = check_page(browser, page)
                wrong += complaints
            names = {page: set(look["names"]) for page, look in looks.items()}
            for page, look in looks.items():
                wrong += [f"{page.name}: {link} leads to nothing" for link in broken_links(page, look, names)]
            wrong += check_filter(browser, out / "index.html")
            folded = next(page for page in pages if 'class="fold"' in page.read_text(encoding="utf-8"))
            wrong += check_boxes(browser, out, folded)
        finally:
            browser.close()
        size = (out / "index.html").stat().st_size
        traces = sum(1 for _ in (out / "traces").glob("*.html"))
        if size > _LONGEST_ROW * traces:
            wrong.append(f"index.html has {size} bytes, {_LONGEST_ROW} for each of {traces} traces are enough")
    print("\n".join(wrong) if wrong else f"{len(pages)} pages, {len(_WIDTHS)} widths, {len(_SCHEMES)} schemes: nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
