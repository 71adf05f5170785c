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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from agentrl.config import LoraConfig, ModelConfig
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.batch import MicroBatch
from agentrl.learner.logits import logprob_and_entropy

POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
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

    def __init__(self, policy: Any, config: ModelConfig, *, logit_chunk: int = 2048, seed: int = 0) -> None:
        """Attaches a critic to a loaded model.

        Args:
            policy: A transformers causal model (Llama, Qwen, Mistral and their like), on its device, in its type.
            config: `lora` and `critic` are read.
            logit_chunk: Tokens whose logits exist at once.
            seed: Of the adapters' first values.

        Raises:
            ConfigError: If the model's logits are not its output embedding applied to its trunk's last hidden state.
        """
        super().__init__()
        self.config = config
        self.policy = policy
        self._chunk = logit_chunk
        self._peft: Any = None
        self._reference: nn.Module | None = None
        _check_head(policy)
        if config.lora is not None:
            self._add_adapters(config.lora, seed)
        self.critic = nn.ModuleDict()
        if config.critic == "separate":
            self.critic["trunk"] = copy.deepcopy(_trunk(policy))
        self.critic["head"] = _value_head(policy)
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
    def shares_trunk(self) -> bool:
        """Whether one pass through the trunk gives both logprobs and values."""
        return self.config.critic == "head"

    @property
    def has_reference(self) -> bool:
        """Whether `reference_logprobs` can be asked: always with LoRA, else once `begin_rl` has fixed one."""
        return self._peft is not None or self._reference is not None

    def policy_parameters(self) -> list[nn.Parameter]:
        """What the policy's optimiser trains."""
        if self._peft is not None:
            return self._adapter(POLICY)
        return list(self.policy.parameters())

    def critic_parameters(self) -> list[nn.Parameter]:
        """What the critic's optimiser trains."""
        adapter = self._adapter(CRITIC) if self.config.critic == "adapter" else []
        return adapter + list(self.critic.parameters())

    def begin_rl(self, *, reference: bool) -> None:
        """Marks where SFT ends: the critic starts from the policy as it is now, and that policy is what KL refers to.

        Args:
            reference: Whether a reference will be asked for. Without LoRA it costs a copy of the model. With LoRA it is
                the base for free where the policy's adapter is still fresh, else a frozen copy of the adapter.
        """
        if self.config.critic == "separate":
            self.critic["trunk"].load_state_dict(_trunk(self.policy).state_dict())
        elif self.config.critic == "adapter":
            self._copy_adapter(POLICY, CRITIC)
        if not reference:
            return
        if self._peft is None:
            self._reference = copy.deepcopy(self.policy).requires_grad_(False)
        elif any(bool(weight.any()) for name, weight in self._named(POLICY) if "lora_B" in name):
            self._add_reference_adapter()
            self._copy_adapter(POLICY, REFERENCE)

    def set_value_bias(self, value: float) -> None:
        """Sets the value head's bias, so that an untrained critic says the mean return and not 0."""
        with torch.no_grad():
            self.critic["head"].bias.fill_(value)  # type: ignore[operator]

    def policy_logprobs(self, batch: MicroBatch, temperature: float, *, entropy_grad: bool = False) -> PolicyScores:
        """Scores the sampled tokens with the policy; gradients flow to `policy_parameters`."""
        return self._scores(self.policy, self._states(_trunk(self.policy), batch), batch, temperature, entropy_grad)

    def values(self, batch: MicroBatch) -> ValueScores:
        """The critic's values; gradients flow to `critic_parameters` and never into the policy.

        V of a token is read one position before it, from the state that the token was drawn in.
        """
        if self.shares_trunk:
            with torch.no_grad():
                states_SH = self._states(_trunk(self.policy), batch)
            return self._values(states_SH, batch)
        if self.config.critic == "adapter":
            with self._active(CRITIC):
                return self._values(self._states(_trunk(self.policy), batch), batch)
        return self._values(self._states(self.critic["trunk"], batch), batch)

    def score(
        self, batch: MicroBatch, temperature: float, *, entropy_grad: bool = False
    ) -> tuple[PolicyScores, ValueScores]:
        """`policy_logprobs` and `values` in one; a single pass where the critic is a head on the policy's trunk."""
        if not self.shares_trunk:
            return self.policy_logprobs(batch, temperature, entropy_grad=entropy_grad), self.values(batch)
        states_SH = self._states(_trunk(self.policy), batch)
        scores = self._scores(self.policy, states_SH, batch, temperature, entropy_grad)
        return scores, self._values(states_SH.detach(), batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Logprobs of the sampled tokens under the reference, without gradient.

        Raises:
            ConfigError: If there is none.
        """
        if not self.has_reference:
            raise ConfigError("no reference policy: call ActorCritic.begin_rl(reference=True) once, before PPO starts.")
        model = self.policy if self._reference is None else self._reference
        with self._as_reference():
            return self._scores(model, self._states(_trunk(model), batch), batch, temperature, False).logprob_N

    def save(self, folder: Path) -> None:
        """Writes the weights in Hugging Face layout.

        All weights: the model in `folder`. LoRA: one folder for each adapter, `policy`, `critic`, `reference`. What has
        no layout of Hugging Face's (the critic's trunk and head, a reference model) goes into `folder/trainer`.
        """
        from safetensors.torch import save_file

        trainer = folder / "trainer"
        trainer.mkdir(parents=True, exist_ok=True)
        if self._peft is None:
            self.policy.save_pretrained(folder)
        else:
            # Told not to look for changed embeddings, for which peft would ask the hub.
            self._peft.save_pretrained(
                folder, selected_adapters=list(self._peft.peft_config), save_embedding_layers=False
            )
        if self._reference is not None:
            self._reference.save_pretrained(trainer / REFERENCE)  # type: ignore[operator]
        save_file(
            {name: weight.contiguous() for name, weight in self.critic.state_dict().items()}, trainer / _CRITIC_FILE
        )

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, bit for bit, the reference included.

        Raises:
            CheckpointError: If the folder holds other parts or shapes than this model has.
        """
        from safetensors.torch import load_file

        trainer = folder / "trainer"
        try:
            if self._peft is None:
                self.policy.load_state_dict(_read_model(self.policy, folder))
            else:
                self._load_adapters(folder)
            self.critic.load_state_dict(load_file(trainer / _CRITIC_FILE))
            if (trainer / REFERENCE).is_dir():
                self._reference = copy.deepcopy(self.policy).requires_grad_(False)
                self._reference.load_state_dict(_read_model(self.policy, trainer / REFERENCE))
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{folder} does not fit this model (critic={self.config.critic!r}, lora={self.config.lora}): {error}."
                " Expected a checkpoint that was saved with the same [model] section."
            ) from error

    def _load_adapters(self, folder: Path) -> None:
        from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        if (folder / REFERENCE).is_dir():
            self._add_reference_adapter()
        for adapter in self._peft.peft_config:
            weights = load_file(folder / adapter / "adapter_model.safetensors")
            if set(weights) != set(get_peft_model_state_dict(self._peft, adapter_name=adapter)):
                raise ValueError(f"adapter {adapter!r} covers other layers")
            set_peft_model_state_dict(self._peft, weights, adapter_name=adapter)

    def _add_reference_adapter(self) -> None:
        if REFERENCE not in self._peft.peft_config:
            with self._borrowed_generator():
                self._peft.add_adapter(REFERENCE, self._peft.peft_config[POLICY])
        self._activate(POLICY)

    def _states(self, trunk: Any, batch: MicroBatch) -> Tensor:
        """[N + B, H]: the states before the sampled tokens, then the rows' final states."""
        # Without a cache and a mask, transformers lets the attention kernel be causal by itself, and tells packed rows
        # apart by their positions; with either of the two it would do neither.
        out = trunk(batch.token_ids_BT, attention_mask=None, position_ids=batch.position_ids, use_cache=False)
        hidden_BTH: Tensor = out.last_hidden_state
        return hidden_BTH.flatten(0, 1).index_select(0, torch.cat([batch.state_N, batch.final_B]))

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
        head = self.critic["head"]
        value_S = head(states_SH.to(head.weight.dtype)).squeeze(-1)  # type: ignore[arg-type]
        n = batch.target_N.numel()
        return ValueScores(value_S[:n], value_S[n:])

    def _add_adapters(self, lora: LoraConfig, seed: int) -> None:
        import peft

        settings = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,
            target_modules="all-linear" if lora.layers is None else _linears_of_last(self.policy, lora.layers),
            task_type="CAUSAL_LM",
        )
        with self._borrowed_generator():
            torch.manual_seed(seed)
            self._peft = peft.get_peft_model(self.policy, settings, adapter_name=POLICY)
            if self.config.critic == "adapter":
                self._peft.add_adapter(CRITIC, settings)
        self._activate(POLICY)

    def _borrowed_generator(self) -> Any:
        """Peft draws an adapter's first values from torch's global generator, which is given back as it was."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def _named(self, adapter: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.policy.named_parameters() if f".{adapter}." in name]

    def _adapter(self, name: str) -> list[nn.Parameter]:
        return [weight for _, weight in self._named(name)]

    @torch.no_grad()
    def _copy_adapter(self, source: str, target: str) -> None:
        for (_, old), (_, new) in zip(self._named(source), self._named(target), strict=True):
            new.copy_(old)

    def _activate(self, adapter: str) -> None:
        self._peft.set_adapter(adapter)
        # peft freezes the adapter that it leaves, and a gradient that arrives at a frozen weight is dropped: a backward
        # pass may come after the switch back.
        for name in (POLICY, CRITIC):
            for weight in self._adapter(name):
                weight.requires_grad_(True)
        for weight in self._adapter(REFERENCE):
            weight.requires_grad_(False)

    @contextmanager
    def _active(self, adapter: str) -> Iterator[None]:
        self._activate(adapter)
        try:
            yield
        finally:
            self._activate(POLICY)

    def _as_reference(self) -> Any:
        if self._peft is None:
            return nullcontext()
        return self._active(REFERENCE) if REFERENCE in self._peft.peft_config else self._peft.disable_adapter()


def _trunk(policy: Any) -> Any:
    return policy.base_model


def _linears_of_last(policy: Any, layers: int) -> list[str]:
    """Full names of the linear modules in the last decoder layers."""
    last = {id(module) for layer in _trunk(policy).layers[-layers:] for module in layer.modules()}
    return [name for name, module in policy.named_modules() if isinstance(module, nn.Linear) and id(module) in last]


def _read_model(policy: Any, folder: Path) -> dict[str, Tensor]:
    loaded = type(policy).from_pretrained(folder, dtype=policy.dtype, local_files_only=True)
    return loaded.state_dict()  # type: ignore[no-any-return]


def _value_head(policy: Any) -> nn.Linear:
    weight = policy.get_output_embeddings().weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    # Made on "meta", so that no first values are drawn from torch's global generator.
    head = nn.Linear(weight.shape[1], 1, device="meta", dtype=dtype).to_empty(device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@torch.no_grad()
def _check_head(policy: Any) -> None:
    """Refuses models that scale or cap their logits after the output embedding: every ratio would be wrong."""
    policy.eval()
    vocab_size = policy.config.vocab_size
    token_ids_BT = torch.arange(1, 9, device=policy.device)[None] % vocab_size
    expected = policy(token_ids_BT, use_cache=False).logits.float()
    hidden = _trunk(policy)(token_ids_BT, use_cache=False).last_hidden_state
    found = policy.get_output_embeddings()(hidden).float()
    tolerance = 1e-4 if policy.dtype in {torch.float32, torch.float64} else 2e-2
    if found.shape != expected.shape or float((found - expected).abs().max()) > tolerance * float(expected.abs().max()):
        raise ConfigError(
            f"{type(policy).__name__} does not compute its logits as output embedding times last hidden state (it"
            " scales or caps them): expected a model such as Llama, Qwen, Mistral or SmolLM."
        )
