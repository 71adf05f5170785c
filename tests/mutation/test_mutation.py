"""Each mutant of the table makes a test fail: the tests are tested."""

from __future__ import annotations

import importlib.util
import json
import os
import re
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
NOTICED, TIMED_OUT = 1, -14
"""Pytest's exit code where a test failed; SIGALRM, where a mutant loops for ever."""
NOTES = HERE / "noticed_by.json"
"""Which test noticed a mutant last. It saves time and decides nothing: AGENTRL_MUTANTS_NOTE=1 writes it anew."""
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
    noticed_by = json.loads(NOTES.read_text(encoding="utf-8")) if NOTES.exists() else {}
    plan = json.dumps([unchanged, *(mutant.entry(noticed_by) for mutant in mutants)])
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
    if os.environ.get("AGENTRL_MUTANTS_NOTE"):
        _note({mutant.name: result["written"] for mutant, result in zip(mutants, found, strict=True)})
    lived = [m.name for m, r in zip(mutants, found, strict=True) if r["code"] == 0]
    odd = [
        f"{m.name}\n{r['written']}"
        for m, r in zip(mutants, found, strict=True)
        if r["code"] not in (0, NOTICED, TIMED_OUT)
    ]
    assert not odd, "these did not get as far as a failing test:\n" + "\n".join(odd)
    assert not lived, "no test notices these:\n" + "\n".join(lived)


def _note(written: dict[str, str]) -> None:
    found = {name: re.search(r"^FAILED (\S+)", text, re.MULTILINE) for name, text in written.items()}
    noticed_by = {name: match[1] for name, match in found.items() if match}
    NOTES.write_text(json.dumps(noticed_by, indent=0) + "\n", encoding="utf-8")
