"""Probes of the network, secrets, neighbours and file transfer (N, S, F)."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sandbox_box import SECRET, Box, nonce, probe, survivors

from agentrl.sandbox.errors import FileRefused


@contextmanager
def _listener(family: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen()
        yield server


@probe("N01", "interfaces, routes and the outside", "network_off")
def interfaces(box: Box) -> None:
    source = """
import json, socket, time
names = [line.split(':')[0].strip() for line in open('/proc/net/dev').read().splitlines()[2:]]
routes = open('/proc/net/route').read().splitlines()[1:]
began, reached = time.monotonic(), []
for address in ('192.0.2.1', '169.254.169.254'):
    try:
        socket.create_connection((address, 80), timeout=1.5)
        reached.append(address)
    except TimeoutError:
        reached.append(address + ' timed out')
    except OSError:
        pass
print(json.dumps([names, routes, reached, time.monotonic() - began]))
"""
    names, routes, reached, took_s = box.facts(source)
    assert (
        set(names) - {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0"}
        == set()
    )
    assert routes == []
    assert reached == []
    assert took_s < 2


@probe("N02", "names of hosts", "network_off")
def names(box: Box) -> None:
    began = time.monotonic()
    done = box.python("import socket; socket.getaddrinfo('example.com', 80)", wall_s=5)
    assert done.status == "nonzero"
    assert time.monotonic() - began < 2


@probe("N03", "a service on the host's loopback", "network_off")
def host_loopback(box: Box) -> None:
    with _listener(socket.AF_INET, ("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert box.python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)").status == "nonzero"


@probe("N04", "an abstract socket of the host", "network_off")
def abstract_socket(box: Box) -> None:
    name = f"\0agentrl-{uuid.uuid4().hex}"
    with _listener(socket.AF_UNIX, name):
        assert box.python(f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})").status == "nonzero"


@probe("N05", "raw, packet, netlink, vsock and other sockets", "network_off")
def odd_sockets(box: Box) -> None:
    source = """
import json, socket
got = []
families = {'raw': (2, 3, 1), 'raw6': (10, 3, 58), 'packet': (17, 3, 768), 'netlink': (16, 3, 0), 'vsock': (40,
    1, 0), 'alg': (38, 5, 0)}
families |= {'bluetooth': (31, 3, 0), 'can': (29, 3, 1), 'tipc': (30, 1, 0), 'xdp': (44, 3, 0), 'key': (15, 3,
    2), 'rds': (21, 5, 0)}
for name, how in families.items():
    try:
        socket.socket(*how).close()
        got.append(name)
    except OSError:
        pass
print(json.dumps(got))
"""
    assert box.facts(source) == []


@probe("S01", "a secret of the host's environment", "secrets_hidden")
def host_secret(box: Box) -> None:
    source = """
import glob
for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):
    try:
        print(open(path, 'rb').read())
    except OSError:
        pass
"""
    for done in (box.python(source), box.sandbox.exec_python(source), box.sandbox.exec(["env"])):
        assert done.ok
        assert done.stdout
        assert SECRET.encode() not in done.stdout


@probe("S02", "removes its own folder", "nothing_survives")
def remove_home(box: Box) -> None:
    box.sandbox.exec(["sh", "-c", "mkdir -p a && cd a && rm -rf /workspace/* /workspace /workspace/.[!.]*"])
    box.usable()
    box.sandbox.write("again.txt", b"x")
    assert box.sandbox.read("again.txt") == b"x"


@probe("S03", "looks for its neighbour's files and processes", "files_hidden")
def neighbour(box: Box) -> None:
    word = nonce()
    other = box.another()
    try:
        other.write("/workspace/mine.txt", word.encode())
        other.write("/tmp/mine.txt", word.encode())
        if other.capabilities().background:
            other.exec(
                ["sh", "-c", "python3 -c 'import time; time.sleep(20)' $0 >/dev/null 2>&1 &", word],
                keep_background=True,
            )
            assert survivors(word)
        done = box.sandbox.exec(
            ["sh", "-c", "cat /workspace/mine.txt /tmp/mine.txt /dev/shm/*; cat /proc/*/cmdline; ls /proc"]
        )
        assert word.encode() not in done.stdout.replace(b"\0", b" ")
    finally:
        other.close()
    assert survivors(word) == []


@probe("F01", "a link to /etc/passwd, read out", "files_confined")
def read_link(box: Box) -> None:
    assert box.sandbox.exec(["sh", "-c", "ln -s /etc/passwd link; ln -s /etc folder; ln -s /etc/passwd a.py"]).ok
    for path in ("link", "folder/passwd", "/workspace/link", "../etc/passwd", "/etc/passwd"):
        with pytest.raises(FileRefused):
            box.sandbox.read(path)
    taken = box.sandbox.export(["**"])
    assert taken.files == {}
    assert {path for path, _ in taken.skipped} == {"link", "folder", "a.py"}


@probe("F02", "a FIFO, read out", "files_confined")
def read_fifo(box: Box) -> None:
    assert box.sandbox.exec(["mkfifo", "pipe"]).ok
    began = time.monotonic()
    with pytest.raises(FileRefused):
        box.sandbox.read("pipe")
    assert box.sandbox.export(["*"]).files == {}
    assert time.monotonic() - began < 5


@probe("F03", "a huge sparse file, read out", "files_confined")
def read_huge(box: Box) -> None:
    assert box.sandbox.exec(["truncate", "-s", "40M", "huge"]).ok
    began = time.monotonic()
    with pytest.raises(FileRefused):
        box.sandbox.read("huge", max_bytes=1 << 20)
    with pytest.raises(FileRefused):
        box.sandbox.export(["huge"], max_bytes=1 << 20)
    assert time.monotonic() - began < 3


@probe("F04", "an upload through a linked folder", "files_confined")
def write_through_link(box: Box) -> None:
    assert box.sandbox.exec(["sh", "-c", "ln -s /tmp d; ln -s /etc e"]).ok
    for path in ("d/planted", "e/planted", "/etc/planted", "/workspace/../tmp/planted"):
        with pytest.raises(FileRefused):
            box.sandbox.write(path, b"x")
    assert box.sandbox.exec(["sh", "-c", "ls /tmp/planted /etc/planted"]).status == "nonzero"


@probe("F05", "an upload over a link", "files_confined")
def write_over_link(box: Box) -> None:
    assert box.sandbox.exec(["sh", "-c", "echo victim > victim; ln -s /workspace/victim x"]).ok
    box.sandbox.write("x", b"new")
    assert box.sandbox.read("victim") == b"victim\n"
    assert box.sandbox.read("x") == b"new"
