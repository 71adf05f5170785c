"""A stored episode is executed again in a fresh world, whatever it ended with, and what was changed is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from words_run import WORLD, words_config

import agentrl
from agentrl._store import EpisodeFolder
from agentrl.cli import main
from agentrl.env import ToolEnv
from agentrl.errors import RunError, UsageError
from agentrl.evaluate import EvalOptions, evaluate
from agentrl.registry import make_env
from agentrl.replay.rewards import rescore
from agentrl.rollout._episode import EpisodeRun, Limits
from agentrl.run import RunDir
from agentrl.types import EndReason, EpisodeRequest, Reply, Trajectory

TOY = f"{Path(__file__).parent.parent / 'toy_env.py'}:ToyEnv"

REWARD = """
kind = "weighted_sum"

[[children]]
component = "parts.py:goal"

[[children]]
component = "parts.py:polite"
role = "safeguard"
severity = "catastrophic"

[[children]]
component = "parts.py:reads"
weight = 0.5

[[children]]
kind = "shaping"
potential = { component = "parts.py:phi" }
gamma_turn = 0.9
"""

PARTS = """
import agentrl

@agentrl.component(name="goal")
def goal(episode):
    return agentrl.Score((episode.n_turns + sum(len(m.content) for m in episode.messages)) % 13 / 13)

@agentrl.component(name="polite", when="turn")
def polite(episode):
    return agentrl.Score(float("damn" not in episode.turns[-1].text))

@agentrl.component(name="reads", when="turn")
def reads(episode):
    seen = sum(len(m.content) for m in episode.messages) + 7 * (episode.end is not None) + len(episode.turns[-1].calls)
    return agentrl.Score(seen % 11 / 11)

@agentrl.component(name="phi", when="turn")
def phi(episode):
    return agentrl.Score((len(episode.messages) + episode.n_turns) % 5 / 5)
"""


def call(name: str, body: str = "") -> str:
    return f"```{name}\n{body}\n```" if body else f"```{name}\n```"


ADD, SUBMIT = call("add", '{"n": 2}'), call("submit")

ENDS: list[tuple[EndReason, Sequence[str], str | None]] = [
    (EndReason.SUBMITTED, [ADD, SUBMIT], None),
    (EndReason.GAVE_UP, [ADD, call("trouble", "give_up")], None),
    (EndReason.FORBIDDEN, [ADD, "damn " + ADD], None),
    (EndReason.TOO_MANY_MALFORMED, ["a", "b", "c"], None),
    (EndReason.MAX_TURNS, [ADD] * 8, None),
    (EndReason.MAX_TOKENS, [ADD, "and then I"], "length"),
    (EndReason.CONTEXT_FULL, [ADD, "and then"], "length"),
    (EndReason.CONTEXT_FULL, [ADD, "x"], "apart"),
    (EndReason.TIME_LIMIT, [ADD, ADD], "apart"),
    (EndReason.CUT, [ADD, "half a thought"], "apart"),
    (EndReason.CONTEXT_FULL, [], "apart"),
    (EndReason.POLICY_ERROR, [ADD], "apart"),
    (EndReason.ENV_ERROR, [ADD, call("trouble", "bug")], None),
    (EndReason.SANDBOX_ERROR, [ADD, call("trouble", "sandbox")], None),
]


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "parts.py").write_text(PARTS)
    path = tmp_path / "reward.toml"
    path.write_text(REWARD)
    return str(path)


class _Filling(EpisodeRun):
    """An episode whose last message takes all the room there is: without tokens, none."""

    room = 0


def _played(env: ToolEnv, texts: Sequence[str], how: str | None, end: EndReason) -> Trajectory:
    """An episode as the collector runs it."""
    request = EpisodeRequest("one", env.tasks("train")[3], 5)
    kind = _Filling if (end, how) == (EndReason.CONTEXT_FULL, "length") else EpisodeRun
    run = kind(request, env, Limits(None, None), lambda run: nullcontext())
    run.start()
    for k, text in enumerate(texts):
        cut = how == "length" and k == len(texts) - 1
        run.take(Reply(text, "length" if cut else "stop"), 0.0)
    if how == "apart":
        run.finish(end)
    assert run.end is end
    return run.trajectory()


@pytest.mark.parametrize(("end", "texts", "how"), ENDS)
def test_every_end_is_scored_again_from_its_record(reward: str, end: EndReason, texts, how: str | None) -> None:
    env = make_env(TOY, format="fenced", reward=reward)
    trajectory = _played(env, texts, how, end)
    if end.is_error:
        return
    found = rescore(env, trajectory)
    assert found.rewards == tuple(turn.reward for turn in trajectory.turns)
    assert found.ledger == {key: value for key, value in trajectory.ledger.items() if key != "evidence"}


@pytest.mark.parametrize(("end", "texts", "how"), [case for case in ENDS if case[0] is not EndReason.FORBIDDEN])
def test_every_end_is_executed_again(tmp_path: Path, end: EndReason, texts, how: str | None) -> None:
    # With its own reward, since an evaluation's folder names the environment's alone.
    trajectory = _played(make_env(TOY, format="fenced"), texts, how, end)
    request = {"env": TOY, "settings": {}, "format": "fenced", "max_turns": 8}
    with EpisodeFolder(tmp_path / "episodes") as folder:
        folder.append(trajectory)
        folder.write_request(request)
    found = agentrl.replay_episode(tmp_path / "episodes", "one")
    assert found.differences == ()
    assert found.turns == len(texts)
    assert found.compared >= 1 + 5 * len(texts)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an evaluation in it, of the expert: nothing is trained."""
    folder = tmp_path_factory.mktemp("runs")
    config = words_config(folder)
    with RunDir.create(config) as run:
        out = run.eval_dir("expert")
        env = make_env(WORLD, format="fenced")
        options = EvalOptions(seed=3, out=out, rollout=config.rollout)
        evaluate(lambda: env, lambda env, task: env.expert(task), split="dev", tasks=3, options=options)
    return run.path


