"""Backends by name, what a task requires of one, and the removal of what dead owners left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import RegistryError, did_you_mean
from agentrl.plugins import list_plugins, load_plugin
from agentrl.sandbox.bubblewrap import HOST_IMAGE, BubblewrapBackend
from agentrl.sandbox.contract import Backend, Guarantees, Limits
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.errors import SandboxError, SandboxMissing, SandboxUsageError
from agentrl.sandbox.local import LocalBackend

_log = logging.getLogger(__name__)

GROUP = "agentrl.sandboxes"
BUILT_IN: dict[str, Callable[[], Backend]] = {
    "docker": DockerBackend,
    "bubblewrap": BubblewrapBackend,
    "unsafe-local": LocalBackend,
}
AUTO = ("docker", "bubblewrap")
"""What `auto` tries, in order. Nothing without isolation is ever among them."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What an environment asks of its sandboxes.

    Attributes:
        image: For Docker: a name, or a digest. For bubblewrap: a tree, or `host`.
        limits: Of each sandbox.
        requires: Names of fields of Guarantees without which the environment must not run.
    """

    image: str
    limits: Limits = field(default_factory=Limits)
    requires: tuple[str, ...] = ("files_hidden", "network_off", "deadline_kills_all", "exit_unforgeable")


def get_backend(name: str) -> Backend:
    """A backend by name.

    Args:
        name: `docker`, `bubblewrap`, `unsafe-local`, a plugin's name, or `auto`: the first of docker and bubblewrap
        that
            works here.

    Raises:
        RegistryError: There is no such backend.
        SandboxMissing: `auto` found none that works.
    """
    if name == "auto":
        return _first_that_works()
    if name in BUILT_IN:
        return BUILT_IN[name]()
    plugins = [plugin.name for plugin in list_plugins(GROUP)]
    if name not in plugins:
        raise RegistryError(f"there is no sandbox {name!r}.{did_you_mean(name, [*BUILT_IN, 'auto', *plugins])}")
    made: Backend = load_plugin(GROUP, name, "sandbox")()
    return made


def _first_that_works() -> Backend:
    problems = []
    docker = DockerBackend()
    try:
        docker.ping()
        return docker
    except SandboxMissing as error:
        problems.append(f"docker: {error}")
        docker.close()
    bubblewrap = BubblewrapBackend()
    try:
        bubblewrap.start(HOST_IMAGE, Limits()).close()
        return bubblewrap
    except (SandboxMissing, SandboxError) as error:
        problems.append(f"bubblewrap: {error}")
    raise SandboxMissing("no sandbox works on this machine:\n" + "\n".join(f"  {problem}" for problem in problems))


def check_requirements(guarantees: Guarantees, requires: Iterable[str]) -> None:
    """Refuses a backend that does not promise what is required.

    Raises:
        SandboxUsageError: It does not, or the guarantee has no such name.
    """
    known = Guarantees.__dataclass_fields__
    for name in requires:
        if name not in known:
            raise SandboxUsageError(f"there is no guarantee {name!r}.{did_you_mean(name, known)}")
        value: Any = getattr(guarantees, name)
        if value is False or value == "full":
            raise SandboxUsageError(
                f"the environment requires the guarantee {name!r}, which the sandbox {guarantees.backend!r} does not "
                f"give on this machine: use another (--sandbox docker)."
            )


@dataclass(frozen=True, slots=True)
class Reaped:
    """What was removed: sandboxes by backend, and why a backend could not be looked at."""

    removed: dict[str, int]
    problems: dict[str, str]


def reap() -> Reaped:
    """Removes what killed runs left behind, of every built-in backend: what `agentrl doctor --reap` does.

    Only what belongs to a process of this machine that is dead is removed, and what is past its lifetime.
    """
    removed, problems = {}, {}
    for name, make in BUILT_IN.items():
        backend = make()
        try:
            removed[name] = backend.reap()
        except (SandboxError, SandboxMissing) as error:
            problems[name] = str(error)
        finally:
            backend.close()
    return Reaped(removed, problems)
