"""What every test may use: the shared task files, and the rule for parts that are missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _required(part: str) -> bool:
    return part in os.environ.get("AGENTRL_REQUIRE", "").split(",")


def skip_or_fail(part: str, reason: str) -> None:
    """Skips on a user's machine; fails where `AGENTRL_REQUIRE` names the part, as CI does."""
    if _required(part):
        pytest.fail(f"{part} is required by AGENTRL_REQUIRE but missing: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def missing_part() -> Callable[[str, str], None]:
    """The rule itself, for tests that find out late that something is missing."""
    return skip_or_fail


@pytest.fixture
def shared_data() -> Path:
    """The folder of public task files, which is kept beside the project and never inside it."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        skip_or_fail("shared", f"no public task files at {path.name}/ beside the project")
    return path
