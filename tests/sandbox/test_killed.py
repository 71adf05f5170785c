"""A trainer that is killed at any moment leaves nothing, once the reaper ran."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sandbox_box import nonce, survivors

from agentrl.sandbox import cgroups
from agentrl.sandbox.contract import Backend
from agentrl.sandbox.owner import LABEL, OWNER_LABEL, owner_state

pytestmark = pytest.mark.slow

MOMENTS = 10
TRAINER = """
import sys
from agentrl.sandbox import Limits, WarmPool, get_backend
backend = get_backend(sys.argv[1])
pool = WarmPool(backend, sys.argv[2], Limits(), size=2, most=2)
print("ready", flush=True)
while True:
    with pool.acquire() as sandbox:
        program = ["python3", "-c", "import time; time.sleep(60)", sys.argv[3]]
        source = f"import subprocess; subprocess.Popen({program!r})"
        sandbox.exec_python(source, keep_background=True)
        sandbox.exec(["sh", "-c", "sleep 0.05; echo $0", sys.argv[3]], keep_background=True)
"""


def _left(name: str) -> list[str]:
    """Sandboxes of dead owners that this machine still has."""
    if name == "bubblewrap":
        return [str(path) for path in cgroups.left_behind()]
    import docker

    with closing(docker.DockerClient.from_env()) as client:
        found = client.api.containers(all=True, filters={"label": LABEL})
    return [item["Id"] for item in found if owner_state(item["Labels"].get(OWNER_LABEL, "")) == "dead"]


@pytest.mark.parametrize("name", [pytest.param("docker", marks=pytest.mark.docker), "bubblewrap"])
def test_killed_at_ten_moments(name: str, open_backend: Callable[[str], tuple[Backend, str]]) -> None:
    backend, image = open_backend(name)
    mounts = len(Path("/proc/mounts").read_text().splitlines())
    word, chance = nonce(), random.Random(4)
    for _ in range(MOMENTS):
        command = [sys.executable, "-c", TRAINER, name, image, word]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0, 1.5))
            trainer.kill()
    backend.reap()
    give_up = time.monotonic() + 10
    while (survivors(word) or _left(name)) and time.monotonic() < give_up:
        time.sleep(0.1)
        backend.reap()
    assert survivors(word) == []
    assert _left(name) == []
    assert len(Path("/proc/mounts").read_text().splitlines()) <= mounts
