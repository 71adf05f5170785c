"""How the learner learns: the optimiser, credit assignment, the losses, the PPO loop."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.section import Section


class OptimConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101)."""

    lr: float = Field(1e-4, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the rate rises linearly from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest gradient norm."""


CRITIC_FREE = frozenset({"grpo", "rloo", "reinforce_pp"})
"""Estimators that compare returns and read no values."""


class AdvantageConfig(Section):
    """Credit assignment: boundary GAE and its presets, and the critic-free estimators."""

    estimator: Literal["boundary", "action", "turn", "grpo", "rloo", "reinforce_pp"] = "boundary"
    """`boundary`: GAE with one pair (gamma, lambda) inside a turn and one across its end; `action`: GAE with the
    turn's pair at every token; `turn`: GAE over whole turns, one advantage and one value for each; `grpo`, `rloo` (both
    compare the attempts at a task) and `reinforce_pp`: without a critic."""
    gamma_token: float = Field(1.0, ge=0, le=1)
    """Discount from token to token inside a turn; `boundary` only."""
    lambda_token: float = Field(1.0, ge=0, le=1)
    """GAE lambda inside a turn; `boundary` only."""
    gamma_turn: float = Field(1.0, ge=0, le=1)
    """Discount across the end of a turn; for `action` and `reinforce_pp` that of each token."""
    lambda_turn: float = Field(0.95, ge=0, le=1)
    """GAE lambda across the end of a turn; for `action` that of each token."""
    lambda_alpha: float | None = Field(None, gt=0)
    """Length-adaptive lambda_turn = 1 - 1 / (alpha K) for an episode of K turns instead of the constant one (VAPO,
    arXiv:2504.05118); worth it from about 20 turns on. For `action` K counts tokens."""
    lambda_value: float = Field(1.0, ge=0, le=1)
    """Lambda of the value targets, everywhere (decoupled; VC-PPO, arXiv:2503.01491)."""
    group_scale: bool = True
    """Whether `grpo` divides by the group's deviation (arXiv:2402.03300); False as in Dr. GRPO (arXiv:2503.20783)."""
    whiten: Literal["none", "scale", "full"] | None = None
    """`full` shifts and scales the batch's advantages, `scale` only scales; where not given `none` for `grpo` and
    `rloo`, whose groups are centred already, else `full`."""
    min_std: float = Field(0.1, gt=0)
    """Floor of each deviation that advantages are divided by."""

    @property
    def is_critic_free(self) -> bool:
        """Whether the estimator reads no values."""
        return self.estimator in CRITIC_FREE

    @property
    def whitening(self) -> Literal["none", "scale", "full"]:
        """`whiten`, or the estimator's own."""
        return self.whiten or ("none" if self.estimator in {"grpo", "rloo"} else "full")

    @model_validator(mode="after")
    def _only_what_is_read(self) -> Self:
        if self.estimator != "boundary" and (self.gamma_token, self.lambda_token) != (1.0, 1.0):
            raise ValueError(
                f"ppo.advantage.gamma_token and lambda_token are read by estimator 'boundary' only, and it is"
                f" {self.estimator!r}: expected both to be 1; set gamma_turn and lambda_turn instead."
            )
        if self.estimator in {"grpo", "rloo"} and self.gamma_turn != 1.0:
            raise ValueError(
                f"ppo.advantage.gamma_turn = {self.gamma_turn}: estimator {self.estimator!r} compares whole returns and"
                " discounts nothing; expected 1."
            )
        if self.is_critic_free and self.lambda_alpha is not None:
            raise ValueError(f"ppo.advantage.lambda_alpha: estimator {self.estimator!r} has no lambda; leave it out.")
        return self


class LossConfig(Section):
    """The policy and value losses (Schulman et al., arXiv:1707.06347)."""

    clip_low: float = Field(0.2, gt=0)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped at 1 + clip_high (clip-higher, DAPO, arXiv:2503.14476)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bound of the loss for negative advantages (arXiv:1912.09729); None for none."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """How token losses become one number; denominators are always those of the whole minibatch."""
    norm_length: int = Field(1024, ge=1)
    """The constant length of `seq_mean_token_sum_norm`, tokens."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    value_clip: float | None = Field(None, gt=0)
    """Range of the value's change; None for no clipping."""
    value_coef: float = Field(0.1, gt=0)
    """Weight of the value loss where it reaches the policy's weights (`model.critic_gradient`)."""


