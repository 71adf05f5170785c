"""A whole PPO update, and a plain re-computation of it in float64: episodes in loops, whole logits, torch's AdamW.

Every mask, shift, denominator, bootstrap, clip, weight and coefficient is in it, so each, once broken, shows as other
weights.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch

from agentrl.learner.ppo import PPOLearner
from agentrl.types import EndReason, Task

F64 = torch.float64
LR = {"policy": {"lr": 3e-3}, "critic": {"lr": 2e-3}}


@dataclass
class Seen:
    """One episode as the oracle sees it."""

    ids: torch.Tensor
    where: list[int]
    turns: list[int]
    rewards: list[float]
    engine: list[float]
    cut: bool
    task: str

    @property
    def firsts(self) -> list[bool]:
        return [j == 0 or turn != self.turns[j - 1] for j, turn in enumerate(self.turns)]


@dataclass
class Wanted:
    """What the oracle's losses compare with, for one episode."""

    old: torch.Tensor
    reference: torch.Tensor
    advantage: list[float]
    target: list[float]
    value: torch.Tensor
    weight: list[float]
    keep: bool


def see(trajectory) -> Seen:
    packed = trajectory.pack()
    where = [t for t in range(len(packed.token_ids_T)) if packed.is_action_T[t]]
    return Seen(
        torch.tensor(packed.token_ids_T.tolist()),
        where,
        [int(packed.turn_id_T[t]) for t in where],
        [float(packed.reward_T[t]) for t in where],
        [float(packed.logprob_T[t]) for t in where],
        trajectory.end is EndReason.CUT,
        trajectory.task.id,
    )


def mean(numbers):
    return sum(numbers) / len(numbers)


def deviation(numbers):
    return math.sqrt(sum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1)) if len(numbers) > 1 else 0.0


