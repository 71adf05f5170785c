"""Starts programs from one thread that lives as long as the process.

The kernel's parent-death signal is sent when the *thread* that started a program ends: a sandbox that a worker thread
started would die with that thread.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Work = tuple[Future["subprocess.Popen[bytes]"], Callable[[], "subprocess.Popen[bytes]"]]
_lock = threading.Lock()
_queues: dict[int, queue.Queue[_Work]] = {}


def launch(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """As subprocess.Popen, by exec, from the launching thread.

    Raises:
        OSError: It cannot be started.
    """
    done: Future[subprocess.Popen[bytes]] = Future()
    with _lock:
        # By process id: after a fork the thread is gone from the copy, which gets one of its own.
        work = _queues.get(os.getpid())
        if work is None:
            work = _queues[os.getpid()] = queue.Queue()
            threading.Thread(target=_serve, args=(work,), name="agentrl-launcher", daemon=True).start()
    work.put((done, lambda: subprocess.Popen(argv, **options)))
    return done.result()


def _serve(work: queue.Queue[_Work]) -> None:
    while True:
        done, start = work.get()
        try:
            done.set_result(start())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            done.set_exception(error)
