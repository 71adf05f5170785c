"""The Docker backend: one hardened, single-use container an episode, reached through the engine's attach connection.

What holds the agent: no network, no capability, no-new-privileges, a system-call allow-list, a read-only image, sized
tmpfs, and bounds on memory, processors, processes and open files that hold for all processes together. Inside, a runner
with KILL, SETUID and SETGID alone serves requests; the agent's programs run as another user without any.

What it does not hold: an attacker with an exploit for the kernel or the container runtime. The engine's socket is as
good as root on the machine, so only the trainer may reach it; no sandbox does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentrl.sandbox.contract import SHM_BYTES, TMP, WORKSPACE, ExecResult, Guarantees, Limits
from agentrl.sandbox.errors import SandboxError, SandboxMissing, SandboxUsageError
from agentrl.sandbox.owner import EXPIRES_LABEL, LABEL, OWNER_LABEL, owner_state, owner_token
from agentrl.sandbox.remote import RunnerSandbox
from agentrl.sandbox.seccomp import docker_profile
from agentrl.sandbox.wire import BOOT, Channel, DockerStream

_log = logging.getLogger(__name__)

AGENT_ID = 10_000
"""User and group of the agent in a container: none that the image or the host has a name for."""
START_S = 60.0
LIFETIME_S = 6 * 3600.0
_BREAK_S = 5.0
_REMEDY = "install Docker Engine and start it (sudo systemctl start docker), and let this user reach its socket"


class DockerBackend:
    """Makes containers on one engine.

    Args:
        python: The interpreter in the image, at least 3.9, that the runner is started with.
        lifetime_s: After how long a sandbox ends by itself, whatever happened to the trainer.
        timeout_s: How long one answer of the engine may take.
        client: A `docker.DockerClient`; else one from the environment, made at first use.
    """

    name = "docker"

    def __init__(
        self, *, python: str = "python3", lifetime_s: float = LIFETIME_S, timeout_s: float = 30.0, client: Any = None
    ) -> None:
        self._python = python
        self._lifetime_s = lifetime_s
        self._timeout_s = timeout_s
        self._client = client
        self._lock = threading.Lock()
        # The engine's work is bound by processors: more requests at once only make all of them slow.
        self._calls = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
        self._broken_until = 0.0
        self._broken_by = ""
        self._profile = ""
        self._images: dict[str, str] = {}

    def guarantees(self) -> Guarantees:
        """What a container promises."""
        return Guarantees(
            backend=self.name,
            files_hidden=True,
            processes_hidden=True,
            network_off=True,
            deadline_kills_all=True,
            nothing_survives=True,
            background=True,
            memory_bound=True,
            oom_attributed=True,
            cpu_bound=True,
            pids_bound=True,
            disk_bound=True,
            output_bound=True,
            exit_unforgeable=True,
            unprivileged=True,
            kernel="allow-list",
            files_confined=True,
            secrets_hidden=True,
        )

    def identify(self, image: str) -> str:
        """The image's digest; looked up once, so that a tag that moves changes nothing in mid-run.

        Raises:
            SandboxMissing: The engine or the image is missing.
            SandboxUsageError: The image declares volumes, which no limit bounds.
        """
        from docker.errors import ImageNotFound

        if image not in self._images:
            with self._engine("look up an image") as api:
                try:
                    found = api.inspect_image(image)
                except ImageNotFound:
                    raise SandboxMissing(
                        f"there is no image {image!r} on this Docker engine: build it "
                        "(agentrl.sandbox.images), or pull it."
                    ) from None
            if (found.get("Config") or {}).get("Volumes"):
                raise SandboxUsageError(
                    f"image {image!r} declares volumes, whose size no limit bounds: build it without."
                )
            self._images[image] = str(found["Id"])
        return self._images[image]

    def start(self, image: str, limits: Limits) -> DockerSandbox:
        """As Backend.start."""
        digest = self.identify(image)
        name = f"agentrl-{uuid.uuid4().hex[:16]}"
        with self._engine("start a container") as api:
            container = str(api.create_container(**self._settings(api, digest, name, limits))["Id"])
            try:
                answer = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
                channel = Channel(DockerStream(getattr(answer, "_sock", answer), answer))
                api.start(container)
            except BaseException:
                api.remove_container(container, force=True)
                raise
        sandbox = DockerSandbox(name, digest, limits, channel, (self, container))
        config = {"kill": "namespace", "uid": AGENT_ID, "gid": AGENT_ID, "lifetime_s": self._lifetime_s}
        sandbox.start({**config, "roots": {WORKSPACE: WORKSPACE, TMP: TMP}}, START_S)
        return sandbox

    def ping(self) -> None:
        """Asks the engine whether it is there.

        Raises:
            SandboxMissing: It is not.
        """
        with self._engine("reach the engine") as api:
            api.ping()

    def reap(self) -> int:
        """As Backend.reap. Of owners that cannot be looked at from here, only what is past its lifetime."""
        removed = 0
        with self._engine("list containers") as api:
            found = api.containers(all=True, filters={"label": LABEL})
        for container in found:
            labels = container.get("Labels") or {}
            state = owner_state(labels.get(OWNER_LABEL, ""))
            expired = time.time() > float(labels.get(EXPIRES_LABEL, "inf"))
            if state == "dead" or (state == "unknown" and expired):
                self.remove(container["Id"])
                removed += 1
        return removed

    def close(self) -> None:
        """Closes the connections to the engine."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    # -- the engine ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _engine(self, what: str, *, always: bool = False) -> Iterator[Any]:
        """The engine's API, for one piece of work. After a failure to reach it the next seconds fail at once.

        Raises:
            SandboxMissing: The engine cannot be reached.
            SandboxError: It refused the work.
        """
        import requests
        from docker.errors import APIError, DockerException

        if time.monotonic() < self._broken_until and not always:
            raise SandboxMissing(f"could not {what}: the Docker engine did not answer: {self._broken_by}. {_REMEDY}.")
        with self._calls:
            try:
                yield self._api()
            except APIError as error:
                raise SandboxError(
                    f"could not {what}: the Docker engine refused: {error.explanation or error}"
                ) from error
            except (DockerException, requests.RequestException, OSError) as error:
                if isinstance(error, SandboxMissing | SandboxError):
                    raise
                self._broken_by = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                self._broken_until = time.monotonic() + _BREAK_S
                raise SandboxMissing(
                    f"could not {what}: the Docker engine did not answer: {self._broken_by}. {_REMEDY}."
                ) from error

    def _api(self) -> Any:
        import docker

        with self._lock:
            if self._client is None:
                self._client = docker.DockerClient.from_env(timeout=self._timeout_s)
                # The client keeps a connection open for each address that it ever asked, and every container is one.
                self._client.api.headers["Connection"] = "close"
            return self._client.api

    def _settings(self, api: Any, digest: str, name: str, limits: Limits) -> dict[str, Any]:
        """What a container is created with."""
        from docker.types import Ulimit

        if not self._profile:
            self._profile = _examine(api.info())
        room = f"size={limits.tmp_bytes},nr_inodes={limits.tmp_inodes},nosuid,nodev,exec"
        owned = f"uid={AGENT_ID},gid={AGENT_ID}"
        host_config = api.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            cap_add=["KILL", "SETUID", "SETGID"],
            security_opt=["no-new-privileges", f"seccomp={self._profile}"],
            pids_limit=limits.pids + 2,  # init and the runner
            mem_limit=limits.memory,
            memswap_limit=limits.memory,
            nano_cpus=int(limits.cpu_cores * 1e9),
            read_only=True,
            tmpfs={TMP: f"{room},mode=1777", WORKSPACE: f"{room},mode=0755,{owned}"},
            shm_size=SHM_BYTES,
            ipc_mode="private",  # `none` breaks multiprocessing.Lock
            init=True,
            log_config={"Type": "none", "Config": {}},
            ulimits=[Ulimit(name="core", soft=0, hard=0)],
            oom_score_adj=500,
            auto_remove=True,
        )
        labels = {LABEL: "1", OWNER_LABEL: owner_token(), EXPIRES_LABEL: str(int(time.time() + self._lifetime_s + 60))}
        return {
            "image": digest,
            "name": name,
            "hostname": "sandbox",
            "entrypoint": [self._python, "-I", "-B", "-c", BOOT],
            "command": [],
            "user": "0:0",
            "working_dir": WORKSPACE,
            "stdin_open": True,
            "labels": labels,
            "healthcheck": {"test": ["NONE"]},
            "host_config": host_config,
        }

    def remove(self, container: str) -> None:
        """Removes a container with all that runs in it; one that is gone already is well. Never raises."""
        from docker.errors import APIError

        try:
            with self._engine("remove a container", always=True) as api:
                try:
                    api.remove_container(container, force=True, v=True)
                except APIError as error:
                    if error.status_code not in (404, 409):  # gone, or about to be
                        raise
        except (SandboxError, SandboxMissing) as error:
            _log.warning("container %s may be left until the reaper finds it: %s", container[:12], error)

    def died_of_memory(self, container: str, since: float) -> bool:
        """Whether the engine saw the kernel kill in this container for memory."""
        try:
            with self._engine("read events") as api:
                wanted = {"container": container, "event": "oom"}
                events = api.events(since=int(since), until=int(time.time()) + 1, filters=wanted, decode=True)
                return any(True for _ in events)
        except (SandboxError, SandboxMissing):
            return False


