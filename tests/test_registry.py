from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnasium
import pytest

import agentrl
from agentrl.errors import MissingError, RegistryError
from agentrl.plugins import list_plugins, load_object, load_plugin
from agentrl.registry import GROUP, env_class, make_env, register_environments

TOY = f"{Path(__file__).parent / 'toy_env.py'}:ToyEnv"


def python(code, *path) -> str:
    script = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{textwrap.dedent(code)}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def install(folder, name, group, points) -> None:
    """Lays a distribution out as pip does: metadata with entry points, beside its modules."""
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "\n".join(f"{key} = {target}" for key, target in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    (tmp_path / "toy_plugin.py").write_text((Path(__file__).parent / "toy_env.py").read_text())
    (tmp_path / "toy_broken.py").write_text("1 / 0")
    (tmp_path / "toy_missing.py").write_text("from agentrl.errors import MissingError\nraise MissingError('install x')")
    points = {
        "Plug-v0": "toy_plugin:ToyEnv",
        "Broken-v0": "toy_broken:Env",
        "Gone-v0": "toy_gone:Env",
        "Half-v0": "toy_plugin:Nothing",
        "NoEnv-v0": "toy_plugin:Count",
        "Missing-v0": "toy_missing:Env",
        "Twice-v0": "toy_plugin:ToyEnv",
        "no version": "toy_plugin:ToyEnv",
    }
    install(tmp_path, "toy-one", GROUP, points)
    install(tmp_path, "toy-two", GROUP, {"Twice-v0": "toy_broken:Env"})
    monkeypatch.syspath_prepend(str(tmp_path))
    list_plugins.cache_clear()
    yield tmp_path
    list_plugins.cache_clear()
    for name in [key for key in gymnasium.registry if key.startswith("agentrl/")]:
        del gymnasium.registry[name]
    register_environments()


def test_import_is_light_and_registers_without_importing_plugins():
    heavy = ("torch", "transformers", "docker", "scipy", "openai", "sqlglot", "agentrl_sql", "agentrl_rewards")
    shown = python(f"""
        import agentrl, gymnasium
        print([name for name in {heavy!r} if name in sys.modules], "agentrl/Sql-v0" in gymnasium.registry)
    """)
    assert shown.strip() == "[] True"


def test_everything_that_is_exported_exists():
    lazy = {"evaluate", "train"}
    assert [name for name in agentrl.__all__ if name not in lazy and not hasattr(agentrl, name)] == []
    with pytest.raises(AttributeError, match=r"no attribute 'ToolEn'\. Did you mean 'ToolEnv'"):
        agentrl.ToolEn  # noqa: B018


def test_evaluate_is_callable_also_after_its_module_was_imported():
    for first in ("import agentrl.evaluate", "from agentrl.evaluate import evaluate", "pass"):
        shown = python(f"""
            import agentrl
            {first}
            print(callable(agentrl.evaluate), agentrl.evaluate.evaluate.__name__)
        """)
        assert shown.strip() == "True evaluate"


def test_plugins_are_listed_with_their_package(plugins):
    listed = {plugin.name: plugin for plugin in list_plugins(GROUP)}
    assert (listed["Plug-v0"].target, listed["Plug-v0"].package, listed["Plug-v0"].version) == (
        "toy_plugin:ToyEnv",
        "toy-one",
        "1.2",
    )


def test_an_environment_by_name_path_and_module(plugins):
    for env_id in ("Plug-v0", "agentrl/Plug-v0", TOY, "toy_plugin:ToyEnv"):
        assert make_env(env_id, format="fenced").name == "Toy-v0"
    assert env_class(TOY) is env_class(TOY)


@pytest.mark.parametrize(
    ("env_id", "problem"),
    [
        ("Plugg-v0", "there is no environment 'Plugg-v0'. Did you mean 'Plug-v0'?"),
        (
            "Broken-v0",
            "environment 'Broken-v0' of the package 'toy-one' does not load: ZeroDivisionError: division by zero",
        ),
        ("Gone-v0", "does not load: there is no module 'toy_gone'"),
        ("Half-v0", "toy_plugin has no 'Nothing'. Known: "),
        ("NoEnv-v0", "expected a subclass of agentrl.ToolEnv, found <class 'toy_plugin.Count'>"),
        ("Twice-v0", "offered by toy-two (toy_broken:Env) and toy-one (toy_plugin:ToyEnv)"),
        ("nowhere.py:Env", "there is no file nowhere.py"),
        ("toy_plugin:", "expected module:name or path/to/file.py:name"),
    ],
)
def test_an_environment_that_cannot_be_had_is_named_with_the_cause(plugins, env_id, problem):
    with pytest.raises(RegistryError, match=re.escape(problem)):
        env_class(env_id)


def test_a_plugin_says_itself_what_is_missing(plugins):
    with pytest.raises(MissingError, match="install x"):
        env_class("Missing-v0")


def test_registering_takes_what_gymnasium_takes(plugins):
    register_environments()
    assert "agentrl/Plug-v0" in gymnasium.registry
    assert "agentrl/no version" not in gymnasium.registry
    assert gymnasium.make("agentrl/Plug-v0", format="fenced").unwrapped.format.name == "fenced"


def test_a_file_that_broke_can_be_loaded_once_it_is_mended(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise ValueError('not yet')")
    with pytest.raises(RegistryError, match=r"thing does not load: ValueError: not yet"):
        load_object(f"{file}:answer", "thing")
    file.write_text("class Box:\n    answer = 42\n")
    assert load_object(f"{file}:Box.answer", "thing") == 42


def test_other_groups_load_too(plugins):
    with pytest.raises(RegistryError, match="there is no reward 'sql/corect'"):
        load_plugin("agentrl.rewards", "sql/corect", "reward")
