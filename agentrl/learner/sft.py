"""Supervised fine-tuning on demonstrations, with the turn masks and the denominators of PPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.learner.batch import make_microbatches, read_rollout
from agentrl.learner.losses import Metrics, aggregate, make_share, merge_metrics
from agentrl.learner.model import ActorCritic
from agentrl.learner.optim import Optimizer, cosine
from agentrl.types import Trajectory


class SftTrainer:
    """Maximises the likelihood of the demonstrators' tokens; tool output and prompts are read and never trained on."""

    def __init__(self, model: ActorCritic, config: RunConfig) -> None:
        """Prepares the optimiser.

        Args:
            model: Its policy is trained; critic and reference are left alone.
            config: `sft`, `ppo.microbatch_tokens`, `ppo.packing` and `seed` are read.

        Raises:
            ConfigError: If there is no `sft` section, or packing is asked for and the model cannot be packed.
        """
        if config.sft is None:
            raise ConfigError("SFT needs an [sft] section in the config; found none.")
        self._model = model
        self._sft = config.sft
        self._budget, self._packing = config.ppo.microbatch_tokens, config.ppo.packing
        if self._packing:
            model.check_packing()
        self._seed = config.seed
        schedule = cosine(self._sft.optim.warmup_steps, self._sft.steps)
        self._optimizer = Optimizer("policy", model.policy_parameters(), self._sft.optim, schedule)
        self._batches = 0

    @property
    def batches(self) -> int:
        """Batches drawn or trained on so far; a step whose gradient was not finite counts too."""
        return self._batches

    def next_batch(self, demonstrations: Sequence[Trajectory]) -> list[Trajectory]:
        """The demonstrations of the next step: epoch after epoch, each in an order of its own.

        A pure function of the seed and the number of batches so far, so that a resumed run draws the same.
        """
        n, size = len(demonstrations), self._sft.batch_episodes
        if n == 0:
            raise ConfigError("SFT needs demonstrations; found none.")
        chosen: list[Trajectory] = []
        for place in range(self._batches * size, (self._batches + 1) * size):
            epoch, offset = divmod(place, n)
            chosen.append(demonstrations[int(self._order(epoch, n)[offset])])
        return chosen

    def step(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One optimiser step on a batch of demonstrations: mean negative log-likelihood of all their sampled tokens.

        Returns:
            Metrics: `loss/sft` (nats per token), `sft/tokens`, `sft/grad_norm`, `sft/lr`, `sft/skipped_steps`. Where no
            demonstration holds a sampled token nothing is changed, and only `sft/tokens` is returned, as 0.

        Raises:
            InvariantError: If a demonstration cannot be trained on, or gradients are not finite several times in a row.
        """
        self._batches += 1
        rollout = read_rollout(trajectories, context=self._model.context, vocab_size=self._model.vocab_size)
        if not rollout.rows:
            return {"sft/tokens": 0.0}
        everything_N = torch.ones(rollout.n_actions, dtype=torch.bool)
        share = make_share(rollout.episode_id_N, everything_N, "token_mean", norm_length=1)
        total: Metrics = {}
        device = self._model.device
        for micro in make_microbatches(rollout, range(len(rollout.rows)), self._budget, device, self._packing):
            logprob_N = self._model.policy_logprobs(micro, temperature=1.0).logprob_N
            loss = aggregate(-logprob_N, share.take(micro.index_N).to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            merge_metrics(total, {"loss/sft": loss.detach()})
        lr, skipped = self._optimizer.lr, self._optimizer.skipped
        norm, _ = self._optimizer.step()
        return {
            "loss/sft": float(total["loss/sft"]),
            "sft/tokens": float(rollout.n_actions),
            "sft/grad_norm": norm,
            "sft/lr": lr,
            "sft/skipped_steps": float(self._optimizer.skipped - skipped),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on besides the model's weights."""
        return {"optimizer": self._optimizer.state_dict(), "batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._batches = state["batches"]

    def _order(self, epoch: int, n: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(n, generator=generator)
