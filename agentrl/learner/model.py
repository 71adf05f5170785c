"""The actor-critic: one causal language model, and the critic and reference that go with it.

Two ways to train, told apart by `ModelConfig.lora`:

* all weights: the critic is a copy of the trunk (`separate`) or a linear head on the policy's states (`head`), the
  reference a frozen copy, made only where a KL term needs it;
* LoRA: adapters `policy` and `critic` on one frozen base; the reference is the base with adapters off, or, after SFT
  with LoRA, a frozen copy of the adapter.

The value head is linear, float32, and starts at 0. Dropout is off always: a ratio between two dropout masks is noise.
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from agentrl.config import ModelConfig
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.adapters import CRITIC, POLICY, REFERENCE, Adapters
from agentrl.learner.batch import MicroBatch
from agentrl.learner.logits import logprob_and_entropy
from agentrl.learner.trunk import Around, check_head, check_layers, check_packing, checkpointed, trunk_states

_CRITIC_FILE = "critic.safetensors"


class PolicyScores(NamedTuple):
    """Of the sampled tokens, at the sampling temperature, nats."""

    logprob_N: Tensor
    entropy_N: Tensor


class ValueScores(NamedTuple):
    """Of the states before the sampled tokens, and of each row's final state, reward units, float32."""

    value_N: Tensor
    final_B: Tensor


