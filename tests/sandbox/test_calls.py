"""What one call in a sandbox does and says, the same on every backend that this machine has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sandbox_box import LIMITS

from agentrl.sandbox.contract import Backend, Sandbox
from agentrl.sandbox.errors import SandboxUsageError

BACKENDS = [pytest.param("docker", marks=pytest.mark.docker), "bubblewrap", "bubblewrap-user"]


@pytest.fixture(params=BACKENDS, scope="module")
def shared(request: pytest.FixtureRequest, open_backend: Callable[[str], tuple[Backend, str]]) -> Iterator[Sandbox]:
    backend, image = open_backend(request.param)
    with backend.start(image, LIMITS) as started:
        yield started


@pytest.fixture
def sandbox(shared: Sandbox) -> Sandbox:
    shared.exec(["sh", "-c", "rm -rf /workspace/*"])
    return shared


CLIENT = """
import time, urllib.request
for _ in range(100):
    try:
        print(urllib.request.urlopen('http://127.0.0.1:8123/page.txt').read())
        break
    except OSError:
        time.sleep(0.1)
"""


def test_background_processes_go_on_and_end_with_the_next_plain_call(sandbox: Sandbox) -> None:
    sandbox.write("page.txt", b"served")
    serve = "exec python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &"
    started = sandbox.exec(["sh", "-c", serve], keep_background=True)
    assert started.ok
    assert sandbox.exec_python(CLIENT, keep_background=True).stdout == b"b'served'\n"
    assert sandbox.read("page.txt") == b"served"
    assert sandbox.exec_python("pass").ok
    gone = sandbox.exec_python("import urllib.request; urllib.request.urlopen('http://127.0.0.1:8123/', timeout=2)")
    assert gone.status == "nonzero"


def test_python_text_behaves_as_a_program(sandbox: Sandbox) -> None:
    def run(source: str, **options: Any) -> tuple[str, int | None, bytes, bytes]:
        done = sandbox.exec_python(source, **options)
        return done.status, done.exit_code, done.stdout, done.stderr

    assert run("print(__name__, __import__('sys').argv)") == ("ok", 0, b"__main__ ['-c']\n", b"")
    assert run("import sys; sys.exit(5)")[:2] == ("nonzero", 5)
    assert run("import sys; sys.exit('why')") == ("nonzero", 1, b"", b"why\n")
    assert run("import os; print(os.environ['A'], sorted(os.environ)[:1])", env={"A": "b"})[2] == b"b ['A']\n"
    assert run("import atexit; atexit.register(print, 'last'); print('first')")[2] == b"first\nlast\n"
    assert (
        run("import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()")[2]
        == b"late\n"
    )
    status, code, _, said = run("def f():\n    1 / 0\nf()")
    assert (status, code) == ("nonzero", 1)
    assert said.splitlines()[0] == b"Traceback (most recent call last):"
    assert b"_runner" not in said
    assert b"runner" not in said
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")[0] == "signal"
    assert run("x = 1")[0] == run("print('x' in globals())")[0] == "ok"
    sandbox.write("helper.py", b"value = 41")
    assert run("import helper; print(helper.value + 1)")[2] == b"42\n"
    numbers = {run("import random; print(random.random())")[2] for _ in range(3)}
    assert len(numbers) == 3


def test_results_say_what_happened(sandbox: Sandbox) -> None:
    assert sandbox.exec(["no-such-program"]).status == "exec_error"
    assert sandbox.exec(["true"], cwd="/workspace/nowhere").status == "exec_error"
    spin = sandbox.exec_python("while True: pass", limits=replace(sandbox.limits, cpu_s=1.0))
    assert spin.status == "timeout"
    assert spin.evidence["cpu_s"] == 1.0
    big = sandbox.exec(["python3", "-c", "open('big', 'wb').truncate(1 << 30)"])
    assert big.status == "nonzero"
    with pytest.raises(SandboxUsageError, match="shell|program"):
        sandbox.exec("ls -l")
    with pytest.raises(SandboxUsageError, match="memory"):
        sandbox.exec(["true"], limits=replace(sandbox.limits, memory=sandbox.limits.memory * 2))


def test_files_go_in_and_out(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    sandbox.write("a/b/data.bin", data, mode=0o755)
    assert sandbox.read("a/b/data.bin") == data
    assert sandbox.exec(["stat", "-c", "%a %U", "a/b/data.bin"]).stdout.startswith(b"755 ")
    sandbox.write("a/b/data.bin", b"new")
    assert sandbox.read("/workspace/a/b/data.bin") == b"new"
    sandbox.write("a/c.py", b"c")
    sandbox.write("d.py", b"d")
    assert [(entry.path, entry.kind, entry.size) for entry in sandbox.list()][-1] == ("d.py", "file", 1)
    assert [entry.path for entry in sandbox.list("a")] == ["b", "b/data.bin", "c.py"]
    assert len(sandbox.list(max_entries=2)) == 2
    assert sandbox.export(["**/*.py"]).files == {"a/c.py": b"c", "d.py": b"d"}
    assert sandbox.export(["*.py"]).files == {"d.py": b"d"}
    assert sandbox.export(["a/**"]).files == {"a/b/data.bin": b"new", "a/c.py": b"c"}
    sandbox.exec(["sh", "-c", "touch \"$(printf 'odd\\nname.py')\"; ln d.py hard.py"])
    skipped = sandbox.export(["*.py"]).skipped
    assert [why for _, why in skipped] == ["it has several names", "it has several names", "its name is not plain"]
    one = len(b"a/c.py").to_bytes(8, "big") + b"a/c.py" + len(b"c").to_bytes(8, "big") + b"c"
    assert sandbox.export(["a/c.py"]).digest == hashlib.sha256(one).hexdigest()


ORDINARY = """
import asyncio, multiprocessing, os, shutil, sqlite3, ssl, subprocess, tempfile, threading, uuid, zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

