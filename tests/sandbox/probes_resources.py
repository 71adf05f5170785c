"""Probes of memory, processes and disk (M, P, D)."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from sandbox_box import Box, nonce, probe, survivors

MEMORY_HOG = "b = bytearray(700 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nprint('got it all')"
MANY_FORKS = """
import json, os, time
made = 0
for _ in range(400):
    try:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        made += 1
    except OSError:
        break
print(json.dumps(made))
"""


@probe("M01", "one process allocates 700 MB", "memory_bound")
def memory_hog(box: Box) -> None:
    done = box.python(MEMORY_HOG)
    expected = ("oom",) if box.sandbox.capabilities().oom_attributed else ("oom", "nonzero", "signal")
    assert done.status in expected, done
    box.usable()


@probe("M02", "six processes of 100 MB", "memory_bound")
def memory_together(box: Box) -> None:
    source = """
import json, os, time
for _ in range(6):
    if os.fork() == 0:
        b = bytearray(100 << 20)
        for i in range(0, len(b), 4096): b[i] = 1
        time.sleep(1.5)
        os._exit(0)
print(json.dumps(sum(os.wait()[1] == 0 for _ in range(6))))
"""
    done = box.python(source)
    assert done.status in ("ok", "oom"), done
    assert done.status == "oom" or int(done.stdout) < 6
    box.usable()


@probe("M03", "fills /tmp and /workspace", "disk_bound")
def fill_disk(box: Box) -> None:
    source = """
import json, os
total = {}
for folder in ('/tmp', '/workspace'):
    total[folder] = 0
    try:
        for k in range(20):
            with open(f'{folder}/fill{k}', 'wb', buffering=0) as file:
                for _ in range(10):
                    total[folder] += file.write(b'x' * (1 << 20))
    except OSError as error:
        total[folder + ' errno'] = error.errno
print(json.dumps(total))
"""
    found = box.facts(source)
    for folder in ("/tmp", "/workspace"):
        assert found[folder] <= 64 << 20
        assert found[f"{folder} errno"] == 28
    box.usable()
    assert box.sandbox.exec(["sh", "-c", "rm /tmp/fill* /workspace/fill*"]).ok


@probe("M04", "runs out of memory three times", "memory_bound")
def memory_thrice(box: Box) -> None:
    for _ in range(3):
        assert not box.python(MEMORY_HOG).ok
    box.usable()


@probe("P01", "400 forks", "pids_bound")
def many_forks(box: Box) -> None:
    assert 1 <= box.facts(MANY_FORKS) <= 64
    box.usable()


@probe("P02", "400 threads", "pids_bound")
def many_threads(box: Box) -> None:
    source = """
import json, threading, time
made = 0
for _ in range(400):
    try:
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        made += 1
    except RuntimeError:
        break
print(json.dumps(made), flush=True)
import os
os._exit(0)
"""
    assert 1 <= box.facts(source) <= 64


@probe("P03", "processes used up by a daemon tree, then the next step", "deadline_kills_all")
def forks_then_step(box: Box) -> None:
    source = f"import os, sys\nif os.fork(): sys.exit()\nos.setsid()\n{MANY_FORKS}\ntime.sleep(20)"
    background = box.sandbox.capabilities().background
    box.python(source, keep_background=background)
    time.sleep(0.3)
    box.usable()
    assert box.sandbox.exec_python("print(1)").stdout == b"1\n"


@probe("P04", "300 orphans that end", "nothing_survives")
def orphans(box: Box) -> None:
    source = """
import glob, json, os, time
for _ in range(300):
    while True:
        try:
            pid = os.fork()
            break
        except OSError:
            time.sleep(0.01)
    if pid == 0:
        try:
            if os.fork() == 0:
                os._exit(0)
        except OSError:
            pass
        os._exit(0)
    os.waitpid(pid, 0)
def zombies():
    count = 0
    for path in glob.glob('/proc/[0-9]*/stat'):
        try:
            count += open(path).read().rpartition(')')[2].split()[0] == 'Z'
        except OSError:
            pass
    return count
for _ in range(50):
    if not zombies():
        break
    time.sleep(0.05)
print(json.dumps(zombies()))
"""
    assert box.facts(source) == 0


@probe("D01", "20,000 empty files", "disk_bound")
def many_files(box: Box) -> None:
    source = """
import json
made = 0
try:
    for made in range(20000):
        open(f'/workspace/empty{made}', 'w').close()
except OSError:
    pass
print(json.dumps(made))
"""
    assert box.facts(source) <= box.sandbox.limits.tmp_inodes
    box.sandbox.exec(["sh", "-c", "rm -rf /workspace/empty*"])
    box.usable()


@probe("D02", "a sparse file of 1 TB", "disk_bound")
def sparse_file(box: Box) -> None:
    source = """
import json, os
found = []
for folder in ('/tmp', '/workspace', '/dev/shm'):
    fd = os.open(folder + '/sparse', os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, 1 << 40)
        found.append(0)
    except OSError as error:
        found.append(error.errno)
    os.unlink(folder + '/sparse')
print(json.dumps(found))
"""
    assert set(box.facts(source)) <= {27, 28}


@probe("D03", "writes to interpreter, libraries, /etc and /", "disk_bound")
def write_image(box: Box) -> None:
    source = """
import json, os, site, sys
places = [sys.executable, os.__file__, '/etc/passwd', '/etc/hosts', '/etc/resolv.conf']
places += [folder + '/planted' for folder in ('/', '/etc', '/usr/bin', '/usr/local/bin', '/var', '/home',
    '/run', '/opt')]
places += [folder + '/planted' for folder in [*site.getsitepackages(), os.path.dirname(os.__file__), '/dev',
    '/sys', '/proc']]
written = []
for place in places:
    try:
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT))
        written.append(place)
    except OSError:
        pass
print(json.dumps(written))
"""
    assert box.facts(source) == []


@probe("D04", "2000 folders deep and a tree without permissions, then close", "nothing_survives", fresh=True)
def deep_folders(box: Box) -> None:
    word = nonce()
    source = """
import os
os.makedirs('/workspace/shut/in')
os.chmod('/workspace/shut', 0)
for _ in range(2000):
    os.mkdir('d')
    os.chdir('d')
"""
    assert box.python(source).ok
    box.python("import time; time.sleep(30)", word, wall_s=0.3)
    began = time.monotonic()
    box.sandbox.close()
    assert time.monotonic() - began < 4
    assert survivors(word) == []
    assert box.sandbox.exec(["true"]).status == "sandbox_error"


@probe("D05", "reads the host's secrets", "files_hidden")
def host_files(box: Box) -> None:
    canary = Path("/var/tmp") / f"agentrl-canary-{uuid.uuid4().hex}"
    canary.write_text("for the host only")
    try:
        root = Path(__file__).resolve().parents[2]
        places = [
            "/etc/shadow",
            "/root",
            "/var/run/docker.sock",
            "/run/docker.sock",
            str(canary),
            str(root / "README.md"),
        ]
        source = """
import json, os, sys
found = []
for place in sys.argv[1:]:
    for attempt in (os.listdir, lambda path: open(path, 'rb').read(1)):
        try:
            if attempt(place) or place.endswith('.sock'):
                found.append(place)
        except OSError:
            pass
pid = os.environ.get('HOST_PID')
if os.path.exists('/proc/' + pid + '/cmdline') and b'pytest' in open('/proc/' + pid + '/cmdline', 'rb').read():
    found.append('host process')
print(json.dumps(found))
"""
        assert box.facts(source, *places, env={"HOST_PID": str(os.getpid())}) == []
    finally:
        canary.unlink()
