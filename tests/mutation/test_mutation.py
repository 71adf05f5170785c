"""Each mutant of the table makes a test fail: the tests are tested."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
_SPEC = importlib.util.spec_from_file_location("agentrl_tests_mutants", HERE / "mutants.py")
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)

MUTANTS = _MODULE.all_mutants()
NOTICED = 1
"""Pytest's exit code where a test failed."""
CHOSEN = os.environ.get("AGENTRL_MUTANTS", "")
"""Only mutants whose name holds this text, for working on the table."""


def test_each_old_text_occurs_once_and_each_new_one_compiles():
    for mutant in MUTANTS:
        source = (_MODULE.ROOT / mutant.file).read_text(encoding="utf-8")
        assert source.count(mutant.old) == 1, mutant.name
        compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants run in forks")
def test_every_mutant_is_noticed():
    mutants = [mutant for mutant in MUTANTS if CHOSEN in mutant.name]
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    unchanged = {"file": "", "tests": tests, "marks": _MODULE.MARKS}
    plan = json.dumps([unchanged, *(mutant.entry() for mutant in mutants)])
    command = [sys.executable, str(HERE / "runner.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=plan, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    first, *found = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["code"] == 0, f"the tests fail without any mutant:\n{first['written']}"
    assert len(found) == len(mutants), done.stderr
    for mutant, result in zip(mutants, found, strict=True):
        print(f"{result['code']:4} {result['cpu_s']:6.2f} s {mutant.name}")
    print(f"{len(mutants)} mutants, {first['cpu_s'] + sum(result['cpu_s'] for result in found):.0f} s of CPU time")
    # A mutant that loops for ever was noticed too; whatever else is not a failed test is a mistake in the table.
    lived = [m.name for m, r in zip(mutants, found, strict=True) if r["code"] == 0]
    odd = [
        f"{m.name}\n{r['written']}" for m, r in zip(mutants, found, strict=True) if r["code"] not in (0, NOTICED, -14)
    ]
    assert not odd, "these did not get as far as a failing test:\n" + "\n".join(odd)
    assert not lived, "no test notices these:\n" + "\n".join(lived)
