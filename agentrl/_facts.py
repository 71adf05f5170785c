"""What a run ran on: versions, commit, machine. Read without importing the packages."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agentrl.types import JSON

CORE = ("docker", "filelock", "gymnasium", "jinja2", "numpy", "openai", "pydantic", "rich", "scipy", "sqlglot", "tyro")
"""Packages that agentrl itself depends on and whose versions can change what a run does."""
TRAIN = ("torch", "transformers", "peft", "safetensors", "accelerate", "tokenizers")
"""Packages of the extra `train`."""


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def facts() -> dict[str, JSON]:
    """Versions, commit and machine, JSON-able."""
    return {
        "agentrl": installed("agentrl"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "packages": {name: installed(name) for name in (*CORE, *TRAIN)},
        "commit": _commit(),
    }


def _commit() -> dict[str, JSON] | None:
    """The commit of agentrl's own folder and whether files differ from it; None outside a repository."""
    head = _git("rev-parse", "HEAD")
    return None if head is None else {"id": head, "changed": _git("status", "--porcelain") != ""}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