class Oracle:
    """The updates of `config.ppo` on copies of the model's parts."""

    def __init__(self, model, config, reference):
        self.ppo, self.temperature = config.ppo, config.rollout.sampling.temperature
        self.model, self.reference = copy.deepcopy(model), reference
        self.coef = self.ppo.kl.coef
        self.order = torch.Generator().manual_seed(config.seed)
        groups = {"policy": self.model.policy_parameters(), "critic": self.model.critic_parameters()}
        self.optimizers = [
            torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0, **LR[name])
            for name, weights in groups.items()
            if weights
        ]

    def log_pi(self, seen, whole=None):
        logits = (whole or self.model.policy)(seen.ids[None], use_cache=False).logits[0]
        log_pi = (logits / self.temperature).log_softmax(-1)
        rows = torch.stack([log_pi[t - 1] for t in seen.where])
        chosen = torch.stack([log_pi[t - 1, seen.ids[t]] for t in seen.where])
        return chosen, -(rows.exp() * rows).sum(-1)

    def values(self, seen):
        model = self.model
        if not model.has_critic:
            return torch.zeros(len(seen.where), dtype=F64), torch.zeros((), dtype=F64)
        if model.config.critic == "adapter":
            with model._adapters.active("critic"):
                hidden = model.policy.model(seen.ids[None], use_cache=False).last_hidden_state[0]
        elif model.config.critic == "separate":
            hidden = model.critic["trunk"](seen.ids[None], use_cache=False).last_hidden_state[0]
        else:
            hidden = model.policy.model(seen.ids[None], use_cache=False).last_hidden_state[0]
            hidden = hidden if model.config.critic_gradient else hidden.detach()
        value_T = model.critic["head"](hidden)[:, 0]
        return torch.stack([value_T[t - 1] for t in seen.where]), value_T[-1]

    def credit(self, seen, rewards, values, final, lam):
        """Advantages of one episode; `lam` replaces every lambda where it is not None."""
        a = self.ppo.advantage
        found, ahead, following = [0.0] * len(rewards), 0.0, final if seen.cut else 0.0
        if a.estimator == "turn":
            firsts = [j for j, is_first in enumerate(seen.firsts) if is_first]
            for k in reversed(range(len(firsts))):
                tokens = range(firsts[k], firsts[k + 1] if k + 1 < len(firsts) else len(rewards))
                decay = lam if lam is not None else a.lambda_turn
                earned = sum(rewards[j] for j in tokens)
                ahead = earned + a.gamma_turn * following - values[firsts[k]] + a.gamma_turn * decay * ahead
                following = values[firsts[k]]
                for j in tokens:
                    found[j] = ahead
            return found
        for j in reversed(range(len(rewards))):
            inside = a.estimator == "boundary" and j + 1 < len(rewards) and not seen.firsts[j + 1]
            gamma = a.gamma_token if inside else a.gamma_turn
            decay = lam if lam is not None else (a.lambda_token if inside else a.lambda_turn)
            found[j] = ahead = rewards[j] + gamma * following - values[j] + gamma * decay * ahead
            following = values[j]
        return found

    def compared(self, batch, rewards):
        """Advantages of all episodes by the estimators without a critic."""
        a = self.ppo.advantage
        if a.estimator == "reinforce_pp":
            return [
                [sum(a.gamma_turn**i * r for i, r in enumerate(own[j:])) for j in range(len(own))] for own in rewards
            ]
        found = []
        for row, seen in enumerate(batch):
            group = [sum(rewards[i]) for i, other in enumerate(batch) if other.task == seen.task]
            others = [sum(rewards[i]) for i, other in enumerate(batch) if other.task == seen.task and i != row]
            own = sum(rewards[row])
            if a.estimator == "rloo":
                advantage = own - mean(others) if others else 0.0
            else:
                advantage = (own - mean(group)) / max(deviation(group), a.min_std) if others else 0.0
            found.append([advantage] * len(seen.where))
        return found

    def kept(self, batch):
        returns = [sum(seen.rewards) for seen in batch]
        keeps = []
        for seen in batch:
            group = [r for r, other in zip(returns, batch, strict=True) if other.task == seen.task and not other.cut]
            small = self.ppo.advantage.estimator in {"grpo", "rloo"} and len(group) < 2
            flat = self.ppo.min_group_std is not None and len(group) > 1
            keeps.append(not small and not (flat and deviation(group) <= self.ppo.min_group_std))
        return keeps

    @torch.no_grad()
    def targets(self, batch):
        a, i, wanted, rewards = self.ppo.advantage, self.ppo.importance, [], []
        for seen, keep in zip(batch, self.kept(batch), strict=True):
            old, (value, final) = self.log_pi(seen)[0], self.values(seen)
            reference = self.log_pi(seen, self.reference)[0]
            penalty = self.coef * (old - reference) if self.ppo.kl.placement == "reward" else torch.zeros_like(old)
            rewards.append([r - float(k) for r, k in zip(seen.rewards, penalty, strict=True)])
            ratio = (old - torch.tensor(seen.engine, dtype=F64)).exp()
            weight = ratio.clamp(max=i.cap) if i.weight == "token" else torch.ones_like(ratio)
            geometric = float(ratio.prod()) ** (1 / len(seen.where))
            inside = i.band is None or i.band[0] <= geometric <= i.band[1]
            advantage = self.credit(seen, rewards[-1], value.tolist(), float(final), None)
            tail = self.credit(seen, rewards[-1], value.tolist(), float(final), a.lambda_value)
            target = [x + float(v) for x, v in zip(tail, value, strict=True)]
            wanted.append([Wanted(old, reference, advantage, target, value, weight.tolist(), keep and inside), keep])
        if a.is_critic_free:
            for (one, _), advantage in zip(wanted, self.compared(batch, rewards), strict=True):
                one.advantage = advantage
        flat = [x for one, keep in wanted if keep for x in one.advantage]
        if a.whitening == "full":
            for one, _ in wanted:
                one.advantage = [(x - mean(flat)) / max(deviation(flat), a.min_std) for x in one.advantage]
        return [one for one, _ in wanted]

    def shares(self, counts):
        """What each token of an episode counts, by episode, from how many tokens each has."""
        mode = self.ppo.loss.aggregation
        if mode == "token_mean":
            return [1 / sum(counts)] * len(counts)
        each = {"seq_mean_token_sum": 1.0, "seq_mean_token_sum_norm": 1 / self.ppo.loss.norm_length}
        return [each.get(mode, 1 / n) / len(counts) for n in counts]

    def loss(self, seen, wanted, share, value_share):
        c = self.ppo.loss
        total = torch.zeros((), dtype=F64)
        if wanted.keep:
            chosen, entropy = self.log_pi(seen)
            advantage, weight = (torch.tensor(x, dtype=F64) for x in (wanted.advantage, wanted.weight))
            ratio = (chosen - wanted.old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage)
            if c.dual_clip:
                surrogate = torch.where(advantage < 0, torch.maximum(surrogate, c.dual_clip * advantage), surrogate)
            total = total - share * (weight * surrogate + c.entropy_coef * entropy).sum()
            if self.ppo.kl.placement == "loss":
                k2 = 0.5 * (chosen - wanted.reference) ** 2
                total = total + self.coef * share * (weight * ratio.detach() * k2).sum()
        if self.model.has_critic:
            values, _ = self.values(seen)
            target = torch.tensor(wanted.target, dtype=F64)
            error = (values - target) ** 2
            if c.value_clip:
                moved = wanted.value + (values - wanted.value).clamp(-c.value_clip, c.value_clip)
                error = torch.maximum(error, (moved - target) ** 2)
            if self.ppo.advantage.estimator == "turn":
                error = error * torch.tensor(seen.firsts, dtype=F64)
            coef = c.value_coef if self.model.config.critic_gradient else 1.0
            total = total + coef * value_share * 0.5 * error.sum()
        return total

    def update(self, trajectories):
        batch = [see(t) for t in trajectories]
        targets = self.targets(batch)
        for _ in range(self.ppo.epochs):
            for part in torch.randperm(len(batch), generator=self.order).tensor_split(self.ppo.minibatches):
                rows = part.tolist()
                shares = self.shares([len(batch[row].where) for row in rows])
                is_turn = self.ppo.advantage.estimator == "turn"
                counts = [sum(batch[row].firsts) if is_turn else len(batch[row].where) for row in rows]
                for row, share, value_share in zip(rows, shares, self.shares(counts), strict=True):
                    loss = self.loss(batch[row], targets[row], share, value_share)
                    if loss.requires_grad:
                        loss.backward()
                for optimizer in self.optimizers:
                    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        kl = self.ppo.kl
        if kl.target is not None:
            k1 = [(one.old - one.reference).tolist() for one in targets]
            found = mean([sum(x) if kl.stat == "seq_sum" else mean(x) for x in k1])
            self.coef *= 1 + min(max(found / kl.target - 1, -0.2), 0.2) * len(batch) / kl.horizon