class ActorCritic(nn.Module):
    """Policy, critic and reference, scored on micro-batches.

    Attributes:
        policy: The Hugging Face causal model that samples: give this one to the rollout's engine. With LoRA its layers
            hold the adapters, and `policy` is the active one whenever no method of this class runs.
        config: As given.
    """

    def __init__(
        self, policy: Any, config: ModelConfig, *, logit_chunk: int = 512, seed: int = 0, packing: bool = False
    ) -> None:
        """Attaches a critic to a loaded model.

        Args:
            policy: A transformers causal model (Llama, Qwen, Mistral and their like), on its device, in its type.
            config: `lora`, `critic`, `critic_gradient` and `gradient_checkpointing` are read.
            logit_chunk: Tokens whose logits exist at once.
            seed: Of the adapters' first values.
            packing: Whether micro-batches will be packed; then the model is tried first.

        Raises:
            ConfigError: If the model's logits are not its output embedding applied to its trunk's last hidden state, if
                it has fewer layers than adapters are asked for, or cannot be packed or checkpointed as asked.
        """
        super().__init__()
        self.config = config
        self.policy = policy
        self._chunk = logit_chunk
        self._adapters: Adapters | None = None
        self._reference: nn.Module | None = None
        check_head(policy)
        if config.gradient_checkpointing:
            check_layers(policy)
        if packing:
            self.check_packing()
        if config.lora is not None:
            self._adapters = Adapters(policy, config.lora, critic=config.critic == "adapter", seed=seed)
        self.critic = nn.ModuleDict()
        if config.critic == "separate":
            self.critic["trunk"] = copy.deepcopy(_trunk(policy))
        if self.has_critic:
            self.critic["head"] = _zero_head(policy)
        self.eval()

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stays in evaluation mode, whatever is asked: no dropout."""
        return super().train(mode=False)

    @property
    def device(self) -> torch.device:
        """Where the policy's weights are."""
        return next(self.policy.parameters()).device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The type that the policy's trunk computes in."""
        return self.policy.dtype  # type: ignore[no-any-return]

    @property
    def context(self) -> int:
        """Longest row that the policy can read, tokens."""
        return int(getattr(self.policy.config, "max_position_embeddings", sys.maxsize))

    @property
    def vocab_size(self) -> int:
        """Entries of the policy's input embedding."""
        return int(self.policy.get_input_embeddings().weight.shape[0])

    @property
    def has_critic(self) -> bool:
        """Whether there are values; not for the critic-free estimators."""
        return self.config.critic != "none"

    @property
    def shares_trunk(self) -> bool:
        """Whether one pass through the trunk gives both logprobs and values."""
        return self.config.critic == "head"

    @property
    def has_reference(self) -> bool:
        """Whether `reference_logprobs` can be asked: always with LoRA, else once `begin_rl` has fixed one."""
        return self._adapters is not None or self._reference is not None

    def check_packing(self) -> None:
        """Tries whether rows that share a line are kept apart.

        Raises:
            ConfigError: If this model does not.
        """
        check_packing(_trunk(self.policy), self.vocab_size, self.device)

    def policy_parameters(self) -> list[nn.Parameter]:
        """What the policy's optimiser trains."""
        if self._adapters is not None:
            return self._adapters.parameters(POLICY)
        return list(self.policy.parameters())

    def critic_parameters(self) -> list[nn.Parameter]:
        """What the critic's optimiser trains; nothing where there is no critic."""
        adapter = self._adapters.parameters(CRITIC) if self._adapters is not None else []
        return adapter + list(self.critic.parameters())

    def begin_rl(self, *, reference: bool) -> None:
        """Marks where SFT ends: the critic starts from the policy as it is now, and that policy is what KL refers to.

        Args:
            reference: Whether a reference will be asked for. Without LoRA it costs a copy of the model. With LoRA it is
                the base for free where the policy's adapter is still fresh, else a frozen copy of the adapter.
        """
        if self.config.critic == "separate":
            self.critic["trunk"].load_state_dict(_trunk(self.policy).state_dict())
        elif self.config.critic == "adapter" and self._adapters is not None:
            self._adapters.copy(POLICY, CRITIC)
        if not reference:
            return
        if self._adapters is None:
            self._reference = copy.deepcopy(self.policy).requires_grad_(False)
        elif not self._adapters.policy_is_fresh:
            self._adapters.add_reference()
            self._adapters.copy(POLICY, REFERENCE)

    def set_value_bias(self, value: float) -> None:
        """Sets the value head's bias, so that an untrained critic says the mean return and not 0.

        Raises:
            ConfigError: If there is no critic.
        """
        with torch.no_grad():
            self._value_head().bias.fill_(value)

    def policy_logprobs(self, batch: MicroBatch, temperature: float, *, entropy_grad: bool = False) -> PolicyScores:
        """Scores the sampled tokens with the policy; gradients flow to `policy_parameters`."""
        return self._scores(self.policy, self._states(_trunk(self.policy), batch), batch, temperature, entropy_grad)

    def values(self, batch: MicroBatch) -> ValueScores:
        """The critic's values; gradients flow to `critic_parameters` and never into the policy.

        V of a token is read one position before it, from the state that the token was drawn in.

        Raises:
            ConfigError: If there is no critic.
        """
        self._value_head()
        if self.shares_trunk:
            with torch.no_grad():
                states_SH = self._states(_trunk(self.policy), batch)
            return self._values(states_SH, batch)
        if self.config.critic == "adapter" and self._adapters is not None:
            with self._adapters.active(CRITIC):
                again = partial(self._adapters.active, CRITIC)
                return self._values(self._states(_trunk(self.policy), batch, again), batch)
        return self._values(self._states(self.critic["trunk"], batch), batch)

    def score(
        self, batch: MicroBatch, temperature: float, *, entropy_grad: bool = False
    ) -> tuple[PolicyScores, ValueScores]:
        """`policy_logprobs` and `values` in one; a single pass where the critic is a head on the policy's trunk.

        There, with `ModelConfig.critic_gradient`, the values' gradients flow to `policy_parameters` as well; otherwise
        as in `values`.

        Raises:
            ConfigError: If there is no critic.
        """
        self._value_head()
        if not self.shares_trunk:
            return self.policy_logprobs(batch, temperature, entropy_grad=entropy_grad), self.values(batch)
        states_SH = self._states(_trunk(self.policy), batch)
        scores = self._scores(self.policy, states_SH, batch, temperature, entropy_grad)
        return scores, self._values(states_SH if self.config.critic_gradient else states_SH.detach(), batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Logprobs of the sampled tokens under the reference, without gradient.

        Raises:
            ConfigError: If there is none.
        """
        if not self.has_reference:
            raise ConfigError("no reference policy: call ActorCritic.begin_rl(reference=True) once, before PPO starts.")
        model = self.policy if self._reference is None else self._reference
        with nullcontext() if self._adapters is None else self._adapters.as_reference():
            return self._scores(model, self._states(_trunk(model), batch), batch, temperature, False).logprob_N

    def save(self, folder: Path) -> None:
        """Writes the weights in Hugging Face layout.

        All weights: the model in `folder`. LoRA: one folder for each adapter, `policy`, `critic`, `reference`. What has
        no layout of Hugging Face's (the critic's trunk and head, a reference model) goes into `folder/trainer`.
        """
        from safetensors.torch import save_file

        trainer = folder / "trainer"
        trainer.mkdir(parents=True, exist_ok=True)
        if self._adapters is None:
            self.policy.save_pretrained(folder)
        else:
            self._adapters.save(folder)
        if self._reference is not None:
            self._reference.save_pretrained(trainer / REFERENCE)  # type: ignore[operator]
        if self.has_critic:
            weights = {name: weight.contiguous() for name, weight in self.critic.state_dict().items()}
            save_file(weights, trainer / _CRITIC_FILE)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, bit for bit, the reference included.

        Raises:
            CheckpointError: If the folder holds other parts or shapes than this model has.
        """
        from safetensors.torch import load_file

        trainer = folder / "trainer"
        try:
            if self._adapters is None:
                self.policy.load_state_dict(_read_model(self.policy, folder))
            else:
                self._adapters.load(folder)
            if self.has_critic:
                self.critic.load_state_dict(load_file(trainer / _CRITIC_FILE))
            if (trainer / REFERENCE).is_dir():
                self._reference = copy.deepcopy(self.policy).requires_grad_(False)
                self._reference.load_state_dict(_read_model(self.policy, trainer / REFERENCE))
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{folder} does not fit this model (critic={self.config.critic!r}, lora={self.config.lora}): {error}."
                " Expected a checkpoint that was saved with the same [model] section."
            ) from error

    def _states(self, trunk: Any, batch: MicroBatch, around: Around | None = None) -> Tensor:
        saving = self.config.gradient_checkpointing and torch.is_grad_enabled()
        with checkpointed(trunk, around) if saving else nullcontext():
            return trunk_states(trunk, batch)

    def _scores(
        self, model: Any, states_SH: Tensor, batch: MicroBatch, temperature: float, entropy_grad: bool
    ) -> PolicyScores:
        n = batch.target_N.numel()
        head = model.get_output_embeddings()
        return PolicyScores(
            *logprob_and_entropy(
                states_SH[:n],
                batch.target_N,
                head,
                temperature=temperature,
                chunk=self._chunk,
                entropy_grad=entropy_grad,
            )
        )

    def _values(self, states_SH: Tensor, batch: MicroBatch) -> ValueScores:
        head = self._value_head()
        value_S = head(states_SH.to(head.weight.dtype)).squeeze(-1)
        n = batch.target_N.numel()
        return ValueScores(value_S[:n], value_S[n:])

    def _value_head(self) -> nn.Linear:
        if not self.has_critic:
            raise ConfigError(
                "model.critic is 'none', so there are no values: expected 'head', 'adapter' or 'separate' where values"
                " are asked for."
            )
        return self.critic["head"]  # type: ignore[return-value]


def _trunk(policy: Any) -> Any:
    return policy.base_model


def _read_model(policy: Any, folder: Path) -> dict[str, Tensor]:
    loaded = type(policy).from_pretrained(folder, dtype=policy.dtype, local_files_only=True)
    return loaded.state_dict()  # type: ignore[no-any-return]


def _zero_head(policy: Any) -> nn.Linear:
    weight = policy.get_output_embeddings().weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    # Made on "meta", so that no first values are drawn from torch's global generator.
    head = nn.Linear(weight.shape[1], 1, device="meta", dtype=dtype).to_empty(device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
