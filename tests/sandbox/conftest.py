"""Lets the tests of sandboxes import their probes, and gives them the backends that this machine has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from agentrl.sandbox import images
from agentrl.sandbox.bubblewrap import HOST_IMAGE, BubblewrapBackend
from agentrl.sandbox.contract import Backend, Limits
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.errors import SandboxError, SandboxMissing

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("sandbox_box", "probes_escape", "probes_reach", "probes_resources", "probes_time")


def cache() -> Path:
    """Where trees are kept between runs."""
    return Path(os.environ.get("AGENTRL_HOME", Path.home() / ".cache" / "agentrl")) / "sandbox"


def missing(part: str, reason: str) -> NoReturn:
    """The rule of `missing_part`, for fixtures that live as long as the session."""
    if part in os.environ.get("AGENTRL_REQUIRE", "").split(","):
        pytest.fail(f"{part} is required by AGENTRL_REQUIRE but missing: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def docker_image() -> str:
    """The base image, made where it is not there; skips where there is no engine."""
    import docker

    try:
        client = docker.DockerClient.from_env(timeout=60)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        missing("docker", f"no Docker engine answers: {error}")
    try:
        return images.ensure_base(client, cache())
    except (SandboxError, SandboxMissing) as error:
        missing("docker", f"the base image cannot be made: {error}")
    finally:
        client.close()


@pytest.fixture(scope="session")
def bwrap_image() -> str:
    """The tree that the Docker image was made of, or this machine's own /usr; skips where no namespaces can be had."""
    tree = cache() / images.base_name().replace(":", "-")
    image = str(tree) if tree.is_dir() else HOST_IMAGE
    try:
        BubblewrapBackend().start(image, Limits()).close()
    except (SandboxError, SandboxMissing) as error:
        missing("bwrap", str(error))
    return image


@pytest.fixture(scope="session")
def open_backend(request: pytest.FixtureRequest) -> Iterator[Callable[[str], tuple[Backend, str]]]:
    """A backend by name, with the image that it is tried on; skips with the reason where it is missing."""
    opened: dict[str, tuple[Backend, str]] = {}

    def find(name: str) -> tuple[Backend, str]:
        if name not in opened:
            if name == "docker":
                opened[name] = (DockerBackend(), request.getfixturevalue("docker_image"))
            elif name == "bubblewrap":
                opened[name] = (BubblewrapBackend(), request.getfixturevalue("bwrap_image"))
            else:
                request.getfixturevalue("bwrap_image")
                from sandbox_box import UserBubblewrap

                opened[name] = (UserBubblewrap(), HOST_IMAGE)
        return opened[name]

    yield find
    for backend, _ in opened.values():
        backend.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which backends the suite of probes was really run against."""
    tried: dict[str, dict[str, int]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            _, found, name = getattr(report, "nodeid", "").partition("test_suite.py::test_probe[")
            if found:
                counts = tried.setdefault(name.rpartition("-")[0], {})
                counts[outcome] = counts.get(outcome, 0) + 1
    for backend, counts in sorted(tried.items()):
        line = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
        terminalreporter.write_line(f"escape-and-exhaust suite on {backend}: {line}")
