"""Sandboxes that are ready before they are asked for: each used once, and replaced in the background."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass

from agentrl.sandbox.contract import Backend, Limits, Sandbox
from agentrl.sandbox.errors import SandboxBusy, SandboxError, SandboxMissing, SandboxUsageError

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_REAP_EVERY_S = 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_PING_S = 5.0
_JOIN_S = 90.0


@dataclass(frozen=True, slots=True)
class _Lease:
    sandbox: Sandbox
    ends_at: float


class WarmPool:
    """A few fresh sandboxes in stock, and a bound on how many are in use at once.

    One thread of its own makes them, one at a time, since making one is work for a processor and not a wait; it also
    closes those whose lease is over, and removes what dead owners left behind. After a failure it pauses, longer each
    time, instead of asking again at once. A pool belongs to the process that made it: a fork cannot use it.

    Args:
        backend: What makes sandboxes. It is not closed with the pool.
        image: As the backend names it.
        limits: Of every sandbox.
        size: Sandboxes in stock.
        most: Sandboxes in use at once; who asks for one more waits.
        lease_s: After how long one that is in use is closed, whoever holds it.

    Raises:
        SandboxUsageError: A number is below 1.
        SandboxMissing: There is no such image, or no engine.
    """

    def __init__(
        self,
        backend: Backend,
        image: str,
        limits: Limits | None = None,
        *,
        size: int = 2,
        most: int = 8,
        lease_s: float = 3600.0,
    ) -> None:
        if size < 1 or most < 1:
            raise SandboxUsageError(f"expected a stock and a most of at least 1, found size {size} and most {most}.")
        self.identity = backend.identify(image)
        self._backend, self._image, self._limits = backend, image, limits or Limits()
        self._size, self._lease_s = size, lease_s
        self._places = threading.BoundedSemaphore(most)
        self._changed = threading.Condition()
        self._stock: deque[Sandbox] = deque()
        self._leases: dict[str, _Lease] = {}
        self._closed = False
        self._pid = os.getpid()
        self._keeper = threading.Thread(target=self._keep, name="agentrl-sandbox-pool", daemon=True)
        self._keeper.start()

    def acquire(self, timeout_s: float = 60.0) -> Sandbox:
        """A fresh sandbox that answers. Close it when the episode is over: its place is free then.

        Args:
            timeout_s: How long to wait for a place.

        Raises:
            SandboxBusy: No place became free in time.
            SandboxMissing, SandboxError: None could be made; or the pool is closed, or another process's.
        """
        self._check()
        if not self._places.acquire(timeout=timeout_s):
            raise SandboxBusy(
                f"no sandbox became free within {timeout_s:g} s: close those that are done with, or raise `most`."
            )
        try:
            sandbox = self._take() or self._backend.start(self._image, self._limits)
        except BaseException:
            self._places.release()
            raise
        with self._changed:
            self._leases[sandbox.id] = _Lease(sandbox, time.monotonic() + self._lease_s)
        sandbox.on_close(lambda: self._give_back(sandbox.id))
        return sandbox

    def wait_until_full(self, timeout_s: float = 60.0) -> bool:
        """Waits until the stock is full; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._stock) >= self._size or self._closed, timeout_s)

    def close(self) -> None:
        """Closes every sandbox of the pool, also those in use. May be called again."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._keeper.join(_JOIN_S)
        while self._stock:
            self._stock.popleft().close()
        for lease in list(self._leases.values()):
            lease.sandbox.close()

    def __enter__(self) -> WarmPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise SandboxError(
                f"this pool of sandboxes belongs to process {self._pid}: make one in process {os.getpid()}."
            )
        if self._closed:
            raise SandboxError("this pool of sandboxes is closed: make a new one.")

    def _take(self) -> Sandbox | None:
        """The oldest in stock that answers; others are thrown away."""
        while True:
            with self._changed:
                if not self._stock:
                    return None
                sandbox = self._stock.popleft()
                self._changed.notify_all()
            if sandbox.ping(_PING_S):
                return sandbox
            sandbox.close()

    def _give_back(self, name: str) -> None:
        with self._changed:
            if self._leases.pop(name, None) is not None:
                self._places.release()

    # -- the keeper ---------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        pause_s, next_try, next_reap = _FIRST_PAUSE_S, 0.0, 0.0
        while not self._closed:
            now = time.monotonic()
            if now >= next_reap:
                next_reap = now + _REAP_EVERY_S
                self._reap()
            self._close_overdue(now)
            if len(self._stock) < self._size and now >= next_try:
                if self._make():
                    pause_s = _FIRST_PAUSE_S
                    continue
                next_try, pause_s = now + pause_s, min(_LONGEST_PAUSE_S, 2 * pause_s)
            with self._changed:
                self._changed.wait_for(functools.partial(self._awake, next_try), _TICK_S)

    def _awake(self, next_try: float) -> bool:
        return self._closed or (len(self._stock) < self._size and time.monotonic() >= next_try)

    def _make(self) -> bool:
        try:
            sandbox = self._backend.start(self._image, self._limits)
        except (SandboxError, SandboxMissing, OSError) as error:
            _log.warning("a sandbox for the stock could not be made: %s", error)
            return False
        with self._changed:
            if not self._closed:
                self._stock.append(sandbox)
                self._changed.notify_all()
                return True
        sandbox.close()
        return True

    def _reap(self) -> None:
        try:
            self._backend.reap()
        except (SandboxError, SandboxMissing, OSError) as error:
            _log.warning("what dead owners left behind could not be looked for: %s", error)

    def _close_overdue(self, now: float) -> None:
        with self._changed:
            overdue = [lease.sandbox for lease in self._leases.values() if now >= lease.ends_at]
        for sandbox in overdue:
            _log.warning("sandbox %s was in use for more than %g s and is closed", sandbox.id, self._lease_s)
            sandbox.close()
