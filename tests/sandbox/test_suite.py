"""The escape-and-exhaust suite: every probe against every backend that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import probes_escape
import probes_reach
import probes_resources
import probes_time
import pytest
from sandbox_box import LIMITS, PROBES, Box, Probe, secret_in_environment

from agentrl.sandbox.contract import Backend, Guarantees, Sandbox

assert all((probes_escape, probes_reach, probes_resources, probes_time))  # imported for the probes that they hold

BACKENDS = [pytest.param("docker", marks=pytest.mark.docker), "bubblewrap", "bubblewrap-user"]


class Boxes:
    """Sandboxes for probes: one is used again and again, until a probe breaks it or wants one of its own."""

    def __init__(self, backend: Backend, image: str) -> None:
        self.backend, self.image = backend, image
        self._shared: Sandbox | None = None

    def start(self) -> Sandbox:
        return self.backend.start(self.image, LIMITS)

    def take(self, wanted: Probe) -> Box:
        if wanted.fresh:
            return Box(self.start(), self.start)
        if self._shared is None or not self._shared.ping():
            self._shared = self.start()
        return Box(self._shared, self.start)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()


@pytest.fixture(scope="module", params=BACKENDS)
def boxes(request: pytest.FixtureRequest, open_backend: Callable[[str], tuple[Backend, str]]) -> Iterator[Boxes]:
    with secret_in_environment():
        found = Boxes(*open_backend(request.param))
        yield found
        found.close()


def promised(guarantees: Guarantees, name: str) -> bool:
    """Whether a backend promises what a probe holds it to."""
    value: Any = getattr(guarantees, name)
    return value is not False and value != "full"


@pytest.mark.parametrize("wanted", PROBES.values(), ids=PROBES.keys())
def test_probe(boxes: Boxes, wanted: Probe) -> None:
    if not promised(boxes.backend.guarantees(), wanted.guarantee):
        pytest.skip(f"{boxes.backend.name} does not promise {wanted.guarantee} on this machine")
    box = boxes.take(wanted)
    try:
        wanted.run(box)
    finally:
        if wanted.fresh:
            box.sandbox.close()
        else:
            box.clean()


def test_the_table_is_whole() -> None:
    sizes = {"T": 8, "O": 7, "M": 4, "P": 4, "D": 5, "E": 12, "N": 5, "S": 3, "F": 5}
    assert sorted(PROBES) == sorted(f"{group}{k:02d}" for group, size in sizes.items() for k in range(1, size + 1))


def test_every_guarantee_has_a_probe() -> None:
    fields = set(Guarantees.__dataclass_fields__) - {"backend", "background", "oom_attributed", "processes_hidden"}
    assert {wanted.guarantee for wanted in PROBES.values()} == fields