FREE = {"critic": "none", "grouped": True}
CASES = {
    "separate": {},
    "head": {"critic": "head"},
    "adapter": {"critic": "adapter", "lora": {"rank": 4}},
    "lora-head": {"critic": "head", "lora": {"rank": 4}},
    "one-step": {"ppo": {"epochs": 1}},
    "one-step-probed": {"ppo": {"epochs": 1}, "copies": 4},
    "minibatches": {"ppo": {"epochs": 2, "minibatches": 3}},
    "packed": {"ppo": {"epochs": 2, "minibatches": 2, "packing": True}},
    "temperature": {"temperature": 0.6},
    "kl": {"ppo": {"kl": {"coef": 0.3}}},
    "kl-one-step": {"copies": 2, "ppo": {"epochs": 1, "kl": {"coef": 0.3}}},
    "kl-in-the-loss": {"temperature": 0.7, "ppo": {"kl": {"coef": 0.3, "estimator": "k2", "placement": "loss"}}},
    "kl-adaptive": {"updates": 3, "ppo": {"kl": {"coef": 0.3, "target": 0.2, "horizon": 20}}},
    "kl-adaptive-sum": {
        "updates": 3, "critic": "head",
        "ppo": {
            "kl": {
                "coef": 0.3, "target": 100.0, "horizon": 20, "stat": "seq_sum", "estimator": "k2", "placement": "loss"
            }
        },
    },
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
    "action": {"ppo": {"advantage": {"estimator": "action", "gamma_turn": 0.9, "lambda_turn": 0.8}}},
    "turn": {"ppo": {"advantage": {"estimator": "turn", "gamma_turn": 0.9, "lambda_turn": 0.8, "lambda_value": 0.7}}},
    "turn-seq-mean": {
        "critic": "head",
        "ppo": {"advantage": {"estimator": "turn"}, "loss": {"aggregation": "seq_mean_token_mean"}},
    },
    "grpo": FREE | {"ppo": {"advantage": {"estimator": "grpo"}}},
    "grpo-one-step": FREE | {"copies": 3, "ppo": {"epochs": 1, "advantage": {"estimator": "grpo"}}},
    "rloo": FREE | {"ppo": {"advantage": {"estimator": "rloo"}, "loss": {"aggregation": "seq_mean_token_sum"}}},
    "rloo-kl": FREE | {"lora": {"rank": 4}, "ppo": {"advantage": {"estimator": "rloo"}, "kl": {"coef": 0.2}}},
    "reinforce-pp": FREE | {"ppo": {"advantage": {"estimator": "reinforce_pp", "gamma_turn": 0.9}}},
    "group-filter": {"grouped": True, "ppo": {"min_group_std": 0.6}},
    "weighted": {"noise": 0.4, "ppo": {"importance": {"weight": "token", "cap": 1.3}}},
    "weighted-band": {
        "noise": 0.4,
        "ppo": {
            "importance": {"weight": "token", "cap": 1.3, "band": (0.97, 1.1)},
            "kl": {"coef": 0.3, "estimator": "k2", "placement": "loss"},
            "loss": {"entropy_coef": 0.1, "aggregation": "seq_mean_token_mean"},
        },
    },
    "critic-gradient": {"critic": "head", "critic_gradient": True, "ppo": {"loss": {"value_coef": 0.3}}},
    "critic-gradient-lora": {"critic": "head", "critic_gradient": True, "lora": {"rank": 4}, "ppo": {"minibatches": 2}},
}  # fmt: skip


