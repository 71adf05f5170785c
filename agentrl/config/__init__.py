"""Typed configuration of a run: what TOML files and flags are checked against. Imports no torch and no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.learning import (
    CRITIC_FREE,
    AdvantageConfig,
    ImportanceConfig,
    KlConfig,
    LossConfig,
    OptimConfig,
    PpoConfig,
)
from agentrl.config.section import Section
from agentrl.types import Sampling

__all__ = [
    "CRITIC_FREE",
    "AdvantageConfig",
    "BaselineConfig",
    "CheckpointConfig",
    "EnvConfig",
    "EvalConfig",
    "ImportanceConfig",
    "KlConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "PpoConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SftConfig",
    "TinyModel",
]


class EnvConfig(Section):
    """Which environment, and how it is set up."""

    id: str = "Sql-v0"
    """A registered name (`agentrl list envs`) or `path/to/my_env.py:MyEnv`."""
    format: str = "auto"
    """Tool-call format; `auto` tells it from the tokenizer's chat template."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The environment's own settings; `agentrl list envs --json` shows them."""
    reward: str | None = None
    """A reward tree (TOML file) in the place of the environment's own."""
    max_turns: int | None = Field(None, ge=1)
    """Assistant messages in one episode; the environment's own where not given."""


class TinyModel(Section):
    """A small Llama made from nothing, its tokenizer trained on the environment's own text."""

    vocab_size: int = Field(640, ge=300)
    """Entries of the byte-level BPE vocabulary, special tokens included."""
    hidden_size: int = Field(160, ge=8)
    """Width, units."""
    layers: int = Field(4, ge=1)
    """Decoder layers."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    intermediate_size: int = Field(480, ge=8)
    """Width inside the MLP, units."""
    context: int = Field(1024, ge=64)
    """Longest trajectory, tokens."""
    corpus_tasks: int = Field(400, ge=1)
    """Expert episodes that the tokenizer is trained on."""

    @model_validator(mode="after")
    def _even_heads(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of 2 * heads ({2 * self.heads}): each head has an"
                " even width."
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., arXiv:2106.09685) on all linear layers."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    layers: int | None = Field(None, ge=1)
    """Only the last so many decoder layers carry adapters, and only they are walked through backwards; None for all."""


class ModelConfig(Section):
    """The policy's model, and how the critic is attached to it."""

    path: str | None = None
    """A Hugging Face folder or hub id, `smollm2` for the packaged SmolLM2-135M-Instruct, or None with `tiny`."""
    tiny: TinyModel | None = None
    """Make a small model instead of loading one."""
    lora: LoraConfig | None = None
    """Train adapters on a frozen base; None trains all weights."""
    critic: Literal["adapter", "separate", "head", "none"] = "separate"
    """`adapter`: LoRA adapter of its own on the base (needs `lora`); `separate`: a copy of the model; `head`: a linear
    head on the policy's last hidden state; `none` for the critic-free estimators."""
    critic_gradient: bool = False
    """Whether the value loss of a `head` also reaches the policy's weights, times `ppo.loss.value_coef`."""
    gradient_checkpointing: bool = False
    """Keep the states between layers only and compute the rest again in the backward pass: less memory, more time."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights' type; heads and losses are float32 always."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give either model.path or model.tiny, and not both.")
        if self.critic == "adapter" and self.lora is None:
            raise ValueError(
                "model.critic = 'adapter' needs model.lora: add [model.lora], or use 'separate' or 'head'."
            )
        if self.critic == "separate" and self.lora is not None:
            raise ValueError("model.critic = 'separate' doubles the base that LoRA shares: use 'adapter' or 'head'.")
        if self.critic_gradient and self.critic != "head":
            raise ValueError(
                f"model.critic_gradient sends the value loss into a trunk that is shared, and model.critic ="
                f" {self.critic!r} has its own: expected 'head', or critic_gradient = false."
            )
        return self


class SftConfig(Section):
    """Supervised fine-tuning on demonstrations, with the same turn masks as PPO."""

    demonstrator: str = "expert"
    """The environment's method that returns a policy for a task: `expert`, or another that it has."""
    episodes: int = Field(2000, ge=1)
    """Size of the fixed set of demonstrations, from the train split."""
    steps: int = Field(300, ge=0)
    """Optimiser steps."""
    batch_episodes: int = Field(32, ge=1)
    """Episodes in one step."""
    checkpoint_every: int = Field(100, ge=1)
    """Steps between checkpoints; only the last one is kept."""
    optim: OptimConfig = OptimConfig(lr=2e-3, warmup_steps=20)
    """The optimiser; the rate falls to a tenth along a cosine."""


