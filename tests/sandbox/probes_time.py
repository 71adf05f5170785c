"""Probes of deadlines, left-behind processes and output (T, O)."""

from __future__ import annotations

import resource
import time

from sandbox_box import Box, nonce, probe, survivors

STUBBORN = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
time.sleep(30)
"""
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1); os.close(2)
        time.sleep(30)
    os._exit(0)
os.wait()
if sys.argv[2] == 'stay':
    time.sleep(30)
print('done')
"""
MAYFLY = """
import os, time
end = time.monotonic() + 20
os.setsid()
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    time.sleep(0.001)
"""


@probe("T01", "busy loop", "deadline_kills_all")
def busy_loop(box: Box) -> None:
    began = time.monotonic()
    done = box.python("while True: pass", wall_s=1)
    assert done.status == "timeout"
    assert time.monotonic() - began <= 1 + 2


@probe("T02", "ignores SIGTERM, SIGINT and SIGHUP", "deadline_kills_all")
def stubborn(box: Box) -> None:
    word = nonce()
    assert box.python(STUBBORN, word, wall_s=1).status == "timeout"
    assert survivors(word) == []


@probe("T03", "timeout with a double-forked daemon", "deadline_kills_all")
def daemon_at_timeout(box: Box) -> None:
    word = nonce()
    assert box.python(DAEMON, word, "stay", wall_s=1).status == "timeout"
    assert survivors(word) == []


@probe("T04", "daemon left behind by a normal end", "nothing_survives")
def daemon_at_end(box: Box) -> None:
    word = nonce()
    assert box.python(DAEMON, word, "go").ok
    assert survivors(word) == []


@probe("T05", "background child keeps stdout open", "nothing_survives")
def open_stdout(box: Box) -> None:
    began = time.monotonic()
    done = box.sandbox.exec(["sh", "-c", "sleep 8 & echo kept"])
    assert done.ok
    assert done.stdout == b"kept\n"
    assert time.monotonic() - began < 2


@probe("T06", "stops itself", "deadline_kills_all")
def stops_itself(box: Box) -> None:
    word = nonce()
    done = box.python("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", word, wall_s=1)
    assert done.status == "timeout"
    assert survivors(word) == []


@probe("T07", "a process that forks itself anew every millisecond", "deadline_kills_all")
def mayfly(box: Box) -> None:
    word = nonce()
    assert (
        box.python(
            f"import time\nimport os\nif os.fork() == 0:\n    exec({MAYFLY!r})\ntime.sleep(30)", word, wall_s=1
        ).status
        == "timeout"
    )
    assert survivors(word) == []


@probe("T08", "four busy processes share one core", "cpu_bound")
def cpu_share(box: Box) -> None:
    source = """
import json, os, time
began = time.monotonic()
for _ in range(4):
    if os.fork() == 0:
        while time.monotonic() < began + 2:
            pass
        os._exit(0)
for _ in range(4):
    os.wait()
used = os.times()
print(json.dumps((used.children_user + used.children_system) / (time.monotonic() - began)))
"""
    assert box.facts(source) <= 1.35 * box.sandbox.limits.cpu_cores


def _flood(box: Box, stream: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    done = box.python(f"import sys\nfor _ in range(300): sys.{stream}.write('x' * (1 << 20))")
    assert done.status in ("output_limit", "ok"), done.status
    assert len(done.stdout) + len(done.stderr) <= 1 << 20
    assert done.truncated > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 * 1024
    assert time.monotonic() - began < 20


@probe("O01", "300 MB to stdout", "output_bound")
def flood_stdout(box: Box) -> None:
    _flood(box, "stdout")


@probe("O02", "300 MB to stderr", "output_bound")
def flood_stderr(box: Box) -> None:
    _flood(box, "stderr")


@probe("O03", "2 MB of honest output", "output_bound")
def honest_output(box: Box) -> None:
    began = time.monotonic()
    done = box.python("print('head' + '.' * (2 << 20) + 'tail')")
    assert done.ok
    assert done.exit_code == 0
    assert done.truncated > 0
    assert done.truncated + len(done.stdout) == done.bytes_total == (2 << 20) + 9
    assert done.evidence["stdout_left_out"] == done.truncated
    assert done.evidence["head_bytes"] == 1 << 19
    assert done.stdout.startswith(b"head")
    assert done.stdout.endswith(b"tail\n")
    assert time.monotonic() - began < 3


@probe("O04", "bytes that are no text", "output_bound")
def raw_bytes(box: Box) -> None:
    data = b"\x00\xff\xfe\x1b[2J\r\n\x80"
    done = box.python(f"import os; os.write(1, {data!r}); os.write(2, {data[::-1]!r})")
    assert (done.stdout, done.stderr) == (data, data[::-1])
    done = box.sandbox.exec_python(f"import os; os.write(1, {data!r}); os.write(2, {data[::-1]!r})")
    assert (done.stdout, done.stderr) == (data, data[::-1])


FORGER = """
import os, struct
text = b'{"status": "ok", "exit_code": 0, "signal": null, "out": 0}'
for number in range(40):
    for fd in range(64):
        try:
            os.write(fd, struct.pack('>QII', number, len(text), 0) + text)
        except OSError:
            pass
os._exit(3)
"""


@probe("O05", "forged replies on every descriptor", "exit_unforgeable")
def forged_frames(box: Box) -> None:
    for done in (box.python(FORGER), box.sandbox.exec_python(FORGER)):
        assert (done.status, done.exit_code) == ("nonzero", 3)
    box.usable()


@probe("O06", "reads when nothing is given", "deadline_kills_all")
def no_stdin(box: Box) -> None:
    assert box.python("import sys; print(repr(sys.stdin.read()))", wall_s=5).stdout == b"''\n"


@probe("O07", "never reads 5 MB of input", "deadline_kills_all")
def unread_stdin(box: Box) -> None:
    done = box.python("print('ignored it')", stdin=b"x" * (5 << 20), wall_s=10)
    assert (done.status, done.stdout) == ("ok", b"ignored it\n")
