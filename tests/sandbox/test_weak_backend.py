"""The suite against a backend that is known to be weak: a probe that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import probes_escape
import probes_reach
import probes_resources
import probes_time
import pytest
from sandbox_box import LIMITS, PROBES, Box, secret_in_environment
from sandbox_weak import WeakSandbox

pytestmark = [pytest.mark.docker, pytest.mark.slow]

assert all((probes_escape, probes_reach, probes_resources, probes_time))  # imported for the probes that they hold

LEFT_OUT = {"P03", "O07", "O01", "O02", "M04", "E02", "E12", "T08"}
"""Probes that say nothing about this backend (it passes no input), or take it long."""


@pytest.fixture
def client(docker_image: str) -> Iterator[Any]:
    import docker

    with closing(docker.DockerClient.from_env(timeout=60)) as found:
        yield found


@pytest.mark.timeout(600)
def test_at_least_thirty_probes_fail_without_protection(client: Any, docker_image: str) -> None:
    def start() -> WeakSandbox:
        return WeakSandbox(client, docker_image, LIMITS)

    failed, shared = [], start()
    with secret_in_environment():
        for wanted in PROBES.values():
            if wanted.id in LEFT_OUT:
                continue
            try:
                if not shared.ping():
                    shared.close()
                    shared = start()
                wanted.run(Box(shared, start))
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 (whatever a probe runs into: it did not hold)
                failed.append(wanted.id)
            shared.exec(["sh", "-c", "rm -rf /workspace/* /workspace/.[!.]*"])
    shared.close()
    print("failed without protection:", *failed)
    assert len(failed) >= 30, failed
    assert {"T03", "T04", "M02", "P01", "D03", "D05", "E01", "N01", "F01", "F05"} <= set(failed)
