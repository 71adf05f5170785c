"""Backends by name, the unsafe local one, the filters, and images."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_box import LIMITS

from agentrl.errors import MissingError, RegistryError, UsageError
from agentrl.sandbox import (
    Limits,
    SandboxError,
    SandboxMissing,
    SandboxUsageError,
    check_requirements,
    get_backend,
    reap,
)
from agentrl.sandbox.bpf import deny_list
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.images import image_from_dockerfile, make_tree, tree_digest
from agentrl.sandbox.local import LocalBackend, UnsafeLocalWarning
from agentrl.sandbox.owner import owner_token
from agentrl.sandbox.seccomp import ALLOWED, docker_profile


def test_names() -> None:
    assert get_backend("unsafe-local").name == "unsafe-local"
    assert get_backend("docker").name == "docker"
    with pytest.raises(RegistryError, match="Did you mean 'docker'"):
        get_backend("dokcer")


def test_auto_is_never_without_isolation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr("agentrl.sandbox.bubblewrap._SEARCHED", str(tmp_path))
    with pytest.raises(SandboxMissing, match=r"docker: .*\n.*bubblewrap: ") as caught:
        get_backend("auto")
    assert caught.value.exit_code == 3


def test_requirements() -> None:
    check_requirements(DockerBackend().guarantees(), ["memory_bound", "kernel"])
    with pytest.raises(SandboxUsageError, match="requires the guarantee 'network_off'"):
        check_requirements(LocalBackend().guarantees(), ["output_bound", "network_off"])
    with pytest.raises(SandboxUsageError, match="Did you mean 'memory_bound'"):
        check_requirements(DockerBackend().guarantees(), ["memory_bond"])


def test_errors_say_what_the_command_ends_with() -> None:
    assert issubclass(SandboxMissing, MissingError)
    assert SandboxMissing.exit_code == 3
    assert issubclass(SandboxUsageError, UsageError)
    assert SandboxError.exit_code == 1


def test_importing_brings_no_engine() -> None:
    code = "import sys, agentrl.sandbox; print('docker' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# -- unsafe-local -----------------------------------------------------------------------------------------------------


@pytest.fixture
def local() -> Iterator[Any]:
    with pytest.warns(UnsafeLocalWarning, match="no isolation"):
        sandbox = LocalBackend().start("", LIMITS)
    with sandbox:
        yield sandbox


def test_local_runs_programs_and_files(local: Any) -> None:
    assert local.exec(["cat"], stdin=b"through").stdout == b"through"
    assert local.exec_python("import sys; sys.exit(4)").exit_code == 4
    local.write("a/b.txt", b"x")
    assert local.exec(["cat", "b.txt"], cwd="/workspace/a").stdout == b"x"
    assert local.read("a/b.txt") == b"x"
    assert local.exec(["sleep", "20"], limits=replace(LIMITS, wall_s=0.3)).status == "timeout"
    assert local.exec(["true"]).ok


def test_local_leaves_nothing(local: Any) -> None:
    folder = Path(local._folder)
    assert folder.is_dir()
    local.close()
    assert not folder.exists()
    assert local.process.poll() is not None


def test_local_never_kills_outside_its_own_groups(local: Any) -> None:
    with subprocess.Popen(["sleep", "20"]) as bystander:
        local.exec_python("while True: pass", limits=replace(LIMITS, wall_s=0.2))
        assert bystander.poll() is None
        bystander.kill()


def test_reap_removes_the_folders_of_the_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", "from agentrl.sandbox.owner import owner_token; print(owner_token())"]
    dead = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for token in (dead, owner_token()):
        (tmp_path / f"agentrl-unsafe-{token}_x").mkdir()
    assert LocalBackend().reap() == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"agentrl-unsafe-{owner_token()}_x"]
    assert reap().removed["unsafe-local"] == 0


# -- filters ----------------------------------------------------------------------------------------------------------


def test_the_allow_list_has_reasons_and_no_call_twice() -> None:
    names = [name for _, text in ALLOWED for name in text.split()]
    assert len(names) == len(set(names))
    assert all(reason for reason, _ in ALLOWED)
    forbidden = {"ptrace", "bpf", "io_uring_setup", "mount", "unshare", "setns", "keyctl", "userfaultfd", "pidfd_getfd"}
    assert forbidden & set(names) == set()
    profile = json.loads(docker_profile("x86_64"))
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert profile["architectures"] == ["SCMP_ARCH_X86_64"]
    with pytest.raises(SandboxMissing, match="riscv64"):
        docker_profile("riscv64")


def _verdict(machine: str, arch: int, number: int, *arguments: int) -> int:
    """What the kernel would answer: the filter's instructions, interpreted."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("=HBBI", deny_list(machine)))
    at, value = 0, 0
    while True:
        code, yes, no, k = program[at]
        at += 1
        if code == 0x20:
            value = struct.unpack_from("=I", data, k)[0]
        elif code == 0x15:
            at += yes if value == k else no
        elif code == 0x35:
            at += yes if value >= k else no
        elif code == 0x54:
            value &= k
        else:
            return k


