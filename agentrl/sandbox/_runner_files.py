"""Files in and out of a sandbox: part of the program that `_runner.py` describes.

All of it runs in a child with the agent's rights, so that nothing can be reached that the agent could not reach itself.
Folders are walked by descriptor without following links, and only regular files are read or replaced.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

Roots = Mapping[str, str]
Reply = tuple[dict[str, Any], bytes]

MAX_DEPTH = 64
CHUNK = 1 << 20
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
REGULAR = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class Refused(Exception):
    """What was asked for breaks the rules; the text says which."""


def real(roots: Roots, path: str) -> str:
    """The path in this file system of a folder that a program starts in."""
    for shown, folder in roots.items():
        if path == shown or path.startswith(shown + "/"):
            return folder + path[len(shown) :]
    return path if path.startswith("/") else roots["/workspace"] + "/" + path


def work(roots: Roots, head: Mapping[str, Any], body: bytes) -> NoReturn:
    """Does one operation, writes its reply to descriptor 1 and ends the process."""
    try:
        reply, data = OPERATIONS[head["do"]](roots, head, body)
    except Refused as refusal:
        reply, data = {"refused": str(refusal)}, b""
    except OSError as error:
        reply, data = {"refused": explain(error)}, b""
    text = json.dumps(reply).encode()
    for part in (len(text).to_bytes(4, "big") + text, data):
        view = memoryview(part)
        while view:
            view = view[os.write(1, view) :]
    os._exit(0)


def explain(error: OSError) -> str:
    """What an error of the file system means here."""
    words = {errno.ELOOP: "a link is in the way", errno.ENOTDIR: "a link or file is in the way of a folder"}
    return words.get(error.errno or 0, error.strerror or str(error))


def split(roots: Roots, path: str) -> tuple[int, list[str]]:
    """The root that a path is below, opened, and the names on the way."""
    if "\0" in path:
        raise Refused("the path holds a NUL byte")
    whole = path if path.startswith("/") else "/workspace/" + path
    for shown, folder in roots.items():
        if whole == shown or whole.startswith(shown + "/"):
            names = [name for name in whole[len(shown) :].split("/") if name not in ("", ".")]
            if ".." in names:
                raise Refused("the path holds '..'")
            return os.open(folder, FOLDER), names
    raise Refused("the path is not below " + " or ".join(roots))


def descend(fd: int, names: list[str], *, make: bool = False) -> int:
    """The folder at the end of the names; the given descriptor is closed."""
    for name in names:
        try:
            below = os.open(name, FOLDER, dir_fd=fd)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(name, 0o755, dir_fd=fd)
            below = os.open(name, FOLDER, dir_fd=fd)
        os.close(fd)
        fd = below
    return fd


def read_at(fd: int, name: str, max_bytes: int) -> bytes:
    """A regular file's content."""
    file = os.open(name, REGULAR, dir_fd=fd)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("it is no regular file")
        if found.st_size > max_bytes:
            raise Refused(f"it has {found.st_size} bytes, more than {max_bytes}")
        data = bytearray()
        while len(data) <= max_bytes:
            chunk = os.read(file, min(CHUNK, max_bytes + 1 - len(data)))
            if not chunk:
                return bytes(data)
            data += chunk
        raise Refused(f"it has more than {max_bytes} bytes")
    finally:
        os.close(file)


def read(roots: Roots, head: Mapping[str, Any], _: bytes) -> Reply:
    """One file."""
    fd, names = split(roots, head["path"])
    if not names:
        raise Refused("it is a folder")
    return {}, read_at(descend(fd, names[:-1]), names[-1], head["max_bytes"])


def write(roots: Roots, head: Mapping[str, Any], body: bytes) -> Reply:
    """One file, replaced at once: a link that stands there is replaced, not followed."""
    fd, names = split(roots, head["path"])
    if not names:
        raise Refused("it is a folder")
    fd = descend(fd, names[:-1], make=True)
    fresh = f".agentrl-{os.getpid()}"
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=fd)
    try:
        view = memoryview(body)
        while view:
            view = view[os.write(file, view[:CHUNK]) :]
        os.fchmod(file, head["mode"])
        os.rename(fresh, names[-1], src_dir_fd=fd, dst_dir_fd=fd)
    except OSError:
        os.unlink(fresh, dir_fd=fd)
        raise
    return {}, b""


def walk(fd: int, prefix: str = "") -> Iterator[tuple[str, os.stat_result, int, str]]:
    """What is below a folder, sorted by name, folders before what they hold: path, stat, folder's descriptor, name."""
    for name in sorted(os.listdir(fd)):
        try:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield prefix + name, found, fd, name
        if stat.S_ISDIR(found.st_mode) and prefix.count("/") < MAX_DEPTH:
            try:
                below = os.open(name, FOLDER, dir_fd=fd)
            except OSError:
                continue
            try:
                yield from walk(below, prefix + name + "/")
            finally:
                os.close(below)


def kind_of(mode: int) -> str:
    """The kind of an entry, in a word."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"


def list_(roots: Roots, head: Mapping[str, Any], _: bytes) -> Reply:
    """A folder's entries."""
    fd, names = split(roots, head["path"])
    entries: list[list[Any]] = []
    for path, found, _fd, _name in walk(descend(fd, names)):
        if len(entries) == head["max_entries"]:
            break
        entries.append([path, kind_of(found.st_mode), found.st_size])
    return {"entries": entries}, b""


def export(roots: Roots, head: Mapping[str, Any], _: bytes) -> Reply:
    """The regular files that match, one after the other."""
    patterns = [re.compile(translate(pattern)) for pattern in head["allow"]]
    files: list[list[Any]] = []
    skipped: list[list[str]] = []
    data = bytearray()
    for path, found, fd, name in walk(os.open(roots["/workspace"], FOLDER)):
        if stat.S_ISDIR(found.st_mode) or not any(pattern.fullmatch(path) for pattern in patterns):
            continue
        why = unfit(path, found)
        if why is None and len(files) < head["max_files"]:
            try:
                content = read_at(fd, name, head["max_bytes"] - len(data))
            except Refused as refusal:
                raise Refused(f"{path}: {refusal} (of {head['max_bytes']} for all files)") from None
            except OSError as error:
                why = explain(error)
            else:
                files.append([path, len(content)])
                data += content
                continue
        if len(skipped) < head["max_files"]:
            skipped.append([path, why or "too many files"])
    return {"files": files, "skipped": skipped}, bytes(data)


def unfit(path: str, found: os.stat_result) -> str | None:
    """Why an entry may not leave, or None."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_nlink != 1:
        return "it has several names"
    plain = path.isprintable() and unicodedata.normalize("NFC", path) == path and "\\" not in path
    return None if plain else "its name is not plain"


def translate(pattern: str) -> str:
    """A pattern of paths as a regular expression: `*` and `?` stay inside a folder, `**/` is any folders, or none."""
    out, rest = "", pattern
    while rest:
        if rest.startswith("**/"):
            out, rest = out + "(?:[^/]+/)*", rest[3:]
        elif rest == "**":
            out, rest = out + ".+", ""
        elif rest[0] in "*?":
            out, rest = out + ("[^/]*" if rest[0] == "*" else "[^/]"), rest[1:]
        else:
            out, rest = out + re.escape(rest[0]), rest[1:]
    return "(?s:" + out + ")"


OPERATIONS: dict[str, Callable[[Roots, Mapping[str, Any], bytes], Reply]] = {
    "read": read,
    "write": write,
    "list": list_,
    "export": export,
}
