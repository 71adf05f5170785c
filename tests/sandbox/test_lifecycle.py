"""The life of a sandbox: how it ends, whose it is, and what is left of it (L01 to L10)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_box import LIMITS, nonce, survivors

from agentrl.sandbox import cgroups
from agentrl.sandbox.contract import MIB, Backend, Limits, Sandbox
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.errors import SandboxDied, SandboxError, SandboxMissing, SandboxUsageError
from agentrl.sandbox.owner import LABEL, owner_state, owner_token

BACKENDS = [pytest.param("docker", marks=pytest.mark.docker), "bubblewrap"]


@dataclass
class Kind:
    """A backend under test and what can be seen of it from outside."""

    backend: Backend
    image: str

    def start(self, limits: Limits = LIMITS) -> Sandbox:
        return self.backend.start(self.image, limits)

    def left(self, name: str) -> list[str]:
        """What this machine still has of a sandbox."""
        if self.backend.name == "docker":
            return [found["Id"] for found in _containers() if f"/{name}" in found["Names"]]
        groups = [str(path) for root in _group_parents() for path in root.glob(f"{name}@*")]
        return groups + [line for line in Path("/proc/mounts").read_text().splitlines() if name in line]

    def destroy(self, sandbox: Any) -> None:
        """What an operator, or the kernel, might do to it."""
        if self.backend.name == "docker":
            subprocess.run(["docker", "kill", sandbox.container], check=True, capture_output=True)
        else:
            sandbox.process.kill()


def _containers() -> list[dict[str, Any]]:
    import docker

    with closing(docker.DockerClient.from_env()) as client:
        found: list[dict[str, Any]] = client.api.containers(all=True, filters={"label": LABEL})
    return found


def _group_parents() -> tuple[Path, ...]:
    layout = cgroups.layout()
    return layout.parents if layout else ()


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture(params=BACKENDS)
def kind(request: pytest.FixtureRequest, open_backend: Callable[[str], tuple[Backend, str]]) -> Kind:
    return Kind(*open_backend(request.param))


@pytest.fixture
def sandbox(kind: Kind) -> Iterator[Sandbox]:
    with kind.start() as started:
        yield started


def test_l01_killed_by_the_infrastructure_is_a_sandbox_error(kind: Kind, sandbox: Sandbox) -> None:
    timer = threading.Timer(0.5, kind.destroy, [sandbox])
    timer.start()
    done = sandbox.exec(["sleep", "20"])
    timer.join()
    assert done.status == "sandbox_error"
    assert sandbox.exec(["true"]).status == "sandbox_error"
    assert not sandbox.ping()
    with pytest.raises(SandboxDied):
        sandbox.write("x", b"x")


def test_l02_nothing_is_left_after_close(kind: Kind) -> None:
    sandbox = kind.start()
    word = nonce()
    sandbox.exec(
        ["sh", "-c", "sleep 60 >/dev/null 2>&1 & python3 -c 'import time; time.sleep(60)' $0 &", word],
        keep_background=True,
    )
    assert survivors(word)
    began = time.monotonic()
    sandbox.close()
    sandbox.close()
    assert time.monotonic() - began < 4
    assert survivors(word) == []
    assert _until(lambda: kind.left(sandbox.id) == [], 2)


CONTROLLER = """
import sys
from agentrl.sandbox import Limits, get_backend
sandbox = get_backend(sys.argv[1]).start(sys.argv[2], Limits())
print(sandbox.id, flush=True)
sandbox.exec(["python3", "-c", "import time; time.sleep(60)", sys.argv[3]])
"""


def _killed_controller(kind: Kind, word: str) -> str:
    """The id of a sandbox whose controller was killed in the middle of a call."""
    command = [sys.executable, "-c", CONTROLLER, kind.backend.name, kind.image, word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        name = controller.stdout.readline().strip()
        assert _until(lambda: bool(set(survivors(word)) - {controller.pid}), 20)
        controller.send_signal(signal.SIGKILL)
    return name


def test_l03_a_killed_controller_takes_its_sandbox_along(kind: Kind) -> None:
    word = nonce()
    name = _killed_controller(kind, word)
    assert _until(lambda: survivors(word) == [], 3)
    if kind.backend.name == "bubblewrap":
        kind.backend.reap()
    assert _until(lambda: kind.left(name) == [], 3)


def test_l04_started_by_a_thread_that_ends(kind: Kind) -> None:
    made: list[Sandbox] = []
    thread = threading.Thread(target=lambda: made.append(kind.start()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    with made[0] as sandbox:
        assert sandbox.exec(["echo", "alive"]).stdout == b"alive\n"


def test_l05_tmpfs_over_half_of_memory_is_refused() -> None:
    with pytest.raises(SandboxUsageError, match="half of memory"):
        Limits(memory=96 * MIB, tmp_bytes=64 * MIB)
    with pytest.raises(SandboxUsageError, match="stdout_cap"):
        Limits(stdout_cap=1 << 30)
    with pytest.raises(SandboxUsageError, match="wall_s"):
        Limits(wall_s=0)


def test_l06_concurrent_calls_do_not_mix(kind: Kind) -> None:
    sandboxes = [kind.start() for _ in range(4)]
    wrong: list[object] = []

    def echo(sandbox: Sandbox, word: str) -> None:
        done = sandbox.exec(["echo", word])
        python = sandbox.exec_python("import sys; print(sys.stdin.read())", stdin=word.encode())
        wrong.extend(result for result in (done, python) if result.stdout != f"{word}\n".encode())

    try:
        threads = [threading.Thread(target=echo, args=(sandboxes[k % 4], uuid.uuid4().hex)) for k in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
    finally:
        for sandbox in sandboxes:
            sandbox.close()


@pytest.mark.parametrize("name", [*BACKENDS, "bubblewrap-user"])
def test_l07_one_at_its_limit_leaves_the_other_its_own(
    name: str, open_backend: Callable[[str], tuple[Backend, str]]
) -> None:
    kind = Kind(*open_backend(name))  # the last is one user's: what counts by user would be shared
    forks = """
