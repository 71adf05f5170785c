"""A whole PPO update, and a plain re-computation of it in float64: episodes in loops, whole logits, torch's AdamW.

Every mask, shift, denominator, bootstrap, clip and coefficient is in it, so each, once broken, shows as other weights.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

from agentrl.learner.ppo import PPOLearner
from agentrl.types import EndReason

F64 = torch.float64
LR = {"policy": {"lr": 3e-3}, "critic": {"lr": 2e-3}}


@dataclass
class Seen:
    """One episode as the oracle sees it."""

    ids: torch.Tensor
    where: list[int]
    turns: list[int]
    rewards: list[float]
    cut: bool


def see(trajectory) -> Seen:
    packed = trajectory.pack()
    where = [t for t in range(len(packed.token_ids_T)) if packed.is_action_T[t]]
    return Seen(
        torch.tensor(packed.token_ids_T.tolist()),
        where,
        [int(packed.turn_id_T[t]) for t in where],
        [float(packed.reward_T[t]) for t in where],
        trajectory.end is EndReason.CUT,
    )


class Oracle:
    """The update of `config.ppo` on copies of the model's parts."""

    def __init__(self, model, config):
        self.ppo, self.temperature, self.seed = config.ppo, config.rollout.sampling.temperature, config.seed
        self.model = copy.deepcopy(model)
        self.policy = torch.optim.AdamW(
            self.model.policy_parameters(), betas=(0.9, 0.95), weight_decay=0.0, **LR["policy"]
        )
        self.critic = torch.optim.AdamW(
            self.model.critic_parameters(), betas=(0.9, 0.95), weight_decay=0.0, **LR["critic"]
        )

    def log_pi(self, seen, whole=None):
        logits = (whole or self.model.policy)(seen.ids[None], use_cache=False).logits[0]
        log_pi = (logits / self.temperature).log_softmax(-1)
        rows = torch.stack([log_pi[t - 1] for t in seen.where])
        chosen = torch.stack([log_pi[t - 1, seen.ids[t]] for t in seen.where])
        return chosen, -(rows.exp() * rows).sum(-1)

    def values(self, seen):
        model = self.model
        if model.config.critic == "adapter":
            with model._active("critic"):
                hidden = model.policy.model(seen.ids[None], use_cache=False).last_hidden_state[0]
        elif model.config.critic == "separate":
            hidden = model.critic["trunk"](seen.ids[None], use_cache=False).last_hidden_state[0]
        else:
            hidden = model.policy.model(seen.ids[None], use_cache=False).last_hidden_state[0].detach()
        value_T = model.critic["head"](hidden)[:, 0]
        return torch.stack([value_T[t - 1] for t in seen.where]), value_T[-1]

    def credit(self, seen, rewards, values, final, lam):
        a = self.ppo.advantage
        found, ahead, following = [], 0.0, final if seen.cut else 0.0
        for j in reversed(range(len(rewards))):
            inside = j + 1 < len(rewards) and seen.turns[j + 1] == seen.turns[j]
            gamma = a.gamma_token if inside else a.gamma_turn
            decay = lam if lam is not None else (a.lambda_token if inside else a.lambda_turn)
            ahead = rewards[j] + gamma * following - values[j] + gamma * decay * ahead
            found.append(ahead)
            following = values[j]
        return found[::-1]

    def targets(self, batch, reference):
        old, advantages, returns, old_values = [], [], [], []
        with torch.no_grad():
            for seen in batch:
                chosen, _ = self.log_pi(seen)
                values, final = self.values(seen)
                rewards = seen.rewards
                if self.ppo.loss.kl_coef:
                    penalty = self.ppo.loss.kl_coef * (chosen - self.log_pi(seen, reference)[0])
                    rewards = [r - float(k) for r, k in zip(rewards, penalty, strict=True)]
                numbers = values.tolist()
                old.append(chosen)
                old_values.append(values)
                advantages += self.credit(seen, rewards, numbers, float(final), None)
                tail = self.credit(seen, rewards, numbers, float(final), self.ppo.advantage.lambda_value)
                returns.append(torch.tensor(tail, dtype=F64) + values)
        flat = torch.tensor(advantages, dtype=F64)
        if self.ppo.advantage.whitening == "full":
            flat = (flat - flat.mean()) / max(float(flat.std()), self.ppo.advantage.min_std)
        return old, flat.split([len(seen.where) for seen in batch]), returns, old_values

    def weights(self, batch):
        lengths = [len(seen.where) for seen in batch]
        mode = self.ppo.loss.aggregation
        if mode == "token_mean":
            return [1 / sum(lengths)] * len(batch)
        each = {"seq_mean_token_sum": 1.0, "seq_mean_token_sum_norm": 1 / self.ppo.loss.norm_length}
        return [each.get(mode, 1 / n) / len(batch) for n in lengths]

    def loss(self, seen, weight, old, advantage, target, old_value):
        c = self.ppo.loss
        chosen, entropy = self.log_pi(seen)
        values, _ = self.values(seen)
        ratio = (chosen - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage)
        if c.dual_clip:
            surrogate = torch.where(advantage < 0, torch.maximum(surrogate, c.dual_clip * advantage), surrogate)
        error = (values - target) ** 2
        if c.value_clip:
            moved = old_value + (values - old_value).clamp(-c.value_clip, c.value_clip)
            error = torch.maximum(error, (moved - target) ** 2)
        return weight * (0.5 * error - surrogate - c.entropy_coef * entropy).sum()

    def update(self, trajectories, reference):
        batch = [see(t) for t in trajectories]
        targets = list(zip(*self.targets(batch, reference), strict=True))
        order = torch.Generator().manual_seed(self.seed)
        for _ in range(self.ppo.epochs):
            for part in torch.randperm(len(batch), generator=order).tensor_split(self.ppo.minibatches):
                rows = part.tolist()
                for row, weight in zip(rows, self.weights([batch[row] for row in rows]), strict=True):
                    self.loss(batch[row], weight, *targets[row]).backward()
                for optimizer in (self.policy, self.critic):
                    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
                    optimizer.step()
                    optimizer.zero_grad()