@pytest.fixture
def copy(evaluated: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(evaluated, tmp_path / "run"))


ID = "dev/00001-dev-000051/0"


def _edit(run: Path, change: Callable[[dict], None]) -> None:
    path = run / "evals/expert/episodes.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(next(record for record in records if record["id"] == ID))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_an_evaluation_inside_a_run_and_alone(copy: Path, tmp_path: Path) -> None:
    found = agentrl.replay_episode(copy, ID)
    assert (found.ok, found.turns, found.warnings) == (True, 2, ())
    assert found.folder == copy / "evals/expert"
    alone = Path(shutil.copytree(copy / "evals/expert", tmp_path / "alone"))
    with pytest.raises(agentrl.AgentRLError, match="Words-v0"):
        agentrl.replay_episode(alone, ID)  # its environment has no name that is installed


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda r: r["opening"][1].update(content="Count."), "the opening 1, content"),
        (lambda r: r.update(seed=r["seed"] + 1), "the opening 1, content"),
        (lambda r: r["turns"][0]["results"][0].update(content="The count is 9."), "turn 0, results 0, content"),
        (lambda r: r["turns"][0]["calls"][0]["arguments"].update(n=9), "turn 0, calls 0, arguments, n"),
        (lambda r: r["turns"][0].update(malformed="bad"), "turn 0, malformed"),
        (lambda r: r["turns"][0].update(reward=r["turns"][0]["reward"] + 1e-6), "turn 0, reward"),
        (lambda r: r["turns"][1]["ledger"].update(value=0.0), "turn 1, ledger, value"),
        (lambda r: r["turns"][1].update(text="nothing"), "turn 1, calls 0"),
        (lambda r: r.update(end="gave_up"), "the end"),
        (lambda r: r.update(success=True), "success"),
        (lambda r: r["ledger"].update(total=0.0), "the ledger, total"),
        (lambda r: r["ledger"]["evidence"]["Count"][0].update(turn=1), "the ledger, evidence, Count 0, turn"),
        (lambda r: r["turns"].append(dict(r["turns"][0], reward=0.0)), "turn 2"),
        (lambda r: r["turns"].pop(), "the end"),
    ],
)
def test_whatever_is_changed_by_hand_is_found(copy: Path, change: Callable[[dict], None], where: str) -> None:
    _edit(copy, change)
    found = agentrl.replay_episode(copy, ID)
    assert not found.ok
    assert found.differences[0].where == where


def test_durations_are_not_compared(copy: Path) -> None:
    _edit(copy, lambda r: r["turns"][0]["results"][0].update(duration_s=9.0))
    _edit(copy, lambda r: r["turns"][0].update(timings={"policy": 3.0}))
    assert agentrl.replay_episode(copy, ID).ok


def test_another_environment_is_said(copy: Path) -> None:
    path = copy / "evals/expert/request.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"source": "0" * 64}))
    found = agentrl.replay_episode(copy, ID)
    assert found.ok
    assert "source" in found.warnings[0]


def test_an_environment_that_breaks_now_is_a_difference(copy: Path) -> None:
    _edit(copy, lambda r: r["task"]["data"].clear())
    found = agentrl.replay_episode(copy, ID)
    assert not found.ok
    assert found.differences[0].where.startswith("turn 0")


def test_what_cannot_be_read_is_named(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no episode 'dev/9'"):
        agentrl.replay_episode(copy, "dev/9")
    with pytest.raises(UsageError, match="agentrl replay .* --episode"):
        agentrl.replay_episode(copy, "dev/")
    with pytest.raises(UsageError, match="holds no episodes"):
        agentrl.replay_episode(tmp_path / "nowhere", ID)
    shutil.copytree(copy / "evals/expert", tmp_path / "lost", ignore=shutil.ignore_patterns("request.json"))
    with pytest.raises(UsageError, match="lies in no run"):
        agentrl.replay_episode(tmp_path / "lost", "dev/00000")
    _edit(copy, lambda r: r.update(end="no such end"))
    with pytest.raises(RunError, match="is damaged"):
        agentrl.replay_episode(copy, ID)


def test_the_command(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", str(copy), "--episode", ID]
    assert main(arguments) == 0
    assert "2 turns said again" in capsys.readouterr().out
    _edit(copy, lambda r: r["turns"][0]["results"][0].update(content="\x1b[31mThe count is 9."))
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "first at turn 0, results 0, content" in shown
    assert "The count is 9." in shown
    assert "The count is 2, and" in shown
    assert "\x1b[31m" not in shown
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differences"][0]["recorded"].endswith("The count is 9.")
    assert main([*arguments, "--iteration", "1"]) == 2


def test_torch_is_not_needed(copy: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys, agentrl\n"
        f"assert agentrl.replay_episode({str(copy)!r}, {ID!r}).ok\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
