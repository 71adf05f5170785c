from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.config import OptimConfig, PpoConfig, RunConfig
from agentrl.configfile import as_tables, differences, load_config, merge
from agentrl.errors import ConfigError

GOOD = 'name = "x"\n[model]\npath = "m"\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problem(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, [write(tmp_path / "run.toml", text)])
    return str(caught.value)


def test_a_file_becomes_a_config(tmp_path: Path) -> None:
    text = 'runs_dir = "there"\ntrackers = ["tensorboard"]\n' + GOOD + "[ppo.policy]\nbetas = [0.5, 0.6]\n"
    config = load_config(RunConfig, [write(tmp_path / "run.toml", text)])
    assert (config.runs_dir, config.trackers, config.ppo.policy.betas) == (Path("there"), ("tensorboard",), (0.5, 0.6))


def test_a_table_keeps_the_defaults_of_its_place(tmp_path: Path) -> None:
    text = GOOD + "[sft.optim]\nlr = 1e-3\n[ppo.critic]\nwarmup_steps = 5\n[rollout.sampling]\nmax_tokens = 9\n"
    config = load_config(RunConfig, [write(tmp_path / "run.toml", text)])
    assert config.sft is not None
    assert config.sft.optim == OptimConfig(lr=1e-3, warmup_steps=20)
    assert config.ppo.critic == OptimConfig(lr=3e-4, warmup_steps=5)
    assert config.rollout.sampling.max_tokens == 9


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    one = write(tmp_path / "one.toml", GOOD + "[ppo]\niterations = 1\nepochs = 3\n")
    two = write(tmp_path / "two.toml", 'name = "y"\n[ppo]\niterations = 2\n')
    config = load_config(RunConfig, [one, two], {"ppo": {"minibatches": 4}})
    assert (config.name, config.ppo.iterations, config.ppo.epochs, config.ppo.minibatches) == ("y", 2, 3, 4)


def test_what_one_file_lacks_another_may_give(tmp_path: Path) -> None:
    one = write(tmp_path / "one.toml", "seed = 7\n")
    two = write(tmp_path / "two.toml", GOOD)
    assert load_config(RunConfig, [one, two]).seed == 7


def test_a_resolved_config_is_a_config_file(tmp_path: Path) -> None:
    config = load_config(RunConfig, [write(tmp_path / "run.toml", GOOD + "[sft]\n[ppo]\ntarget_kl = 0.5\n")])
    saved = write(tmp_path / "config.json", json.dumps(as_tables(config)))
    assert load_config(RunConfig, [saved]) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[ppo]\niteratons = 3\n", "ppo.iteratons: unknown key. Did you mean 'iterations'?"),
        (
            "[rollout.sampling]\ntemprature = 1\n",
            "rollout.sampling.temprature: unknown key. Did you mean 'temperature'?",
        ),
        ("[sft.optim]\nwarmup = 1\n", "sft.optim.warmup: unknown key."),
        ("[modle]\n", "modle: unknown key. Did you mean 'model'?"),
        ('[ppo]\niterations = "3"\n', "ppo.iterations: expected a valid integer, found '3' (str)."),
        ("[ppo]\niterations = true\n", "ppo.iterations: expected a valid integer, found True (bool)."),
        ("[ppo]\niterations = -1\n", "ppo.iterations: expected greater than or equal to 0, found -1 (int)."),
        ("[ppo]\nloss = 3\n", "ppo.loss: expected an object, found 3 (int)."),
        ('[model]\npath = "m"\ndtype = "float16"\n', "model.dtype: expected 'float32' or 'bfloat16', found 'float16'"),
        ("[env]\nmax_turns = 2020-01-01\n", "env.max_turns: expected a valid integer, found '2020-01-01'"),
        ('[model]\npath = "m"\n[model.tiny]\n', "model: give either model.path or model.tiny, and not both."),
        ("[rollout.sampling]\ntop_p = 0.9\n", "rollout.sampling cuts the support"),
        ("[ppo\n", "expected TOML, but:"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, expected: str) -> None:
    message = problem(tmp_path, text if "[model]" in text else GOOD + text)
    assert expected in message
    assert "run.toml" in message


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    message = problem(tmp_path, "[ppo]\niteratons = 3\nepochs = 0\n[rollout]\ntaks = 1\n")
    assert message.count("\n") == 3


def test_what_is_required_is_named(tmp_path: Path) -> None:
    assert problem(tmp_path, '[model]\npath = "m"\n').endswith("name: is required and not given.")


def test_a_missing_file_is_named_with_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "quickstart.toml", GOOD)
    with pytest.raises(ConfigError, match=r"quikstart\.toml' does not exist\. Did you mean 'quickstart\.toml'\?"):
        load_config(RunConfig, [tmp_path / "quikstart.toml"])


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="expected UTF-8 text"):
        load_config(RunConfig, [tmp_path / "a.toml"])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(RunConfig, [tmp_path])
    with pytest.raises(ConfigError, match="expected a table"):
        load_config(RunConfig, [write(tmp_path / "a.json", "[1]")])


def test_merge_replaces_what_is_no_table() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": None}, "d": [2]}) == {
        "a": {"b": None, "c": 2},
        "d": [2],
    }


def test_differences_are_dotted() -> None:
    old = {"a": {"b": 1, "c": None}, "d": [1]}
    new = {"a": {"b": 2, "c": {"x": 1}}, "d": [1], "e": "n"}
    assert differences(old, new) == ["a.b: 1 -> 2", 'a.c: null -> {"x": 1}', 'e: null -> "n"']


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("advantage", {"estimator": "grpo", "gamma_turn": 0.9}, "compares whole returns"),
        ("advantage", {"estimator": "turn", "lambda_token": 0.9}, "read by estimator 'boundary' only"),
        ("advantage", {"estimator": "rloo", "lambda_alpha": 0.1}, "has no lambda"),
        ("kl", {"coef": 0.1, "estimator": "k3"}, "can point the wrong way"),
        ("kl", {"coef": 0.1, "estimator": "k1", "placement": "loss"}, "its expected gradient there is 0"),
        ("kl", {"target": 0.1}, "a coef of 0 stays 0"),
        ("importance", {"band": [1.1, 2.0]}, "0 < low < 1 < high"),
    ],
)
def test_settings_that_would_be_ignored_or_wrong_are_refused(section: str, values: dict, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PpoConfig.model_validate({section: values})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ppo": {"advantage": {"estimator": "grpo"}}}, "needs model.critic = 'none'"),
        ({"model": {"path": "m", "critic": "none"}}, "needs a critic"),
        (
            {
                "model": {"path": "m", "critic": "none"},
                "ppo": {"advantage": {"estimator": "rloo"}},
                "rollout": {"episodes_per_task": 1},
            },
            "compares the attempts at a task",
        ),
        ({"model": {"path": "m", "critic": "separate", "critic_gradient": True}}, "has its own"),
    ],
)
def test_estimator_and_critic_must_belong_together(changes: dict, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate({"name": "t", "model": {"path": "m"}} | changes)
