"""What a call in a sandbox costs beside the engine's own ways, and what a fresh or an idle sandbox costs.

Prints medians in milliseconds and their ratios, all taken in one run and in turns, so that a busy machine slows each
alike. Goals: `exec_python` at most 1/10 of `docker exec` and 1/50 of `docker run`, also 8 at once; a command at most
1/3 of `docker exec`; a clean sandbox from the warm pool under 50 ms; 64 sandboxes in under 3 GB.

    python benchmarks/sandbox_latency.py IMAGE [--rounds 20] [--many 64] [--bubblewrap TREE] [--episodes 5000]

The last of these opens and closes that many sandboxes first, and says what of them is left.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from agentrl.sandbox import Limits, Sandbox, WarmPool
from agentrl.sandbox.bubblewrap import BubblewrapBackend
from agentrl.sandbox.contract import Backend
from agentrl.sandbox.docker import DockerBackend

AT_ONCE = 8
PRINT = ["python3", "-c", "print(1)"]


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def command(*argv: str) -> Callable[[], object]:
    """A program of the host's, whose output nobody reads."""
    return lambda: subprocess.run(argv, check=True, capture_output=True)


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median of each, taken one after the other in every round."""
    took_ms: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            took_ms[name].append(timed(work))
    return {name: statistics.median(times) for name, times in took_ms.items()}


def together(ways: list[Callable[[], object]], calls: int) -> float:
    """The median of calls made by as many threads as there are ways."""
    took_ms: list[float] = []

    def work(way: Callable[[], object]) -> None:
        took_ms.extend([timed(way) for _ in range(calls)])

    threads = [threading.Thread(target=work, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.median(took_ms)


def calls(docker: DockerBackend, image: str, rounds: int) -> None:
    """One call after the other, then 8 at once."""
    with docker.start(image, Limits()) as sandbox:
        container = sandbox.container
        ways = {
            "exec_python": lambda: sandbox.exec_python("print(1)"),
            "exec python3": lambda: sandbox.exec(PRINT),
            "exec true": lambda: sandbox.exec(["true"]),
            "docker exec python3": command("docker", "exec", container, *PRINT),
            "docker exec true": command("docker", "exec", container, "true"),
            "docker run python3": command("docker", "run", "--rm", "--network", "none", image, *PRINT),
        }
        ms = in_turns(ways, rounds)
    for name, value in ms.items():
        print(f"{name:22} {value:9.2f} ms")
    print(f"docker exec / exec_python  {ms['docker exec python3'] / ms['exec_python']:7.1f}   (goal: 10)")
    print(f"docker run / exec_python   {ms['docker run python3'] / ms['exec_python']:7.1f}   (goal: 50)")
    print(f"docker exec / exec, true   {ms['docker exec true'] / ms['exec true']:7.1f}   (goal: 3)")
    print(f"docker exec / exec, python {ms['docker exec python3'] / ms['exec python3']:7.1f}")


def calls_at_once(docker: DockerBackend, image: str, rounds: int) -> None:
    """8 sandboxes, a thread each."""
    sandboxes = [docker.start(image, Limits()) for _ in range(AT_ONCE)]
    try:
        ours = together([lambda s=s: s.exec_python("print(1)") for s in sandboxes], rounds)  # type: ignore[misc]
        theirs = together([command("docker", "exec", s.container, *PRINT) for s in sandboxes], max(2, rounds // 4))
        image_run = command("docker", "run", "--rm", "--network", "none", image, *PRINT)
        fresh = together([image_run] * AT_ONCE, max(1, rounds // 10))
    finally:
        for sandbox in sandboxes:
            sandbox.close()
    print(f"{AT_ONCE} at once: exec_python {ours:.2f} ms, docker exec {theirs:.1f} ms, docker run {fresh:.0f} ms")
    print(
        f"{AT_ONCE} at once: docker exec / exec_python {theirs / ours:.1f}, docker run / exec_python {fresh / ours:.1f}"
    )


def resets(backend: Backend, image: str, rounds: int) -> None:
    """A clean sandbox in hand, from the pool and without one."""
    cold_ms, warm_ms, close_ms = [], [], []
    with WarmPool(backend, image, Limits(), size=2, most=2) as pool:
        for _ in range(rounds):
            pool.wait_until_full(120)
            began = time.perf_counter()
            sandbox = pool.acquire()
            warm_ms.append(1000 * (time.perf_counter() - began))
            close_ms.append(timed(sandbox.close))
    started: list[Sandbox] = []
    for _ in range(max(3, rounds // 4)):
        cold_ms.append(timed(lambda: started.append(backend.start(image, Limits()))))
        started.pop().close()
    warm, cold, close = (statistics.median(times) for times in (warm_ms, cold_ms, close_ms))
    print(f"{backend.name}: from the pool {warm:.2f} ms (goal: 50), made anew {cold:.0f} ms, closed in {close:.0f} ms")


def memory(docker: DockerBackend, image: str, many: int) -> None:
    """What idle sandboxes hold: their processes and the engine's one for each, shared pages counted once."""
    before = _proportional_mib()
    sandboxes: list[Sandbox] = []
    try:
        for _ in range(many):
            sandboxes.append(docker.start(image, Limits()))  # noqa: PERF401 (those made are closed whatever happens)
        taken = _proportional_mib() - before
    finally:
        for sandbox in sandboxes:
            sandbox.close()
    print(f"{many} sandboxes hold {taken:.0f} MiB, {taken / many:.1f} each (goal: under 3072 for 64)")


