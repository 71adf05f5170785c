"""What `eval -m MODEL` can name: the expert, a run, a Hugging Face model, an endpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.commands._output import quiet_transformers
from agentrl.config import EnvConfig, RolloutConfig
from agentrl.configfile import validated
from agentrl.env import ToolEnv
from agentrl.errors import UsageError
from agentrl.policy import MessagePolicy
from agentrl.registry import make_env
from agentrl.run import RunDir
from agentrl.types import Task

EXPERT = "expert"


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for.

    Attributes:
        env: Environment id.
        model: What `-m` names.
        base_url: Of an OpenAI-compatible endpoint, which then has the model.
        changes: Fields of EnvConfig that flags give.
        native_tools: Whether the endpoint calls tools by itself.
        api_key_env: The environment variable that holds the endpoint's key.
        checkpoint: Iteration of a run's checkpoint; the newest where not given.
    """

    env: str
    model: str
    base_url: str | None
    changes: Mapping[str, Any]
    native_tools: bool
    api_key_env: str
    checkpoint: int | None


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a policy, the environment that goes with it, and its name.

    Attributes:
        name: What results are kept under; two policies have two names.
        make: Makes an environment.
        policy: Makes the policy; called once nothing else can go wrong, as it may load weights.
        rollout: How episodes are run.
        home: The run that results belong to, where it is one.
    """

    name: str
    make: Callable[[], ToolEnv]
    policy: Callable[[], Any]
    rollout: RolloutConfig
    home: RunDir | None = None


def find_subject(wanted: Wanted) -> Subject:
    """Tells what `-m` names.

    Raises:
        UsageError: If it is nothing of the kind, or an environment setting cannot be used.
        MissingError: If packages or weights are missing.
        CheckpointError: If the checkpoint that is asked for is damaged.
    """
    if wanted.model == EXPERT and wanted.base_url is None:
        env = _env(wanted)
        format_name = "fenced" if env.format == "auto" else env.format
        return Subject(EXPERT, _factory(env, format_name), lambda: _expert, RolloutConfig())
    if wanted.base_url is not None:
        return _endpoint(wanted, wanted.base_url)
    quiet_transformers()
    if RunDir.is_run(Path(wanted.model)):
        return _run(wanted)
    return _local(wanted)


def _expert(env: ToolEnv, task: Task) -> MessagePolicy:
    return env.expert(task)


def _env(wanted: Wanted, base: EnvConfig | None = None) -> EnvConfig:
    """The environment's config: a run's own, where it is the same environment, with what flags change."""
    known = base.model_dump() if base is not None and base.id == wanted.env else {"id": wanted.env}
    return validated(EnvConfig, known | dict(wanted.changes), "flags")


def _factory(env: EnvConfig, format_name: str) -> Callable[[], ToolEnv]:
    return functools.partial(
        make_env, env.id, format=format_name, settings=env.settings, reward=env.reward, max_turns=env.max_turns
    )


def _endpoint(wanted: Wanted, base_url: str) -> Subject:
    env = _env(wanted)
    format_name = "hermes" if env.format == "auto" else env.format

    def load() -> Any:
        from agentrl.rollout.openai import OpenAIPolicy

        return OpenAIPolicy(
            base_url,
            wanted.model,
            api_key_env=wanted.api_key_env,
            native_tools=wanted.native_tools,
            format=format_name,
        )

    return Subject(wanted.model, _factory(env, format_name), load, RolloutConfig())


def _run(wanted: Wanted) -> Subject:
    from agentrl.learner.checkpoint import latest_good, verify
    from agentrl.train.parts import build_parts, set_threads

    run = RunDir.open(wanted.model)
    if wanted.checkpoint is not None:
        folder: Path | None = run.checkpoint_dir(wanted.checkpoint)
    else:
        folder = latest_good(run.checkpoints) or latest_good(run.sft_dir)
    if folder is None or not folder.is_dir():
        there = ", ".join(sorted(path.name for path in run.checkpoints.glob("[!.]*"))) or "none"
        raise UsageError(f"{run.path} has no such checkpoint: expected one of {there}.")
    if wanted.checkpoint is not None:
        verify(folder)
    config = run.config.model_copy(update={"env": _env(wanted, run.config.env)})
    source = run.model_dir if config.model.tiny is not None else config.model.path
    set_threads(config)
    parts = build_parts(config, str(source))

    def load() -> Any:
        parts.model.load(folder)
        parts.policy.weights_changed()
        return parts.policy

    name = str(folder.relative_to(run.path))
    return Subject(name, parts.make, load, config.rollout, run)


def _local(wanted: Wanted) -> Subject:
    from agentrl.formats import format_of_template
    from agentrl.rollout.codec import Codec
    from agentrl.rollout.hf import HFPolicy
    from agentrl.rollout.load import load_model_and_tokenizer

    env = _env(wanted)
    model, tokenizer = load_model_and_tokenizer(wanted.model, "auto", "float32")
    format_name = format_of_template(tokenizer.chat_template) if env.format == "auto" else env.format
    codec = Codec(tokenizer, eos_ids=model.generation_config.eos_token_id)
    return Subject(wanted.model, _factory(env, format_name), lambda: HFPolicy(model, codec), RolloutConfig())


def with_concurrency(rollout: RolloutConfig, concurrency: int | None) -> RolloutConfig:
    """The rollout's config with another number of episodes at once, where one is asked for."""
    return rollout if concurrency is None else rollout.model_copy(update={"concurrency": concurrency})
