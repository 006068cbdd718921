#!/usr/bin/env python3
"""Says which tests of a ctest run were skipped, grouped by the reason that they gave.

skipped_tests.py JUNIT_FILE

Prints nothing where none was skipped. A test that gives no reason is named as such.
"""
import collections
import re
import sys
import xml.etree.ElementTree

SHOWN = 6  # names per reason


def reason(text):
    """On one line what GTEST_SKIP printed after a line that ends with `Skipped`, or a script after `skipped:`."""
    found = re.search(r"(?:: Skipped\n|^skipped: )(.*?)(?:\n\n|\n\[|\Z)", text or "", re.S)
    return " ".join(found[1].split()) if found and found[1].strip() else "no reason given"


def grouped(cases):
    """Test names by reason; `cases` are the elements <testcase> of a file that ctest wrote."""
    found = collections.defaultdict(list)
    for case in cases:
        if case.find("skipped") is not None:
            found[reason(case.findtext("system-out"))].append(case.get("name"))
    return found


def main(words):
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        cases = xml.etree.ElementTree.parse(words[0]).iter("testcase")
    except (OSError, xml.etree.ElementTree.ParseError):
        return 0  # ctest was stopped before it wrote the file, and has said so
    for why, names in sorted(grouped(cases).items()):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        print(f"skipped: {why}: {', '.join(sorted(names)[:SHOWN])}{more}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
