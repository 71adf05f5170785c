"""Plugins: what installed packages offer through entry points, and objects named by `module:name` or `file.py:name`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import MissingError, RegistryError, did_you_mean


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One entry point, not yet imported.

    Attributes:
        name: The name that it offers: `Sql-v0`.
        target: Where it is: `agentrl_sql:SqlEnv`.
        package: The distribution that offers it.
        version: Of that distribution.
    """

    name: str
    target: str
    package: str
    version: str


@functools.lru_cache(maxsize=32)
def list_plugins(group: str) -> tuple[PluginInfo, ...]:
    """What installed packages offer in a group, sorted by name. Imports none of it.

    Args:
        group: `agentrl.environments`, `agentrl.rewards` or another group of entry points.

    Returns:
        One item an entry point; a package that is found twice on the path counts once.
    """
    found: set[tuple[str, str, str, str]] = set()
    for point in importlib.metadata.entry_points(group=group):
        package, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
        found.add((point.name, point.value, package, version))
    return tuple(PluginInfo(*item) for item in sorted(found))


def load_plugin(group: str, name: str, what: str) -> Any:
    """Imports what an entry point names.

    Args:
        group: The group of entry points.
        name: The entry point's name.
        what: What is looked for, in words, for the message: `environment`.

    Returns:
        The object.

    Raises:
        RegistryError: If no package offers the name, two offer it, or it does not load.
        MissingError: If it says itself what has to be installed first.
    """
    offers = [plugin for plugin in list_plugins(group) if plugin.name == name]
    if not offers:
        hint = did_you_mean(name, (plugin.name for plugin in list_plugins(group)))
        raise RegistryError(
            f"there is no {what} {name!r}.{hint} One that is not installed can be given as path/to/file.py:name."
        )
    if len({plugin.target for plugin in offers}) > 1:
        packages = " and ".join(f"{plugin.package} ({plugin.target})" for plugin in offers)
        raise RegistryError(f"the {what} {name!r} is offered by {packages}: uninstall one, or give module:name.")
    return load_object(offers[0].target, f"{what} {name!r} of the package {offers[0].package!r}")


def load_object(target: str, what: str) -> Any:
    """Imports an object by `module:name` or `path/to/file.py:name`.

    Args:
        target: Where it is; the name may have dots.
        what: What it is, in words, for the message.

    Returns:
        The object.

    Raises:
        RegistryError: If the target is not written so, its module does not load, or it has no such name.
        MissingError: If the module says itself what has to be installed first.
    """
    where, colon, name = target.rpartition(":")
    if not (colon and where and name):
        raise RegistryError(f"{what}: expected module:name or path/to/file.py:name, found {target!r}.")
    module = _loaded(
        lambda: _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where), what, where
    )
    value: Any = module
    for part in name.split("."):
        found = _loaded(functools.partial(getattr, value, part, _NOTHING), what, where)
        if found is _NOTHING:
            public = (known for known in vars(value) if not known.startswith("_"))
            raise RegistryError(f"{what}: {where} has no {part!r}.{did_you_mean(part, public)}")
        value = found
    return value


_NOTHING = object()


def _loaded(load: Callable[[], Any], what: str, where: str) -> Any:
    """The boundary to other people's modules: whatever they raise while they load becomes an error of ours."""
    try:
        return load()
    except (MissingError, RegistryError):
        raise
    except ModuleNotFoundError as error:
        if error.name is None or f"{where}.".startswith(f"{error.name}."):
            raise RegistryError(f"{what} does not load: there is no module {where!r}.") from error
        raise MissingError(f"{what} needs the package {error.name!r}, which is not installed: install it.") from error
    except Exception as error:
        raise RegistryError(f"{what} does not load: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    resolved = path.expanduser().resolve()
    if not resolved.is_file():
        raise RegistryError(f"there is no file {path}: expected path/to/file.py:name.")
    name = f"{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise RegistryError(f"{path} cannot be imported as a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and annotations look their module up by name while it is still loading.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
