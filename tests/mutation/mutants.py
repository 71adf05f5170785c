"""All mutants, and which tests must notice them.

A mutant is one small mistake of the kind that trains without an error and learns worse or nothing: a mask, a shift, a
denominator, a bootstrap, a sign, a detach. `tests` are run in order until one fails, so the quickest stand first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS: dict[str, tuple[str, ...]] = {
    "advantages": ("test_advantages", "test_credit", "test_estimators", "test_gae_properties"),
    "critic_free": ("test_estimators", "test_credit"),
    "credit": ("test_credit", "test_estimators", "test_diagnostics", "test_ppo_oracle"),
    "diagnostics": ("test_diagnostics",),
    "kl": ("test_kl",),
    "losses": ("test_losses", "test_unnoticed", "test_importance", "test_kl", "test_gradcheck", "test_minibatch"),
    "importance": ("test_importance",),
    "minibatch": ("test_minibatch", "test_ppo_oracle", "test_ppo_modes", "test_ppo"),
    "ppo": ("test_ppo", "../invariants/test_learner_invariants", "test_ppo_modes", "test_ppo_oracle"),
    "invariants": ("../invariants/test_learner_invariants", "test_importance", "test_ppo_modes"),
    "alarms": ("test_alarms",),
    "optim": ("test_unnoticed", "test_optim", "test_ppo"),
    "batch": ("test_batch", "test_packing"),
    "trunk": ("test_packing", "test_model", "test_checkpointing"),
    "model": ("test_critics", "test_checkpointing", "test_model", "test_ppo"),
    "adapters": ("test_unnoticed", "test_critics", "test_model", "test_checkpointing"),
    "logits": ("test_logits", "test_gradcheck", "test_precision"),
    "packing": ("test_packing", "test_batch"),
    "sft": ("test_sft",),
    "types": ("test_batch", "../test_types"),
}
"""By the name of the module, which tests must notice, the quickest first."""
MARKS = "not shared and not slow"
"""Mutants must die where the public task files are not at hand, and quickly."""


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        file: Relative to the repository.
        old: Text that occurs in it once.
        new: What stands in its place.
        breaks: What goes wrong.
        tests: Test files that must notice, relative to the repository.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.file}: {self.old!r} -> {self.new!r}"

    def entry(self, noticed_by: Mapping[str, str]) -> dict[str, object]:
        """For the runner: with the test that noticed it last, by the mutants' names."""
        return {**asdict(self), "marks": MARKS, "known": noticed_by.get(self.name)}


def _load(name: str) -> dict[str, list[tuple[str, str, str]]]:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MUTANTS


def all_mutants() -> list[Mutant]:
    """The whole table."""
    found = []
    for name in ("mutants_credit", "mutants_losses", "mutants_models"):
        for file, changes in _load(name).items():
            paths = tuple(f"tests/learner/{test}.py" for test in TESTS[Path(file).stem])
            found += [Mutant(file, old, new, breaks, paths) for old, new, breaks in changes]
    return found