import os, time
made = 0
try:
    for made in range(200):
        if os.fork() == 0:
            os.close(1); os.close(2)
            time.sleep(20)
            os._exit(0)
except OSError:
    pass
print(made)
"""
    with kind.start() as one, kind.start() as two:
        first = one.exec(["python3", "-c", forks], keep_background=True)
        second = two.exec(["python3", "-c", forks], keep_background=True)
        assert 50 <= int(first.stdout) <= 64
        assert abs(int(first.stdout) - int(second.stdout)) <= 2


def test_l08_no_growth_over_many(kind: Kind) -> None:
    def counts() -> tuple[int, int, int]:
        mounts = len(Path("/proc/mounts").read_text().splitlines())
        groups = sum(len(list(root.iterdir())) for root in _group_parents())
        return len(list(Path("/proc/self/fd").iterdir())), mounts, groups

    kind.start().close()
    time.sleep(0.5)
    before = counts()
    for _ in range(5):
        with kind.start() as sandbox:
            sandbox.exec(["true"])
    assert _until(lambda: all(now <= then + 1 for now, then in zip(counts(), before, strict=True)), 3)


def test_l09_no_engine_is_told_at_once_and_not_asked_again() -> None:
    from docker import DockerClient

    backend = DockerBackend(client=DockerClient(base_url="unix:///nonexistent/docker.sock", version="1.41"))
    began = time.monotonic()
    with pytest.raises(SandboxMissing, match="install Docker Engine"):
        backend.start("any", LIMITS)
    assert time.monotonic() - began < 5
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(SandboxMissing, match="did not answer"):
            backend.start("any", LIMITS)
    assert time.monotonic() - began < 1
    backend.close()


def test_a_missing_image_is_told(kind: Kind) -> None:
    with pytest.raises(SandboxMissing, match=r"no-such-image.*"):
        kind.backend.start("no-such-image:x", LIMITS)


def test_closing_ends_a_call_that_another_thread_is_in(kind: Kind) -> None:
    for _ in range(5):  # a descriptor that is closed too early is taken by the next request to the engine, now and then
        sandbox = kind.start()
        found: list[Any] = []
        thread = threading.Thread(target=lambda s=sandbox, f=found: f.append(s.exec(["sleep", "20"])))
        thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        sandbox.close()
        thread.join(10)
        assert time.monotonic() - began < 5
        assert found[0].status == "sandbox_error"


def test_a_sandbox_ends_with_its_lifetime_whatever_its_owner_does(kind: Kind) -> None:
    short = type(kind.backend)(lifetime_s=3.0)  # type: ignore[call-arg]
    word = nonce()
    sandbox = short.start(kind.image, LIMITS)
    sandbox.exec(["python3", "-c", "import time; time.sleep(60)", word])
    assert _until(lambda: survivors(word) == [], 3)
    assert _until(lambda: sandbox.exec(["true"]).status == "sandbox_error", 5)
    assert _until(lambda: kind.left(sandbox.id) == [], 5)
    sandbox.close()
    short.close()


def test_a_call_that_is_interrupted_ends_the_sandbox(kind: Kind) -> None:
    code = f"""