def double(x):
    return 2 * x

if __name__ == '__main__':
    with ProcessPoolExecutor(2) as pool:
        assert list(pool.map(double, range(4))) == [0, 2, 4, 6]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(double, range(4))) == [0, 2, 4, 6]
    lock, queue = multiprocessing.Lock(), multiprocessing.Queue()
    child = multiprocessing.Process(target=queue.put, args=(7,))
    child.start()
    assert queue.get(timeout=10) == 7
    child.join()

    async def main():
        child = await asyncio.create_subprocess_exec('echo', 'hi', stdout=subprocess.PIPE)
        assert (await child.communicate())[0] == b'hi\\n'
        server = await asyncio.start_server(lambda r, w: w.close(), '127.0.0.1', 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b''
        writer.close()
        server.close()

    asyncio.run(main())
    with tempfile.TemporaryDirectory() as folder:
        base = sqlite3.connect(folder + '/x.db')
        base.execute('create table t(x)')
        base.execute('insert into t values (1)')
        base.commit()
        assert base.execute('select x from t').fetchall() == [(1,)]
        os.mkfifo(folder + '/pipe')
        shutil.make_archive(folder + '/packed', 'gztar', os.path.dirname(asyncio.__file__))
    print('all well')
"""


def test_ordinary_programs_work(sandbox: Sandbox) -> None:
    sandbox.write("ordinary.py", ORDINARY.encode())
    done = sandbox.exec(["python3", "ordinary.py"])
    assert done.stdout == b"all well\n", done
    sandbox.write(
        "test_it.py", b"def test_it(tmp_path):\n    (tmp_path / 'x').write_text('y')\n    assert 1 + 1 == 2\n"
    )
    shell = """
set -e
find /usr/bin -name 'py*' | sort | head -3 | tar -cf all.tar -T - 2>/dev/null
sed 's/1/2/' test_it.py | grep -c assert
date > when; touch -d yesterday when; cp -a when then; mv then later; ln -s later link; cat link > /dev/null
awk 'BEGIN { print 6 * 7 }'
"""
    done = sandbox.exec(["bash", "-c", shell])
    assert done.stdout == b"1\n42\n", done
    if sandbox.exec(["python3", "-c", "import pytest"]).ok:
        assert b"1 passed" in sandbox.exec(["python3", "-m", "pytest", "-q", "test_it.py"]).stdout
    if sandbox.exec(["git", "--version"]).ok:
        commit = (
            "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm one && git log --oneline"
        )
        assert sandbox.exec(["sh", "-c", commit]).stdout.endswith(b" one\n")
