"""A backend as many write it: `docker run` with its defaults, `docker exec`, files copied as the engine copies them.

It claims every guarantee. The suite must notice.
"""

from __future__ import annotations

import io
import tarfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentrl.sandbox.contract import MIB, WORKSPACE, Artefact, Entry, ExecResult, Guarantees, Limits, Sandbox
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.errors import FileRefused


class WeakSandbox(Sandbox):
    """A container of the engine's defaults."""

    def __init__(self, client: Any, image: str, limits: Limits) -> None:
        self.id, self.image, self.limits = uuid.uuid4().hex, image, limits
        self.container = client.containers.run(
            image,
            ["sleep", "600"],
            detach=True,
            auto_remove=True,
            working_dir=WORKSPACE,
            labels={"agentrl.sandbox": "1", "agentrl.expires": "0"},
        )

    def capabilities(self) -> Guarantees:
        return DockerBackend().guarantees()

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        keep_background: bool = False,
    ) -> ExecResult:
        found: list[Any] = []
        options = {"demux": True, "workdir": cwd, "environment": dict(env or {})}

        def run() -> None:
            with suppress(Exception):  # the container may end before its program does
                found.append(self.container.exec_run(list(argv), **options))

        work = threading.Thread(target=run, daemon=True)
        work.start()
        work.join((limits or self.limits).wall_s)
        if not found:
            return ExecResult("timeout")
        code, (out, err) = found[0]
        total = len(out or b"") + len(err or b"")
        return ExecResult("nonzero" if code else "ok", code, None, out or b"", err or b"", bytes_total=total)

    def exec_python(self, source: str, **options: Any) -> ExecResult:
        return self.exec(["python3", "-c", source], **options)

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        folder, _, name = self._whole(path).rpartition("/")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            item = tarfile.TarInfo(name)
            item.size, item.mode = len(data), mode
            archive.addfile(item, io.BytesIO(data))
        self.exec(["mkdir", "-p", folder])
        self.container.put_archive(folder, packed.getvalue())

    def read(self, path: str, max_bytes: int = MIB) -> bytes:
        done = self.exec(["cat", self._whole(path)])
        if not done.ok:
            raise FileRefused(done.stderr.decode())
        return done.stdout

    def list(self, root: str = WORKSPACE, max_entries: int = 1000) -> tuple[Entry, ...]:
        return ()

    def export(self, allow: Sequence[str], max_bytes: int = 4 * MIB) -> Artefact:
        names = self.exec(["sh", "-c", "ls -A"]).stdout.decode().split()
        return Artefact({name: self.read(name) for name in names})

    def ping(self, deadline_s: float = 5.0) -> bool:
        return self.exec(["true"]).ok

    def on_close(self, hook: Callable[[], None]) -> None:
        del hook

    def close(self) -> None:
        DockerBackend().remove(self.container.id)

    def _whole(self, path: str) -> str:
        return path if path.startswith("/") else f"{WORKSPACE}/{path}"
