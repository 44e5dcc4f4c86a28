"""Runs rdma-core's own tests and prints a line of JSON for each. Runs in a guest, in the folder with `tests/`.

    python3 rdma_core_tests.py --dev DEVICE --gid INDEX [MODULE...]
"""

import json
import os
import signal
import sys
import unittest
from importlib.machinery import SourceFileLoader

# None takes as long on a device that answers.
SECONDS = 60


class Late(Exception):
    """A test that would go on for ever."""


def stop_test(*_):
    raise Late(f"no end after {SECONDS} s")


class Report(unittest.TestResult):
    """One line for each test."""

    def startTest(self, test):
        super().startTest(test)
        self.bad = None
        signal.alarm(SECONDS)

    def say(self, test, outcome, why=""):
        signal.alarm(0)
        print("RESULT " + json.dumps({"test": test.id(), "outcome": outcome, "why": why[-300:]}), flush=True)

    def addSuccess(self, test):
        self.say(test, "ok")

    def addSkip(self, test, reason):
        self.say(test, "skipped", reason)

    def addError(self, test, err):
        self.say(test, "error", self._exc_info_to_string(err, test))

    def addFailure(self, test, err):
        self.say(test, "failed", self._exc_info_to_string(err, test))

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.say(test, "failed", self._exc_info_to_string(err, test))


def main():
    folder = os.path.abspath("tests")
    sys.path.insert(0, folder)
    from args_parser import parser
    SourceFileLoader("tests", os.path.join(folder, "__init__.py")).load_module()
    parser.parse_args()
    signal.signal(signal.SIGALRM, stop_test)
    loader = unittest.TestLoader()
    for name in sys.argv[1:]:
        loader.loadTestsFromName("tests." + name).run(Report())
    print("END", flush=True)


main()