def _examine(info: dict[str, Any]) -> str:
    """The profile for this engine, which must be able to keep what is promised.

    Raises:
        SandboxMissing: It lacks a control group or system-call filters, as some rootless engines do.
    """
    lacks = [name for name in ("MemoryLimit", "PidsLimit", "CpuCfsQuota") if not info.get(name)]
    lacks += [] if any("seccomp" in str(option) for option in info.get("SecurityOptions") or ()) else ["seccomp"]
    if lacks:
        raise SandboxMissing(
            f"this Docker engine cannot bound its containers: it lacks {', '.join(lacks)}. Use an engine that runs as "
            "root, or one with control groups handed over to it."
        )
    return docker_profile(str(info["Architecture"]))


class DockerSandbox(RunnerSandbox):
    """One container. Made by `DockerBackend.start`.

    Args:
        name: Of the container.
        image: By digest.
        limits: Of the sandbox.
        channel: Attached to it.
        engine: The backend and the container's id.
    """

    def __init__(
        self, name: str, image: str, limits: Limits, channel: Channel, engine: tuple[DockerBackend, str]
    ) -> None:
        super().__init__(name, image, limits, channel)
        self._backend, self.container = engine
        self._since = time.time()

    def capabilities(self) -> Guarantees:
        """As Sandbox.capabilities."""
        return self._backend.guarantees()

    def _destroy(self) -> None:
        self._backend.remove(self.container)

    def _cause_of_death(self) -> ExecResult:
        said = self._channel.stream.diagnostics()
        if self._backend.died_of_memory(self.container, self._since):
            return ExecResult("oom", oom_kills=1, evidence={"cause": "memory ran out and took the sandbox along"})
        return ExecResult("sandbox_error", evidence={"cause": "the container ended", "stderr": said[-1000:]})
