"""The main of tests that are given the program that they try: NAME_test.py --program PROGRAM [--full] [unittest's words]"""
import argparse
import os
import pathlib
import sys
import unittest

FULL = "--full" in sys.argv
full = unittest.skipUnless(FULL, "with --full")  # marks a test of the tier `full`


def is_sanitized():
    """Whether a sanitizer is in the program. It reserves terabytes of addresses, and throws no bad_alloc."""
    program = pathlib.Path(os.environ["LOCKSTEP_PROGRAM"]).read_bytes()
    return b"__asan_init" in program or b"__tsan_init" in program


def main(about):
    """Runs the tests of the script that was called; `about` is its text for --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--full", action="store_true", help="with what the tier full has more than quick")
    options, rest = parser.parse_known_args()
    os.environ["LOCKSTEP_PROGRAM"] = os.path.abspath(options.program)
    unittest.main(argv=[sys.argv[0], *rest])
