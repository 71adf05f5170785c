from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

import pytest

from agentrl._store import EpisodeFolder
from agentrl.config import RolloutConfig
from agentrl.errors import PolicyError, TooManyErrors, UsageError
from agentrl.evaluate import EvalOptions, compare, evaluate, success_by_task, summarise
from agentrl.plugins import load_object
from agentrl.policy import ScriptedPolicy
from agentrl.types import EndReason, Sampling, Task, Trajectory

TOY = f"{Path(__file__).parent / 'toy_env.py'}:ToyEnv"
ToyEnv = load_object(TOY, "toy")
make_toy = functools.partial(ToyEnv, format="fenced")
ONE = ScriptedPolicy(['```add\n{"n": 1}\n```', "```submit\n```"])


def expert(env, task):
    return env.expert(task)


def episode(
    task: str, success: bool | None, end: EndReason = EndReason.SUBMITTED, level: int | None = None
) -> Trajectory:
    data = {} if level is None else {"level": level}
    ledger = {"components": {"toy/reached": float(success)}} if success is not None else None
    return Trajectory(f"{task}/{id(object())}", Task(task, "E", "x", data), 0, (), (), end, ledger, success)


def test_a_policy_is_measured_by_name_class_and_factory() -> None:
    for env in (TOY, ToyEnv):
        assert evaluate(env, expert, split="dev", tasks=5).summary.success == 1.0
    summary, trajectories = evaluate(make_toy, ONE, split="dev", tasks=10, samples=2)
    assert (summary.n_total, summary.n_scored, summary.n_error, summary.n_tasks) == (20, 20, 0, 10)
    assert summary.success == 4 / 20, "the target is 1 in two of ten tasks"
    assert summary.ends == {"submitted": 20}
    assert summary.components == {"toy/reached": 0.2}
    assert (summary.turns, summary.tokens) == (2.0, None)
    assert summary.pass_at == {1: 0.2, 2: 0.2}
    assert [t.id for t in trajectories] == sorted(t.id for t in trajectories)


def test_errors_are_counted_and_never_scored() -> None:
    def sometimes(env, task):
        def act(messages):
            if task.data["target"] == 1:
                raise PolicyError("gone")
            return expert(env, task).act(messages, env.tools, Sampling()).text

        return ScriptedPolicy(act)

    options = EvalOptions(rollout=RolloutConfig(max_retries=0, max_error_rate=0.5))
    summary = evaluate(make_toy, sometimes, split="dev", tasks=10, options=options).summary
    assert (summary.n_total, summary.n_scored, summary.n_error, summary.success) == (10, 8, 2, 1.0)
    assert summary.ends == {"policy_error": 2, "submitted": 8}
    with pytest.raises(TooManyErrors):
        evaluate(
            make_toy, sometimes, split="dev", tasks=10, options=EvalOptions(rollout=RolloutConfig(max_error_rate=0.1))
        )


def test_an_evaluation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    ran: list[str] = []
    lock = threading.Lock()

    def watched(limit: int):
        def policy(env, task):
            with lock:
                ran.append(task.id)
                if len(ran) > limit:
                    raise KeyboardInterrupt
            return env.expert(task)

        return policy

    options = EvalOptions(rollout=RolloutConfig(concurrency=1, threads=1), out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        evaluate(make_toy, watched(4), split="dev", tasks=8, options=options)
    kept = [record["task"]["id"] for record in EpisodeFolder(tmp_path).records()]
    assert 1 <= len(kept) <= 4
    ran.clear()
    again = evaluate(make_toy, watched(99), split="dev", tasks=8, options=options)
    assert set(ran).isdisjoint(kept)
    assert len(ran) + len(kept) == 8
    whole = evaluate(make_toy, expert, split="dev", tasks=8)
    assert [t.id for t in again.trajectories] == [t.id for t in whole.trajectories]
    assert again.summary == whole.summary
    assert json.loads((tmp_path / "summary.json").read_text())["success"] == 1.0


def test_more_can_be_asked_of_a_folder(tmp_path: Path) -> None:
    options = EvalOptions(out=tmp_path)
    few = evaluate(make_toy, ONE, split="dev", tasks=3, options=options)
    more = evaluate(make_toy, ONE, split="dev", tasks=5, samples=2, options=options)
    assert all(trajectory in more.trajectories for trajectory in few.trajectories)
    assert more.summary.n_total == 10
    assert evaluate(make_toy, ONE, split="dev", tasks=3, options=options) == few


def test_episodes_in_error_are_run_again(tmp_path: Path) -> None:
    def gone(messages):
        raise PolicyError("gone")

    options = EvalOptions(rollout=RolloutConfig(max_retries=0, max_error_rate=1.0), out=tmp_path)
    assert evaluate(make_toy, ScriptedPolicy(gone), split="dev", tasks=3, options=options).summary.success is None
    assert evaluate(make_toy, expert, split="dev", tasks=3, options=options).summary.success == 1.0


def test_a_folder_holds_one_evaluation(tmp_path: Path) -> None:
    options = EvalOptions(out=tmp_path)
    evaluate(make_toy, ONE, split="dev", tasks=1, options=options)
    with pytest.raises(UsageError, match=r"sampling\.temperature: 1\.0 -> 0\.0"):
        evaluate(make_toy, ONE, split="dev", tasks=1, sampling=Sampling(temperature=0.0), options=options)
    with pytest.raises(UsageError, match=r'policy: "policy" -> "other"'):
        evaluate(make_toy, ONE, split="dev", tasks=1, options=EvalOptions(out=tmp_path, policy_name="other"))


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(UsageError, match=r"no split 'devv'\. Did you mean 'dev'\?"):
        evaluate(make_toy, ONE, split="devv")


def test_summaries_by_hand() -> None:
    episodes = [episode("a", True, level=1), episode("a", True, level=1), episode("b", False, level=1)]
    episodes += [episode("c", True, level=2), episode("d", None, EndReason.ENV_ERROR, level=2)]
    episodes += [episode("e", False, EndReason.CUT, level=2)]
    summary = summarise(episodes)
    assert (summary.n_total, summary.n_scored, summary.n_error, summary.n_tasks) == (6, 4, 1, 3)
    assert summary.success == 0.75
    assert summary.components == {"toy/reached": 0.75}
    assert summary.pass_at == {1: pytest.approx(2 / 3), 2: 1.0}
    one, two = summary.by_level
    assert (one.level, one.n_scored, one.n_error, one.success) == ("1", 3, 0, pytest.approx(2 / 3))
    assert (two.level, two.n_scored, two.n_error, two.success) == ("2", 1, 1, 1.0)
    assert two.interval == pytest.approx((0.20654, 1.0), abs=1e-4), "Wilson over one task, where all went one way"


def test_an_empty_summary_has_no_figures() -> None:
    summary = summarise([episode("a", None, EndReason.ENV_ERROR)])
    assert (summary.success, summary.wilson, summary.clustered, summary.reward) == (None, None, None, None)
    assert json.loads(json.dumps(summary.as_dict()))["n_error"] == 1


def test_policies_are_compared_task_by_task() -> None:
    ours = [episode("a", True), episode("a", False), episode("b", True), episode("c", True)]
    theirs = [episode("a", False), episode("b", True), episode("c", None, EndReason.ENV_ERROR), episode("d", True)]
    assert success_by_task(ours) == {"a": 0.5, "b": 1.0, "c": 1.0}
    found = compare(ours, theirs)
    assert (found.mean, found.n_clusters, found.p_value) == (0.25, 2, 1.0)
    with pytest.raises(UsageError, match="no scored task in common"):
        compare(ours, [episode("z", True)])