def merged(case):
    ppo = {"epochs": 3, "minibatches": 1, "microbatch_tokens": 90, "logit_chunk": 13, "target_kl": None, **LR}
    return {**case, "ppo": {**ppo, **case.get("ppo", {})}}


def grouped(batch):
    """Attempts at tasks in threes and one alone, all of them ended."""
    return [
        replace(
            t,
            task=Task(f"g/{i // 3 if i % 5 != 4 else f'alone{i}'}", "toy", ""),
            end=EndReason.MAX_TURNS if t.end is EndReason.CUT else t.end,
            trailing_ids=(),
        )
        for i, t in enumerate(batch)
    ]


def noisy(batch, scale, seed=5):
    """As from an engine whose arithmetic differs."""
    generator = torch.Generator().manual_seed(seed)

    def off(turn):
        noise = scale * torch.randn(len(turn.logprobs), generator=generator, dtype=F64)
        return replace(
            turn, logprobs=tuple(min(x + e, 0.0) for x, e in zip(turn.logprobs, noise.tolist(), strict=True))
        )

    return [replace(t, turns=tuple(off(turn) for turn in t.turns)) for t in batch]


def shaken(model, scale, generator):
    with torch.no_grad():
        for weight in model.policy_parameters() + model.critic_parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator, dtype=F64))


@pytest.mark.parametrize("name", sorted(CASES))
def test_update_equals_the_plain_recomputation(kit, name):
    case = dict(CASES[name])
    copies, updates, noise = case.pop("copies", 1), case.pop("updates", 1), case.pop("noise", 0.0)
    is_grouped, gradient = case.pop("grouped", False), case.pop("critic_gradient", False)
    config = kit.config(**merged(case))
    config = config.model_copy(update={"model": config.model.model_copy(update={"critic_gradient": gradient})})
    model = kit.actor_critic(config, dtype=F64)
    generator = torch.Generator().manual_seed(3)
    shaken(model, 0.1, generator)
    reference = copy.deepcopy(model.policy)
    model.begin_rl(reference=config.ppo.kl.needs_reference)
    shaken(model, 0.05, generator)
    drawn = [trajectory for copy_ in range(copies) for trajectory in kit.batch(100 * copy_)]
    drawn = grouped(drawn) if is_grouped else drawn

    oracle, learner = Oracle(model, config, reference), PPOLearner(model, config)
    # The bias of a fresh critic is set from the first returns; here the critic counts as not fresh.
    learner.load_state_dict(learner.state_dict() | {"bias_is_set": True})
    before = [weight.clone() for weight in model.policy_parameters() + model.critic_parameters()]
    for _ in range(updates):
        batch = noisy(kit.relabel(model, drawn, config.rollout.sampling.temperature), noise)
        coef = oracle.coef
        metrics = learner.update(batch)
        oracle.update(batch)
        if config.ppo.kl.needs_reference:
            assert metrics["ppo/kl_coef"] == pytest.approx(coef, rel=1e-9)

    after = model.policy_parameters() + model.critic_parameters()
    expected = oracle.model.policy_parameters() + oracle.model.critic_parameters()
    assert any(bool(((a - b).abs() > 1e-3).any()) for a, b in zip(after, before, strict=True))
    for found, wanted in zip(after, expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-9)
    assert metrics["ppo/steps"] == config.ppo.epochs * config.ppo.minibatches
    # Each case must reach what it is there for.
    assert metrics["ppo/clip_fraction"] > 0.2 or name != "seq-sum"
    assert metrics["ppo/kept_fraction"] < 1.0 or name not in {"grpo", "rloo", "group-filter", "weighted-band"}
    assert metrics["ppo/kept_fraction"] > 0.2
    assert metrics.get("ppo/importance_capped", 1.0) > 0.1
    assert coef != config.ppo.kl.coef or "adaptive" not in name