@pytest.mark.parametrize(("machine", "arch", "column"), [("x86_64", 0xC000003E, 0), ("aarch64", 0xC00000B7, 1)])
def test_the_deny_list_decides(machine: str, arch: int, column: int) -> None:
    allow, perm, nosys = 0x7FFF0000, 0x00050001, 0x00050026

    def verdict(numbers: tuple[int, int], *arguments: int) -> int:
        return _verdict(machine, arch, numbers[column], *arguments)

    assert _verdict(machine, 0x40000003, 1) == 0x80000000  # 32-bit calls
    assert verdict((0, 63)) == verdict((1, 64)) == allow  # read, write
    assert verdict((101, 117)) == verdict((425, 425)) == verdict((272, 97)) == perm  # ptrace, io_uring, unshare
    assert verdict((435, 435)) == nosys  # clone3
    assert verdict((56, 220), 17) == allow  # fork
    assert verdict((56, 220), 0x10000000 | 17) == perm  # clone with CLONE_NEWUSER
    assert [verdict((41, 198), family) for family in (1, 2, 10, 16, 17, 38, 40)] == [allow] * 3 + [perm] * 4
    assert verdict((16, 29), 0, 0x5412) == verdict((16, 29), 0, 0x541C) == perm  # TIOCSTI, TIOCLINUX
    assert verdict((16, 29), 0, 0x5401) == allow
    assert verdict((302, 261), 0, 7) == allow  # prlimit64 of oneself
    assert verdict((302, 261), 1, 7) == perm
    assert verdict((141, 140), 0, 0, 5) == allow  # setpriority of oneself
    assert verdict((141, 140), 0, 1, 5) == perm
    with pytest.raises(SandboxMissing):
        deny_list("riscv64")


# -- images -----------------------------------------------------------------------------------------------------------


def test_a_trees_digest_follows_its_content(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "a").write_text("1")
    one = tree_digest(tmp_path)
    assert tree_digest(tmp_path) == one
    (tmp_path / "usr" / "a").write_text("2")
    assert tree_digest(tmp_path) != one
    assert make_tree(tmp_path) == tmp_path  # it is there already


@pytest.mark.docker
def test_a_dockerfile_becomes_an_image(docker_image: str, tmp_path: Path) -> None:
    import docker

    (tmp_path / "Dockerfile").write_text(f"FROM {docker_image}\nCOPY greeting /greeting\n")
    (tmp_path / "greeting").write_text("hello")
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "Dockerfile").write_text(f"FROM {docker_image}\nVOLUME /data\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "Dockerfile").write_text(f"FROM {docker_image}\nCOPY nothing /x\n")
    backend = DockerBackend()
    with closing(docker.DockerClient.from_env()) as client:
        digest = image_from_dockerfile(client, tmp_path, "agentrl-test:greeting")
        try:
            assert backend.identify("agentrl-test:greeting") == digest
            with backend.start(digest, Limits()) as sandbox:
                assert sandbox.image == digest
                assert sandbox.exec(["cat", "/greeting"]).stdout == b"hello"
            volume = image_from_dockerfile(client, tmp_path / "volume", "agentrl-test:volume")
            with pytest.raises(SandboxUsageError, match="volumes"):
                backend.start(volume, Limits())
            with pytest.raises(SandboxError, match="could not build"):
                image_from_dockerfile(client, tmp_path / "broken", "agentrl-test:broken")
        finally:
            for name in ("greeting", "volume"):
                client.images.remove(f"agentrl-test:{name}", force=True)
    backend.close()
