"""The end of every Python command's help, as in the program (cache_sim/program/command.hpp): the exit statuses of the
command, and an example that works in the root of a checkout (properties' help_check.py)."""
from __future__ import annotations

import argparse


def end_help(parser: argparse.ArgumentParser, statuses: dict[int, str], example: str) -> None:
    lines = [f"  {status:<4} {meaning}" for status, meaning in statuses.items()]
    parser.epilog = "\n".join(["Exit status:", *lines, "", "Example:", f"  {example}"])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