class RolloutConfig(Section):
    """How episodes are collected."""

    tasks: int = Field(32, ge=1)
    """Tasks in one iteration."""
    episodes_per_task: int = Field(4, ge=1)
    """Attempts at each."""
    sampling: Sampling = Sampling()
    """How the policy draws; cut supports (top-p, top-k, min-p) are refused in training."""
    max_context: int | None = Field(None, ge=16)
    """Longest trajectory, tokens; the model's context where not given."""
    concurrency: int = Field(64, ge=1)
    """Episodes that decode together (local policies) or are under way at once (endpoints)."""
    threads: int = Field(4, ge=1)
    """Threads that environments run in."""
    max_retries: int = Field(1, ge=0)
    """New attempts after an episode that ended in an error."""
    max_error_rate: float = Field(0.2, ge=0, le=1)
    """Share of episodes that may end in errors after their retries; above it the run stops."""
    episode_timeout_s: float = Field(600.0, gt=0)
    """Seconds after which an environment call is abandoned as ENV_ERROR; outside deterministic mode also the limit of
    the time of the agent's own tools (TIME_LIMIT)."""
    deterministic: bool = True
    """Rounds in id order, noise keyed by (seed, episode, turn), no wall-clock ends: resumes are bit-exact on CPU."""
    kv_cache_mib: int = Field(1024, ge=1)
    """Byte budget of the local policy's keys and values, MiB."""


class EvalConfig(Section):
    """What is measured before and after training."""

    splits: tuple[str, ...] = ("heldout",)
    """Frozen splits; the first one decides."""
    tasks: int = Field(200, ge=1)
    """Tasks of each split."""
    samples: int = Field(1, ge=1)
    """Episodes of each task at temperature 1."""
    greedy: bool = True
    """Whether greedy decoding is measured too."""
    every: int = Field(0, ge=0)
    """Iterations between evaluations on `dev_split`; 0 for none."""
    dev_split: str = "dev"
    """The split of these."""
    dev_tasks: int = Field(64, ge=1)
    """Tasks of these."""


class CheckpointConfig(Section):
    """When the state is written."""

    every: int = Field(10, ge=1)
    """Iterations between checkpoints."""
    keep: int = Field(2, ge=1)
    """Checkpoints that are kept beside the last one's predecessor; older ones are removed."""


class BaselineConfig(Section):
    """What PPO is compared with."""

    sft_continued: bool = False
    """Continue SFT from the same start for as long as PPO took, and evaluate that too."""


class RunConfig(Section):
    """One run: model, SFT, PPO, evaluation."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder under `runs_dir`."""
    runs_dir: Path = Path("runs")
    """Where runs are kept."""
    seed: int = Field(0, ge=0)
    """Seed of everything random."""
    threads: int = Field(0, ge=0)
    """CPU threads of torch; 0 for one per core. Written to the manifest: bit-exactness needs the same number."""
    env: EnvConfig = EnvConfig()
    """Environment."""
    model: ModelConfig
    """Model."""
    sft: SftConfig | None = None
    """A supervised start; None starts PPO from the model as it is."""
    rollout: RolloutConfig = RolloutConfig()
    """Collection."""
    ppo: PpoConfig = PpoConfig()
    """Learning."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    baseline: BaselineConfig = BaselineConfig()
    """Comparisons."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where metrics go besides metrics.jsonl; nothing is uploaded unless a tracker that uploads is named."""

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        if self.rollout.sampling.cuts_support:
            raise ValueError(
                "rollout.sampling cuts the support (top_p, top_k or min_p): expected top_p = 1, top_k = 0, min_p = 0 in"
                " training, because a token that could not be drawn has no likelihood to correct with. Evaluate with"
                " cuts if you like, and train without."
            )
        advantage = self.ppo.advantage
        if advantage.is_critic_free != (self.model.critic == "none"):
            wanted = "model.critic = 'none'" if advantage.is_critic_free else "a critic ('head', 'adapter', 'separate')"
            raise ValueError(
                f"ppo.advantage.estimator = {advantage.estimator!r} needs {wanted}, found model.critic ="
                f" {self.model.critic!r}: change one of the two."
            )
        if advantage.estimator in {"grpo", "rloo"} and self.rollout.episodes_per_task < 2:
            raise ValueError(
                f"ppo.advantage.estimator = {advantage.estimator!r} compares the attempts at a task: expected"
                " rollout.episodes_per_task of at least 2, found 1."
            )
        if self.baseline.sft_continued and self.sft is None:
            raise ValueError("baseline.sft_continued continues SFT: add [sft], or leave the baseline out.")
        if self.rollout.sampling.temperature <= 0:
            raise ValueError("rollout.sampling.temperature is 0: training needs samples, so it must be above 0.")
        return self