CASES = {
    "separate": {},
    "head": {"critic": "head"},
    "adapter": {"critic": "adapter", "lora": {"rank": 4}},
    "lora-head": {"critic": "head", "lora": {"rank": 4}},
    "one-step": {"ppo": {"epochs": 1}},
    "one-step-probed": {"ppo": {"epochs": 1}, "copies": 4},
    "minibatches": {"ppo": {"epochs": 2, "minibatches": 3}},
    "temperature": {"temperature": 0.6},
    "kl": {"ppo": {"loss": {"kl_coef": 0.3}}},
    "entropy": {"critic": "head", "ppo": {"loss": {"entropy_coef": 0.1}}},
    "value-clip": {"ppo": {"loss": {"value_clip": 0.01, "aggregation": "seq_mean_token_sum_norm", "norm_length": 7}}},
    "seq-mean": {"ppo": {"loss": {"aggregation": "seq_mean_token_mean", "dual_clip": None}}},
    "seq-sum": {"ppo": {"loss": {"aggregation": "seq_mean_token_sum", "clip_low": 0.01, "clip_high": 0.02}}},
    "lambdas": {
        "ppo": {
            "advantage": {
                "gamma_token": 0.97, "lambda_token": 0.9, "gamma_turn": 0.8, "lambda_turn": 0.6, "lambda_value": 0.7,
                "whiten": "none",
            }
        }
    },
}  # fmt: skip


def merged(case):
    ppo = {"epochs": 3, "minibatches": 1, "microbatch_tokens": 90, "logit_chunk": 13, "target_kl": None, **LR}
    return {**case, "ppo": {**ppo, **case.get("ppo", {})}}


@pytest.mark.parametrize("name", sorted(CASES))
def test_update_equals_the_plain_recomputation(kit, name):
    case = dict(CASES[name])
    copies = case.pop("copies", 1)
    config = kit.config(**merged(case))
    model = kit.actor_critic(config, dtype=F64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.policy_parameters() + model.critic_parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator, dtype=F64))
    reference = copy.deepcopy(model.policy)
    model.begin_rl(reference=config.ppo.loss.kl_coef > 0)
    with torch.no_grad():
        for weight in model.policy_parameters() + model.critic_parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator, dtype=F64))
    batch = [trajectory for copy_ in range(copies) for trajectory in kit.batch(100 * copy_)]
    batch = kit.relabel(model, batch, config.rollout.sampling.temperature)

    oracle = Oracle(model, config)
    learner = PPOLearner(model, config)
    # The bias of a fresh critic is set from the first returns; here the critic counts as not fresh.
    learner.load_state_dict(learner.state_dict() | {"bias_is_set": True})
    before = [weight.clone() for weight in model.policy_parameters() + model.critic_parameters()]
    metrics = learner.update(batch)
    oracle.update(batch, reference)

    after = model.policy_parameters() + model.critic_parameters()
    expected = oracle.model.policy_parameters() + oracle.model.critic_parameters()
    assert any(bool(((a - b).abs() > 1e-3).any()) for a, b in zip(after, before, strict=True))
    for found, wanted in zip(after, expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-9)
    assert metrics["ppo/steps"] == config.ppo.epochs * config.ppo.minibatches
    if name == "seq-sum":
        assert metrics["ppo/clip_fraction"] > 0.2
