"""Probes of privileges and the kernel (E)."""

from __future__ import annotations

from sandbox_box import Box, probe

CALLS = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == 'x86_64'
def call(x86, arm, *arguments):
    ctypes.set_errno(0)
    value = libc.syscall(ctypes.c_long(x86 if X86 else arm), *[ctypes.c_long(a) if isinstance(a,
        int) else a for a in arguments])
    return [value, ctypes.get_errno()]
"""


@probe("E01", "capabilities, no-new-privileges, user, filter", "unprivileged")
def privileges(box: Box) -> None:
    source = """
import json
print(json.dumps(dict(line.split(':\\t',
    1) for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)))
"""
    for done in (
        box.facts(source),
        box.facts(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {source!r}])"),
    ):
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(done[name], 16) == 0, name
        assert done["NoNewPrivs"] == "1"
        assert "0" not in done["Uid"].split()
        assert "0" not in done["Gid"].split()
        assert done["Seccomp"] == "2"


@probe("E02", "new namespaces, mount, pivot_root, chroot, setns", "unprivileged")
def namespaces(box: Box) -> None:
    source = (
        CALLS
        + """
got = []
for name, flag in (('user', 0x10000000), ('mount', 0x20000), ('user+mount', 0x10020000), ('net', 0x40000000),
    ('pid', 0x20000000)):
    if libc.unshare(flag) == 0:
        got.append('unshare ' + name)
pid = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)[0]
if pid == 0:
    os._exit(0)
if pid > 0:
    got.append('clone')
if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0:
    got.append('mount')
if call(155, 41, ctypes.c_char_p(b'/tmp'), ctypes.c_char_p(b'/tmp'))[0] == 0:
    got.append('pivot_root')
try:
    os.chroot('/tmp')
    got.append('chroot')
except OSError:
    pass
for kind in ('user', 'mnt', 'pid', 'net'):
    try:
        fd = os.open('/proc/1/ns/' + kind, os.O_RDONLY)
    except OSError:
        continue
    if libc.setns(fd, 0) == 0:
        got.append('setns ' + kind)
print(json.dumps(got))
"""
    )
    assert box.facts(source) == []


@probe("E03", "devices", "unprivileged")
def devices(box: Box) -> None:
    source = """
import json, os, stat
got = []
for name, kind, major, minor in (('mem', stat.S_IFCHR, 1, 1), ('kmsg', stat.S_IFCHR, 1, 11), ('disk',
    stat.S_IFBLK, 254, 0)):
    for folder in ('/tmp', '/workspace', '/dev/shm'):
        try:
            os.mknod(f'{folder}/{name}', kind | 0o666, os.makedev(major, minor))
            got.append('mknod ' + name)
        except OSError:
            pass
for place in ('/dev/mem', '/dev/kmem', '/dev/kmsg', '/dev/port', '/dev/sda', '/dev/vda', '/dev/nvme0n1',
    '/dev/fuse', '/dev/kvm'):
    try:
        os.close(os.open(place, os.O_RDONLY))
        got.append(place)
    except OSError:
        pass
print(json.dumps(got))
"""
    assert box.facts(source) == []


@probe("E04", "setuid programs", "unprivileged")
def setuid_programs(box: Box) -> None:
    source = """
import json, os, stat, subprocess
got = []
for folder in ('/usr/bin', '/usr/sbin', '/bin', '/sbin'):
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.stat(path).st_mode & stat.S_ISUID:
            child = subprocess.Popen([path], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL)
            try:
                if '0' in open(f'/proc/{child.pid}/status').read().partition('Uid:')[2].splitlines()[0].split():
                    got.append(path)
            except OSError:
                pass
            child.kill()
            child.wait()
done = subprocess.run(['su', '-c', 'id -u'], stdin=subprocess.DEVNULL, capture_output=True)
if done.stdout.strip() == b'0' or os.geteuid() == 0:
    got.append('su')
if 'NoNewPrivs:\\t1' not in open('/proc/self/status').read():
    got.append('new privileges')
