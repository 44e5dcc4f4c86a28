"""Tests that boot guests. `python3 tests/vm/run.py [NAME...]`; `--list` names them.

A test is a function `test_…(ctx)` in one of the modules below. Tests of one module share a lab, in the
order written; a test that breaks its lab says so by `ctx.fresh()`. `LAB` of a module has the settings of its
lab, or is a function that gives them; `FLAVOUR` names the guests' kernel when it is not the usual one. There
are no skips: what cannot run fails.
"""

import importlib
import os
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(os.path.dirname(os.path.dirname(HERE)), "guest-images"), HERE]

from lab.errors import LabError  # noqa: E402
from lab.session import Lab, find_parts  # noqa: E402

MODULES = ("main_job", "network", "rdma", "rdma_function", "rdma_ethernet", "rdma_function_life", "life_cycle",
           "recovery", "rdma_recovery", "rdma_recovery_ethernet", "vhost_user", "gpudirect", "erdma")
# Run when named: they take minutes each.
NAMED = ("sessions", "rdma_function_more", "rdma_ethernet_more", "rdma_function_life_more", "applications", "own_image",
         "gpudirect_lazy", "guest_iommu", "rdma_core", "erdma_more", "erdma_mlx5")


class Context:
    """What a test gets: its module's lab, made on first use."""

    def __init__(self, parts, settings):
        self.parts, self.settings, self.current = parts, settings, None

    @property
    def lab(self):
        """The running lab; fails when a guest or the OM ended under an earlier test."""
        if self.current is None:
            settings = self.settings() if callable(self.settings) else self.settings
            lab = Lab(*self.parts, **settings)
            lab.__enter__()
            self.current = lab
            lab.wait_ready()
        return self.current

    def fresh(self):
        """Ends the lab; the next use makes a new one."""
        if self.current is not None:
            self.current.__exit__(None, None, None)
            self.current = None

    def fail(self):
        """Ends the lab and keeps its logs; returns where they are."""
        if self.current is None:
            return None
        self.current.__exit__(LabError, None, None)
        folder, self.current = self.current.run_dir, None
        return folder


def tests_of(module):
    """`(name, function)` in the order written."""
    return [(f"{module.__name__}.{name[5:]}", f) for name, f in vars(module).items() if name.startswith("test_")]


def main(names):
    """Runs all tests, or those whose name contains one of `names`."""
    modules = [importlib.import_module(name) for name in (*MODULES, *(NAMED if names else ()))]
    if "--list" in names:
        for module in modules:
            for name, f in tests_of(module):
                print(f"{name}: {(f.__doc__ or '').strip().splitlines()[0]}")
        return 0
    parts = find_parts()
    passed = failed = 0
    for module in modules:
        chosen = [(n, f) for n, f in tests_of(module) if not names or any(word in n for word in names)]
        flavour = getattr(module, "FLAVOUR", None)
        ctx = Context(find_parts(flavour=flavour) if flavour and chosen else parts, getattr(module, "LAB", {}))
        for name, f in chosen:
            begin = time.monotonic()
            try:
                f(ctx)
                passed += 1
                print(f"ok {name} ({time.monotonic() - begin:.1f} s)", flush=True)
            except Exception as e:
                failed += 1
                if not isinstance(e, (AssertionError, LabError)):
                    traceback.print_exc()
                where = ctx.fail()
                line = traceback.extract_tb(e.__traceback__)[-1]
                print(f"FAIL {name}: {e or line.line}{f' (logs: {where})' if where else ''}", flush=True)
        ctx.fresh()
    if not names:
        print("not run, because they were not named: " + ", ".join(NAMED))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