import signal, sys, threading
from agentrl.sandbox import Limits, get_backend
sandbox = get_backend({kind.backend.name!r}).start({kind.image!r}, Limits())
threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
try:
    sandbox.exec(["sleep", "20"])
except KeyboardInterrupt:
    print(sandbox.exec(["true"]).status)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "sandbox_error\n", done
    assert time.monotonic() - began < 15


def test_owner_tokens_tell_the_living_from_the_dead() -> None:
    assert owner_state(owner_token()) == "alive"
    done = subprocess.run(
        [sys.executable, "-c", "from agentrl.sandbox.owner import owner_token; print(owner_token())"],
        capture_output=True,
        text=True,
        check=True,
    )
    token = done.stdout.strip()
    assert owner_state(token) == "dead"
    assert owner_state(token.rpartition(".")[0] + ".another") == "unknown"
    assert owner_state("nonsense") == "unknown"


@pytest.mark.docker
def test_the_reaper_removes_only_what_has_no_owner(docker_image: str) -> None:
    import docker

    backend = DockerBackend()
    dead = subprocess.run(
        [sys.executable, "-c", "from agentrl.sandbox.owner import owner_token; print(owner_token())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    with closing(docker.DockerClient.from_env()) as client, backend.start(docker_image, LIMITS) as mine:
        labels = {LABEL: "1", "agentrl.owner": dead}
        orphan = client.containers.run(docker_image, ["sleep", "60"], detach=True, labels=labels, network_mode="none")
        try:
            assert backend.reap() >= 1
            assert mine.ping()
            assert orphan.id not in [found["Id"] for found in _containers()]
        finally:
            backend.remove(orphan.id)
    backend.close()


def test_a_forked_copy_leaves_the_parents_sandbox_alone(kind: Kind) -> None:
    with kind.start() as sandbox:
        pid = os.fork()
        if pid == 0:
            sandbox.close()
            os._exit(0 if sandbox.exec(["true"]).status == "sandbox_error" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert sandbox.ping()


GROW = """
import os
for _ in range(40):
    if os.fork() == 0:
        b = bytearray(9 << 20)
        for i in range(0, len(b), 4096): b[i] = 1
        os.kill(os.getpid(), 19)
os.wait()
"""


def test_an_agent_that_takes_the_runner_along_by_memory_is_not_the_infrastructures_fault(kind: Kind) -> None:
    if not kind.backend.guarantees().oom_attributed:
        pytest.skip("no control groups")
    with kind.start() as sandbox:
        done = sandbox.exec(["python3", "-c", GROW], limits=replace(LIMITS, wall_s=4))
        assert done.oom_kills > 0, done
        assert done.status != "sandbox_error"
        assert sandbox.ping() or done.status == "oom"


def test_starting_fails_cleanly(kind: Kind) -> None:
    broken = type(kind.backend)(python="/usr/bin/false")  # type: ignore[call-arg]
    with pytest.raises((SandboxError, SandboxMissing)):
        broken.start(kind.image, LIMITS)