print(json.dumps(got))
"""
    assert box.facts(source) == []


ATTACK = (
    CALLS
    + """
got, mine = [], {os.getpid()}
for pid in [int(name) for name in os.listdir('/proc') if name.isdigit()]:
    if pid in mine:
        continue
    base = f'/proc/{pid}'
    for name in ('mem', 'environ', 'maps', 'auxv', 'syscall', 'stack', 'io'):
        try:
            with open(f'{base}/{name}', 'rb', buffering=0) as file:
                file.read(1)
            got.append([pid, 'read ' + name])
        except OSError as error:
            if name == 'mem' and error.errno == 5:
                got.append([pid, 'open mem'])
    try:
        os.close(os.open(base + '/mem', os.O_RDWR))
        got.append([pid, 'write mem'])
    except OSError:
        pass
    for name in ('fd', 'cwd', 'root', 'exe', 'map_files'):
        try:
            os.readlink(f'{base}/{name}') if name in ('cwd', 'root', 'exe') else os.listdir(f'{base}/{name}')
            got.append([pid, name])
        except OSError:
            pass
    if libc.ptrace(16, pid, None, None) == 0:
        got.append([pid, 'ptrace'])
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    if call(310, 270, pid, vector, 1, vector, 1, 0)[0] >= 0:
        got.append([pid, 'process_vm_readv'])
    handle = call(434, 434, pid, 0)[0]
    for fd in range(16):
        if handle >= 0 and call(438, 438, handle, fd, 0)[0] >= 0:
            got.append([pid, 'pidfd_getfd'])
    if call(302, 261, pid, 6, (ctypes.c_ulong * 2)(1, 1), 0)[0] == 0:
        got.append([pid, 'prlimit'])
print(json.dumps(got))
"""
)


@probe("E05", "attacks the supervisor's memory, descriptors and environment", "exit_unforgeable")
def attack_supervisor(box: Box) -> None:
    assert box.facts(ATTACK) == []
    done = box.sandbox.exec_python(ATTACK)
    assert done.stdout == b"[]\n", done
    box.usable()


@probe("E06", "kill -9 -1 and kill -9 1", "exit_unforgeable")
def kill_everything(box: Box) -> None:
    source = """
import os, signal
for pid in (-1, 1, os.getppid()):
    for number in (9, 19, 15, 2, 1, 17, 6, 11):
        try:
            os.kill(pid, number)
        except OSError:
            pass
os._exit(7)
"""
    for run in (box.python, box.sandbox.exec_python):
        done = run(source)
        assert done.status in ("nonzero", "signal"), done
        assert done.exit_code in (7, None)
        box.usable()


@probe("E07", "writes to /proc/sys, sysrq, control groups and /sys", "unprivileged")
def kernel_files(box: Box) -> None:
    source = """
import glob, json, os
places = ['/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/proc/sys/vm/overcommit_memory']
places += ['/proc/sysrq-trigger', '/proc/sys/kernel/shmmax', '/sys/kernel/uevent_helper', '/sys/power/state',
    '/proc/irq/0/smp_affinity']
places += glob.glob('/sys/fs/cgroup/*') + glob.glob('/sys/fs/cgroup/*/*')
got = []
for place in places:
    try:
        os.close(os.open(place, os.O_WRONLY))
        got.append(place)
    except OSError:
        pass
for folder in ('/sys/fs/cgroup', '/sys/fs/cgroup/memory', '/sys/fs/cgroup/pids'):
    try:
        os.mkdir(folder + '/planted')
        got.append(folder)
    except OSError:
        pass
print(json.dumps(got))
"""
    assert box.facts(source) == []


@probe("E08", "system calls with a history", "kernel")
def system_calls(box: Box) -> None:
    source = (
        CALLS
        + """
