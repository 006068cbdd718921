"""Commands in Python speak as the program does (cache_sim/program/command.hpp): one sentence about a bad command line, and a
help that ends with the exit statuses of the command and an example that works in the root of a checkout (properties'
help_check.py)."""
from __future__ import annotations

import argparse
from typing import NoReturn

from lockstep.server.steps import printable


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lockstep: {self.prog}: {printable(message)}; `{self.prog} --help` shows its words\n")


def end_help(parser: argparse.ArgumentParser, statuses: dict[int, str], example: str) -> None:
    lines = [f"  {status:<4} {meaning}" for status, meaning in statuses.items()]
    parser.epilog = "\n".join(["Exit status:", *lines, "", "Example:", f"  {example}"])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
