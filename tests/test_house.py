"""The house rules that can be counted: sizes, import arrows, and what a wheel installs."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["agentrl", "environments", "rewards", "examples", "benchmarks", "tests"]
FILES = sorted(path for source in SOURCES for path in (ROOT / source).rglob("*.py"))


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_have_at_most_400_lines() -> None:
    sizes = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in FILES}
    assert {name: size for name, size in sizes.items() if size > 400} == {}


def test_functions_have_at_most_60_lines_and_7_parameters() -> None:
    long, wide = {}, {}
    for path in FILES:
        for node in _functions(path):
            where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters = [a for a in arguments if a.arg not in ("self", "cls")]
            if lines > 60:
                long[where] = lines
            if len(parameters) > 7:
                wide[where] = len(parameters)
    assert long == {}
    assert wide == {}


def test_import_arrows_point_one_way() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_plugins_use_only_the_public_door() -> None:
    allowed = {"agentrl", "agentrl_sql", "agentrl_rewards"}
    private = {}
    for path in [*(ROOT / "environments").rglob("*.py"), *(ROOT / "rewards").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            bad = [n for n in names if n.split(".")[0] == "agentrl" and n not in allowed]
            if bad:
                private[str(path.relative_to(ROOT))] = bad
    assert private == {}


def test_import_is_light() -> None:
    code = (
        "import sys, agentrl; heavy = {'torch', 'transformers', 'docker', 'scipy', 'peft', 'vllm', 'openai'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wheel_installs_no_common_name(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"agentrl", "agentrl_sql", "agentrl_rewards"}
    assert any(name.endswith("reward.toml") for name in names)
    assert any(name.startswith("agentrl/report/") and name.endswith(".html") for name in names)


def test_packages_say_that_they_are_typed() -> None:
    for package in ["agentrl", "environments/agentrl_sql", "rewards/agentrl_rewards"]:
        assert (ROOT / package / "py.typed").is_file()
