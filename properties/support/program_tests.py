"""The main of tests that are given the program that they try: NAME_test.py --program PROGRAM [unittest's words]"""
import argparse
import os
import sys
import unittest


def main(about):
    """Runs the tests of the script that was called; `about` is its text for --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    options, rest = parser.parse_known_args()
    os.environ["LOCKSTEP_PROGRAM"] = os.path.abspath(options.program)
    unittest.main(argv=[sys.argv[0], *rest])
