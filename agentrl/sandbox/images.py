"""Images without a registry: a Debian tree out of debootstrap, the same as a Docker image, or a Dockerfile."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.sandbox.errors import SandboxError, SandboxMissing

PACKAGES = ("python3", "python3-pytest", "git", "ca-certificates")
"""What the base image has besides Debian's minimum."""
SUITE = "bookworm"
_BUILD_LABEL = "agentrl.image"


def base_name(packages: Sequence[str] = PACKAGES, suite: str = SUITE) -> str:
    """The name of the image with these packages: `agentrl-base:` and a digest of the recipe."""
    recipe = json.dumps([suite, sorted(packages)])
    return f"agentrl-base:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def make_tree(folder: Path, packages: Sequence[str] = PACKAGES, suite: str = SUITE) -> Path:
    """Makes a Debian tree, about half a minute; one that is there already is kept.

    Args:
        folder: Where it will be. It appears at once when it is whole.
        packages: Besides the minimum.
        suite: Debian's name of the release.

    Returns:
        The folder.

    Raises:
        SandboxMissing: debootstrap is not installed, or this process is not root.
        SandboxError: It failed.
    """
    if (folder / "usr").is_dir():
        return folder
    program = shutil.which("debootstrap", path=os.defpath + ":/usr/sbin:/sbin")
    if program is None or os.geteuid() != 0:
        raise SandboxMissing(f"making {folder} needs debootstrap, run as root: apt install debootstrap, then sudo.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        command = [program, "--variant=minbase", f"--include={','.join(packages)}", suite, str(building)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise SandboxError(f"debootstrap of {suite} failed: {' '.join(last)}")
        _slim(building)
        building.chmod(0o755)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _slim(tree: Path) -> None:
    """Takes out caches, and what differs from build to build or tells of this machine; makes the mount points."""
    for name in ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(tree / name, ignore_errors=True)
        (tree / name).mkdir(parents=True)
    for name in ("etc/hostname", "etc/resolv.conf", "etc/machine-id", "var/lib/dpkg/status-old"):
        (tree / name).unlink(missing_ok=True)
    (tree / "workspace").mkdir(exist_ok=True)


def tree_digest(tree: Path) -> str:
    """SHA-256 over names, modes and contents of a tree, in hex: what identifies a sandbox made of a folder."""
    whole = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        found = path.lstat()
        whole.update(f"{path.relative_to(tree)}\0{found.st_mode:o}\0".encode(errors="surrogateescape"))
        if path.is_symlink():
            whole.update(os.fsencode(path.readlink()))
        elif path.is_file():
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def image_from_tree(client: Any, tree: Path, name: str) -> str:
    """Makes a Docker image whose only layer is a tree.

    Args:
        client: A `docker.DockerClient`.
        tree: From `make_tree`.
        name: `repository:tag`.

    Returns:
        The image's digest.

    Raises:
        SandboxError: The engine refused.
    """
    from docker.errors import APIError

    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(file.name, "w") as archive:
            archive.add(tree, arcname=".", filter=_clean)
        repository, _, tag = name.partition(":")
        try:
            client.api.import_image(file.name, repository=repository, tag=tag or "latest")
            return str(client.api.inspect_image(name)["Id"])
        except APIError as error:
            raise SandboxError(f"could not make the image {name}: {error.explanation or error}") from error


def _clean(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Equal trees give equal layers; devices are the engine's business."""
    if item.isdev() and not item.isfifo():
        return None
    item.mtime = 0
    return item


def image_from_dockerfile(client: Any, folder: Path, name: str, *, network: bool = False) -> str:
    """Builds a Dockerfile.

    Args:
        client: A `docker.DockerClient`.
        folder: The build's context, with a `Dockerfile`.
        name: `repository:tag`.
        network: Whether its RUN lines may use the network.

    Returns:
        The image's digest.

    Raises:
        SandboxError: The build failed; the message ends with its last lines.
    """
    from docker.errors import APIError, BuildError

    try:
        image, _ = client.images.build(
            path=str(folder),
            tag=name,
            rm=True,
            forcerm=True,
            network_mode=None if network else "none",
            labels={_BUILD_LABEL: "1"},
        )
    except BuildError as error:
        said = "".join(part.get("stream", "") for part in error.build_log)[-500:]
        raise SandboxError(f"could not build {folder / 'Dockerfile'}: {error.msg}\n{said}") from error
    except (APIError, TypeError) as error:
        raise SandboxError(f"could not build {folder / 'Dockerfile'}: {error}") from error
    return str(image.id)


def ensure_base(client: Any, cache: Path, packages: Sequence[str] = PACKAGES, suite: str = SUITE) -> str:
    """The base image, made where it is not there yet.

    Args:
        client: A `docker.DockerClient`.
        cache: Folder for the tree; kept, since bubblewrap runs on it.
        packages: Besides Debian's minimum.
        suite: Debian's name of the release.

    Returns:
        Its name, `agentrl-base:...`.

    Raises:
        SandboxMissing: debootstrap or root is missing.
        SandboxError: Making it failed.
    """
    from docker.errors import ImageNotFound

    name = base_name(packages, suite)
    try:
        client.api.inspect_image(name)
    except ImageNotFound:
        tree = make_tree(cache / name.replace(":", "-"), packages, suite)
        image_from_tree(client, tree, name)
    return name