buffer = ctypes.create_string_buffer(256)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
tries = {
    'io_uring_setup': (425, 425, 4, buffer), 'bpf': (321, 280, 0, buffer, 72), 'perf_event_open': (298, 241,
        buffer, 0, -1, -1, 0),
    'userfaultfd': (323, 282, 0), 'keyctl': (250, 219, 0, -3, 1), 'add_key': (248, 217,
        ctypes.c_char_p(b'user'), ctypes.c_char_p(b'k'), buffer, 1, -3),
    'process_vm_writev': (311, 271, 1, vector, 1, vector, 1, 0), 'kexec_load': (246, 104, 0, 0, 0, 0),
    'open_by_handle_at': (304, 265, -100, buffer, 0), 'init_module': (175, 105, buffer, 1, buffer),
        'kcmp': (312, 272, 1, 1, 0, 0, 0),
    'quotactl': (179, 60, 0, 0, 0, 0), 'fsopen': (430, 430, ctypes.c_char_p(b'tmpfs'), 0), 'acct': (163, 89,
        0), 'syslog': (103, 116, 3, buffer, 256),
}
print(json.dumps({name: call(*how) for name, how in tries.items() if call(*how)[1] not in (1, 38)}))
"""
    )
    assert box.facts(source) == {}


@probe("E09", "a controlling terminal", "unprivileged")
def terminal(box: Box) -> None:
    source = """
import fcntl, json, os, termios
got = [fd for fd in range(3) if os.isatty(fd)]
try:
    got.append(os.open('/dev/tty', os.O_RDWR))
except OSError:
    pass
for fd in range(3):
    try:
        fcntl.ioctl(fd, termios.TIOCSTI, b'x')
        got.append('TIOCSTI')
    except OSError:
        pass
print(json.dumps(got))
"""
    assert box.facts(source) == []


@probe("E10", "raises its own limits", "unprivileged")
def raise_limits(box: Box) -> None:
    source = """
import json, resource
got = []
for name in ('NOFILE', 'NPROC', 'CPU', 'FSIZE', 'CORE', 'MEMLOCK'):
    kind = getattr(resource, 'RLIMIT_' + name)
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY:
        continue
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
        got.append(name)
    except (OSError, ValueError):
        pass
print(json.dumps(got))
"""
    assert box.facts(source) == []


@probe("E11", "forges the wrapper's exit status through its event descriptor", "exit_unforgeable")
def forge_exit(box: Box) -> None:
    source = (
        CALLS
        + """
for pid in (1, os.getppid()):
    handle = call(434, 434, pid, 0)[0]
    for fd in range(64):
        stolen = call(438, 438, handle, fd, 0)[0]
        if stolen >= 0:
            try:
                os.write(stolen, (1).to_bytes(8, 'little'))
            except OSError:
                pass
os._exit(7)
"""
    )
    done = box.python(source)
    assert (done.status, done.exit_code) == ("nonzero", 7)
    box.usable()


@probe("E12", "replaces programs and start-up files for later steps", "exit_unforgeable")
def plant_files(box: Box) -> None:
    source = """
import os
os.makedirs('/workspace/bin', exist_ok=True)
for place in ('/workspace/python3', '/workspace/bin/python3', '/workspace/sh', '/tmp/python3'):
    open(place, 'w').write('#!/bin/sh\\necho planted\\n')
    os.chmod(place, 0o755)
for place in ('.profile', '.bashrc', '.bash_profile', '.pythonrc'):
    open('/workspace/' + place, 'w').write('echo planted\\n')
library = '/workspace/.local/lib/python%d.%d/site-packages' % __import__('sys').version_info[:2]
os.makedirs(library)
for place in ('/workspace/sitecustomize.py', '/workspace/usercustomize.py', library + '/usercustomize.py',
    '/workspace/json.py'):
    open(place, 'w').write('print("planted")\\n')
open(library + '/planted.pth', 'w').write('import os; print("planted")\\n')
"""
    assert box.python(source).ok
    done = box.sandbox.exec(["/usr/bin/python3", "-I", "-c", "import json; print('clean')"])
    assert done.stdout == b"clean\n"
    assert box.sandbox.exec(["sh", "-c", "echo clean"]).stdout == b"clean\n"
    box.sandbox.exec(["sh", "-c", "rm -rf /workspace/* /workspace/.[!.]*"])