class KlConfig(Section):
    """The KL to the reference policy: the policy as it was when RL began."""

    coef: float = Field(0.0, ge=0)
    """Weight, at first; 0 for none."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1 = log(p / q), k2 = k1 squared / 2, k3 = q / p - 1 + k1 (Schulman, 2020)."""
    placement: Literal["reward", "loss"] = "reward"
    """k1 goes into the reward, k2 into the loss; the other pairs have other gradients than the KL's and are refused."""
    target: float | None = Field(None, gt=0)
    """Adapts the weight so that the KL comes to this, nats, counted as `stat` says (Ziegler et al., arXiv:1909.08593);
    None keeps it fixed."""
    horizon: int = Field(10_000, ge=1)
    """Episodes over which the weight adapts."""
    stat: Literal["token_mean", "seq_sum"] = "token_mean"
    """What `target` counts: the mean over episodes of each one's mean over its tokens, or of each one's sum."""

    @property
    def needs_reference(self) -> bool:
        """Whether the reference policy is read at all."""
        return self.coef > 0 or self.target is not None

    @model_validator(mode="after")
    def _adaptable(self) -> Self:
        if self.target is not None and self.coef == 0:
            raise ValueError(
                f"ppo.kl.target = {self.target} adapts ppo.kl.coef by factors, and a coef of 0 stays 0: expected a coef"
                " above 0 to begin with, such as 0.01."
            )
        return self

    @model_validator(mode="after")
    def _right_gradient(self) -> Self:
        reasons = {
            ("k3", "reward"): "its gradient there is that of KL(policy, reference) minus that of KL(reference, policy),"
            " which can point the wrong way",
            ("k2", "reward"): "its expectation there is not the KL",
            ("k1", "loss"): "its expected gradient there is 0",
            ("k3", "loss"): "its gradient there is that of KL(reference, policy), the other direction",
        }
        reason = reasons.get((self.estimator, self.placement))
        if reason is not None:
            raise ValueError(
                f"ppo.kl: {self.estimator} in the {self.placement} is refused: {reason}. Expected k1 in the reward (it"
                " counts what a token does to later ones) or k2 in the loss (each state by itself)."
            )
        return self


class ImportanceConfig(Section):
    """Correction of the gap between the engine that sampled and the learner, as constant weights on token losses."""

    weight: Literal["none", "token"] = "none"
    """`token`: learner / engine probability, truncated (TIS); for engines that are another program."""
    cap: float = Field(2.0, gt=1)
    """Largest weight."""
    band: tuple[float, float] | None = None
    """Episodes whose geometric mean of learner / engine leaves this band are masked; None for no mask."""

    @property
    def is_on(self) -> bool:
        """Whether anything is corrected."""
        return self.weight != "none" or self.band is not None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.band is not None and not 0 < self.band[0] < 1 < self.band[1]:
            raise ValueError(f"ppo.importance.band is {list(self.band)}: expected [low, high] with 0 < low < 1 < high.")
        return self


class PpoConfig(Section):
    """The PPO loop."""

    iterations: int = Field(100, ge=0)
    """Rollout batches that are trained on."""
    rollout_tokens: int | None = Field(None, ge=1)
    """Training ends with the iteration that brings its rollouts to so many tokens, sampled and observed, where
    `iterations` have not ended it before; None for no such budget."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    minibatches: int = Field(2, ge=1)
    """Optimiser steps in a pass."""
    microbatch_tokens: int = Field(4096, ge=16)
    """Tokens in one forward pass, padding included."""
    packing: bool = False
    """Lay several episodes into one line instead of padding each to the longest."""
    logit_chunk: int = Field(512, ge=1)
    """Action tokens whose logits exist at once."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Credit assignment."""
    loss: LossConfig = LossConfig()
    """Objectives."""
    kl: KlConfig = KlConfig()
    """Distance to the reference policy."""
    importance: ImportanceConfig = ImportanceConfig()
    """Engine against learner."""
    min_group_std: float | None = Field(None, ge=0)
    """Attempts at a task whose returns deviate by no more than this leave the policy's loss, counted (StarPO-S,
    arXiv:2504.20073); the critic still learns from them. None for no filter."""
    policy: OptimConfig = OptimConfig(lr=1e-4)
    """The policy's optimiser."""
    critic: OptimConfig = OptimConfig(lr=3e-4)
    """The critic's optimiser."""
    target_kl: float | None = Field(0.02, gt=0)
    """The rest of an update is skipped once the k3 estimate is above 1.5 times this; None for never."""
    warmup_collections: int = Field(2, ge=0)
    """Most rollout batches that the critic alone is fitted to before the policy learns."""
    warmup_epochs: int = Field(4, ge=1)
    """Passes of the critic over each of these."""
    warmup_explained_variance: float = 0.15
    """Warm-up ends once the critic explains this share of the variance of rollouts it has not been fitted to."""
