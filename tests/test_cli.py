from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl.cli import COMMANDS, main
from agentrl.commands._smoke import smoke
from agentrl.config import RunConfig
from agentrl.run import RunDir

TOY = f"{Path(__file__).parent / 'toy_env.py'}:ToyEnv"
RUN_TOML = 'name = "x"\n[model.tiny]\nlayers = 2\n[sft]\nsteps = 50\n[ppo]\niterations = 7\n'


@pytest.fixture
def toml(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML)
    return str(path)


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from agentrl.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def resolved(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["train", *arguments, "--dry-run"]) == 0
    return json.loads(capsys.readouterr().out)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from agentrl.cli import main; main(['--help']); "
        "heavy = {'torch', 'transformers', 'scipy', 'tyro', 'docker', 'openai', 'jinja2'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    times = []
    for _ in range(3):
        start = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        end = os.times()
        # Time of the processor, not of the wall: other work on the machine does not count.
        times.append(end.children_user + end.children_system - start.children_user - start.children_system)
        assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
    assert min(times) < 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: agentrl {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "usage: agentrl COMMAND"),
        (("trian",), "there is no command 'trian'. Did you mean 'train'?"),
        (("train", "-c", "nowhere.toml"), "config file 'nowhere.toml' does not exist"),
        (("train", "--model.path", "m"), "--name"),
        (("train", "--name", "x", "--model.pth", "m"), "Unrecognized options"),
        (("train", "--name", "x"), "model: give either model.path or model.tiny"),
        (
            ("train", "--name", "x", "--model.path", "m", "--ppo.epochs", "0"),
            "ppo.epochs: expected greater than or equal",
        ),
        (("train", "--name", "x", "--model.path", "m", "--ppo.epochs", "y"), "--ppo.epochs"),
        (("eval", "Nowhere-v0", "-m", "expert"), "there is no environment 'Nowhere-v0'"),
        (("eval", TOY, "-m", "expert", "-s", "devv"), "Did you mean 'dev'?"),
        (("eval", TOY, "-m", "expert", "--settings", "[1]"), "--settings: expected a JSON object"),
        (("eval", TOY, "-m", "expert", "-n", "0"), "--tasks: expected at least 1, found 0"),
        (("eval", TOY, "-m", "expert", "--max-turns", "0"), "max_turns: expected greater than or equal to 1"),
        (("explain", "/nowhere", "x"), "holds no episodes"),
        (("sft", "--name", "x"), "model: give either model.path or model.tiny"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(list(arguments))
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    assert code == 2
    assert expected in " ".join(shown.err.replace("│", " ").split())
    assert shown.out == ""


def test_files_come_first_and_flags_win(toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = tmp_path / "over.toml"
    over.write_text("seed = 4\n[ppo]\nepochs = 2\n")
    config = resolved(capsys, "-c", toml, "--config", str(over), "--ppo.iterations", "3", "--name", "y")
    assert (config["name"], config["seed"]) == ("y", 4)
    assert (config["ppo"]["iterations"], config["ppo"]["epochs"]) == (3, 2)
    assert (config["model"]["tiny"]["layers"], config["sft"]["steps"]) == (2, 50)


def test_sections_come_and_go_with_flags(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--sft",
        "none",
        "--model.tiny=none",
        "--model.path",
        "m",
        "--model.lora.rank",
        "3",
        "--model.critic",
        "head",
    ]
    config = resolved(capsys, "-c", toml, *flags)
    assert config["sft"] is None
    assert (config["model"]["tiny"], config["model"]["lora"]) == (None, {"rank": 3, "alpha": 32.0, "layers": None})
    assert resolved(capsys, "-c", toml, "--sft.optim.lr", "0.5")["sft"]["optim"]["warmup_steps"] == 20


def test_flags_take_tables_lists_and_nothing(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--env.settings", '{"levels": [2]}', "--trackers", "tensorboard", "wandb", "--ppo.target-kl", "None"]
    config = resolved(capsys, "-c", toml, *flags, "--rollout.sampling.max-tokens", "9", "--eval.splits", "a", "b")
    assert config["env"]["settings"] == {"levels": [2]}
    assert (config["trackers"], config["ppo"]["target_kl"]) == (["tensorboard", "wandb"], None)
    assert (config["rollout"]["sampling"]["max_tokens"], config["eval"]["splits"]) == (9, ["a", "b"])


def test_a_resolved_config_runs_again(toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = resolved(capsys, "-c", toml, "--seed", "3")
    (tmp_path / "config.json").write_text(json.dumps(first))
    assert resolved(capsys, "-c", str(tmp_path / "config.json")) == first


def test_smoke_only_makes_smaller() -> None:
    config = RunConfig.model_validate(
        {"name": "x", "model": {"tiny": {"layers": 1}}, "sft": {}, "rollout": {"tasks": 2}}
    )
    small = smoke(config)
    assert small.name == "x-smoke"
    assert (small.rollout.tasks, small.ppo.iterations, small.eval.tasks) == (2, 2, 4)
    assert small.model.tiny is not None
    assert small.model.tiny.layers == 1
    assert small.sft is not None
    assert small.sft.optim == config.sft.optim


def test_eval_prints_data_on_stdout_and_progress_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", TOY, "-m", "expert", "-s", "dev", "-n", "5", "--json"]) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert (summary["success"], summary["n_scored"], summary["split"]) == (1.0, 5, "dev")
    assert shown.err.startswith("evaluate 5/5 ok=5 errors=0")
    assert main(["eval", TOY, "-m", "expert", "-s", "dev", "-n", "5"]) == 0
    assert "100.0 %" in capsys.readouterr().out


def test_a_missed_bar_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "eval",
        TOY,
        "-m",
        "expert",
        "-s",
        "dev",
        "-n",
        "2",
        "-o",
        str(tmp_path),
        "--settings",
        '{"largest": 0}',
    ]
    assert main([*arguments, "--fail-under", "0.5"]) == 1
    assert "below --fail-under 0.5" in capsys.readouterr().err
    assert main([*arguments, "--fail-under", "0"]) == 0


class CountingServer(BaseHTTPRequestHandler):
    """A real server of the chat-completions protocol, behind it a model that counts well and talks HTTP badly."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        target = re.search(r"Count to (\d+)", asked["messages"][1]["content"])
        counted = "The count is" in asked["messages"][-1]["content"]
        text = "```submit\n```" if counted else f'```add\n{{"n": {target[1]}}}\n```'
        message = {"role": "assistant", "content": text}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"]}
        body["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
        self.send_response(200 if asked["model"] == "counter" else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_an_endpoint_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), CountingServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        flags = ["-b", url, "-s", "dev", "-n", "4", "--format", "fenced", "--json"]
        assert main(["eval", TOY, "-m", "counter", *flags]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert main(["eval", TOY, "-m", "conuter", *flags]) == 2
        assert "conuter" in capsys.readouterr().err
        server.shutdown()
    assert (summary["success"], summary["n_scored"]) == (1.0, 4)


def test_explain_finds_an_episode_by_a_part_of_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", TOY, "-m", "expert", "-s", "dev", "-n", "3", "-o", str(tmp_path)])
    capsys.readouterr()
    assert main(["explain", str(tmp_path), "dev/00001"]) == 0
    assert "toy/reached" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "dev/00001", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["success"] is True
    assert main(["explain", str(tmp_path), "dev/0000"]) == 2
    assert f"agentrl explain {tmp_path} dev/00002-train-000002/0" in capsys.readouterr().err


def test_list_shows_plugins_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert "levels" in entries["Sql-v0"]["details"]["settings"]
    assert entries["sql/correct"]["details"]["when"] == "end"
    assert {"hermes", "fenced"} <= set(entries)
    assert all(entry["broken"] is None for entry in entries.values() if entry["source"].startswith("agentrl"))


def test_a_broken_plugin_is_shown_as_broken(tmp_path: Path) -> None:
    package = tmp_path / "ill-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: ill\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[agentrl.environments]\nIll-v0 = ill:IllEnv\n")
    (tmp_path / "ill.py").write_text("raise RuntimeError('no luck')\n")
    done = run("list", "envs", "--json", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    entries = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert done.returncode == 0
    assert "no luck" in entries["Ill-v0"]["broken"]
    assert entries["Sql-v0"]["broken"] is None


def test_doctor_finds_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["pydantic"]["state"] == "ok"
    assert {"docker daemon", "bubblewrap", "disk", "smollm2 weights"} <= set(findings)
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] != "ok")


def test_a_missing_extra_is_exit_code_3(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from agentrl.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "eval", TOY, "-m", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "pip install -e '.[train]'" in done.stderr


def test_what_was_not_expected_is_short_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "import agentrl\nclass Bad(agentrl.ToolEnv):\n"
        "    def __init__(self, **kwargs): raise ZeroDivisionError('a bug')\n"
    )
    done = run("eval", f"{tmp_path / 'env.py'}:Bad", "-m", "expert")
    assert done.returncode == 1
    assert "ZeroDivisionError: a bug" in done.stderr
    assert len(done.stderr.splitlines()) < 20


SLOW = """
import time
import agentrl
from agentrl.plugins import load_object
ToyEnv = load_object({toy!r}, "toy")
class Slow(ToyEnv):
    def setup(self, task, rng):
        time.sleep(0.05)
        return super().setup(task, rng)
    def teardown(self):
        super().teardown()
        with open({log!r}, "a") as log:
            log.write("down\\n")
"""


def test_ctrl_c_cleans_up_and_is_exit_code_130(tmp_path: Path) -> None:
    log, env = tmp_path / "log", tmp_path / "slow.py"
    env.write_text(SLOW.format(toy=TOY, log=str(log)))
    out = tmp_path / "out"
    code = "import sys; from agentrl.cli import main; sys.exit(main())"
    arguments = ["eval", f"{env}:Slow", "-m", "expert", "-s", "dev", "-n", "4000", "-o", str(out)]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("down") > 8):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    lines = (out / "episodes.jsonl").read_text().splitlines()
    assert lines
    ended = [json.loads(line) for line in lines]
    assert all(episode["success"] or episode["end"] == "cut" for episode in ended)
    assert sum(episode["end"] == "submitted" for episode in ended) >= 8


def test_an_existing_run_needs_resume(tmp_path: Path, toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-c", toml, "--runs-dir", str(tmp_path), "--env.id", TOY, "--eval.splits", "dev"]
    RunDir.create(RunConfig.model_validate(resolved(capsys, *flags))).close()
    assert main(["train", *flags]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", *flags, "--resume", "--seed", "2"]) == 2
    assert "seed: 0 -> 2" in capsys.readouterr().err


def test_output_without_a_terminal_has_no_escapes() -> None:
    for arguments in (("list",), ("doctor",), ("eval", TOY, "-m", "expert", "-s", "dev", "-n", "2")):
        done = run(*arguments, env={**os.environ, "NO_COLOR": "1"})
        assert "\x1b" not in done.stdout + done.stderr
        assert done.returncode == 0
