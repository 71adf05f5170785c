"""Runs tests against broken copies of our own modules: one process, a fork for each mutant.

A program of its own, since it forks: it reads a plan from stdin and writes one JSON line for each entry, in order. What
takes long to import is imported once. A fork forgets the learner, imports it again with one module's source changed,
and runs the tests that are named for it until one fails.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
INI = Path(__file__).with_name("mutation.ini")
PATIENCE_S = 120
"""A mutant may loop for ever: then SIGALRM ends it."""
ABOVE = tuple(f"agentrl.{part}" for part in ("learner", "rollout", "train", "replay", "evaluate", "commands", "cli"))
"""The learner, and what imports it."""
NOTICED = 1
"""Pytest's exit code where a test failed."""
CRASHED = 99
"""Exit code where not even pytest ran."""


class Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a changed source, and never from a cached one."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        super().__init__(module, str(path))
        self._source = source

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, origin=self.path) if name == self.name else None

    def get_code(self, fullname):
        return compile(self._source, self.path, "exec")


def forget(changed: str) -> None:
    """What may hold anything of the changed module is imported again: the tests, the learner and what is above it."""
    above = ABOVE if changed.startswith(ABOVE) else ("agentrl",)
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        ours = path.startswith(f"{ROOT}{os.sep}") and "site-packages" not in path and name != "__main__"
        if ours and (not name.startswith("agentrl") or name.startswith(above)):
            del sys.modules[name]


def run_tests(entry: dict) -> tuple[int, str]:
    """pytest's exit code, and what it wrote."""
    import pytest

    # No plugin but hypothesis': the others cost more than many of the tests.
    options = [
        "-x",
        "-q",
        "-rf",
        "--no-header",
        "--tb=line",
        "-c",
        str(INI),
        "--rootdir",
        str(ROOT),
        "-m",
        entry["marks"],
    ]
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        code = int(pytest.main([*options, *entry["tests"]]))
    return code, written.getvalue()[-3000:]


def run_changed(entry: dict) -> tuple[int, str]:
    """In a fork: runs the tests with one module changed."""
    signal.alarm(PATIENCE_S)
    gc.disable()
    path, module = ROOT / entry["file"], entry["file"].removesuffix(".py").replace("/", ".")
    forget(module)
    source = path.read_text(encoding="utf-8").replace(entry["old"], entry["new"])
    sys.meta_path.insert(0, Changed(module, path, source))
    if entry["known"]:  # The test that noticed last time is asked first, and where it does not, all of them.
        code, written = run_tests({**entry, "tests": [entry["known"]]})
        if code == NOTICED:
            return code, written
        forget(module)
    return run_tests(entry)


def attend(entry: dict) -> dict:
    """Runs one mutant in a fork: its exit code (negative: the signal that ended it), what pytest wrote, seconds."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = CRASHED
        try:
            code, written = run_changed(entry)
            os.write(write, written.encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        written = pipe.read().decode(errors="replace")
    _, status, usage = os.wait4(pid, 0)
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"code": os.waitstatus_to_exitcode(status), "written": written, "cpu_s": cpu_s}


def attend_unchanged(entry: dict) -> dict:
    """Runs the tests as they are, in this very process: what they import and compile is there for all forks."""
    start = time.process_time()
    code, written = run_tests(entry)
    return {"code": code, "written": written, "cpu_s": time.process_time() - start}


def main() -> None:
    """Reads the plan and goes through it; an entry without a file is the tests as they are."""
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    plan = json.load(sys.stdin)
    os.chdir(ROOT)
    import torch

    torch.set_num_threads(1)
    for entry in plan:
        gc.freeze()  # What a fork does not touch stays shared.
        print(json.dumps(attend(entry) if entry["file"] else attend_unchanged(entry)), flush=True)


if __name__ == "__main__":
    main()