def leftovers(backend: Backend, image: str, episodes: int) -> None:
    """Many episodes from one pool: descriptors, mounts, control groups and memory of this process, before and after."""
    with WarmPool(backend, image, Limits(), size=2, most=4) as pool:
        for k in range(episodes + 20):
            if k == 20:
                pool.wait_until_full(120)
                before = _held()
            with pool.acquire() as sandbox:
                sandbox.exec_python("print(1)")
        pool.wait_until_full(120)
        after = _held()
    grown = ", ".join(f"{name} {after[name] - before[name]:+d}" for name in before)
    print(f"{backend.name}: after {episodes} episodes: {grown}; reaped afterwards: {backend.reap()}")


def _held() -> dict[str, int]:
    groups = list(Path("/sys/fs/cgroup").glob("*/agentrl/*@*"))
    containers = subprocess.run(["docker", "ps", "-aq"], capture_output=True, check=False).stdout.split()
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mounts": len(Path("/proc/mounts").read_text().splitlines()),
        "control groups": len(groups),
        "containers": len(containers),
        "MiB": int(status.partition("VmRSS:")[2].split()[0]) // 1024,
    }


def _proportional_mib() -> float:
    total_kib = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name = (entry / "comm").read_text().strip()
            if name not in ("docker-init", "python3", "dockerd", "containerd") and not name.startswith(
                "containerd-shim"
            ):
                continue
            lines = (entry / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kib / 1024


def main() -> None:
    """Everything, in the order of the docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("image")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--many", type=int, default=64)
    parser.add_argument("--bubblewrap", metavar="TREE")
    parser.add_argument("--episodes", type=int, default=0)
    options = parser.parse_args()
    docker = DockerBackend()
    if options.episodes:
        leftovers(docker, options.image, options.episodes)
        if options.bubblewrap:
            leftovers(BubblewrapBackend(), options.bubblewrap, options.episodes)
    calls(docker, options.image, options.rounds)
    calls_at_once(docker, options.image, options.rounds)
    resets(docker, options.image, options.rounds)
    if options.bubblewrap:
        bubblewrap = BubblewrapBackend()
        with bubblewrap.start(options.bubblewrap, Limits()) as sandbox:
            ms = in_turns(
                {"python": lambda: sandbox.exec_python("print(1)"), "true": lambda: sandbox.exec(["true"])}, 20
            )
        print(f"bubblewrap: exec_python {ms['python']:.2f} ms, exec true {ms['true']:.2f} ms")
        resets(bubblewrap, options.bubblewrap, options.rounds)
    memory(docker, options.image, options.many)


if __name__ == "__main__":
    main()
