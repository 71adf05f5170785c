"""The recorded outputs of public implementations: how tests read them, and what becomes of each.

`ACCOUNTS` says for every recorded output which file of tests compares it, or why we have nothing to compare. A record
that it does not mention makes `test_golden.py::test_every_record_is_accounted_for` fail, and so does a file that no
longer names what it is said to compare.
"""

from __future__ import annotations

import torch

CREDIT, LOSSES = "test_golden.py", "test_golden_losses.py"

DTYPES = {"float64": (torch.float64, 1e-9), "float32": (torch.float32, 1e-5)}
"""Type of the inputs, and how near the outputs must come."""
EPSILON = 1e-8
"""How near in float64 where the other side adds 1e-8 to a count."""

LATER = "none of ours: bi-level GAE is for later"
LAST_ANCHOR = "none of ours: a value read at a turn's last token takes the turn's own content out of its advantage"
ROUNDING = "a distance between two recorded sides, each of which is compared by itself or written down as not ours"

ACCOUNTS: dict[str, dict[str, str]] = {
    "worked_example": {
        "a_action_only": CREDIT,
        "b_naive_all_tokens": CREDIT,
        "b2_naive_obs_values_zeroed": CREDIT,
        "c_turn_level_first_anchor": CREDIT,
        "c2_turn_level_last_anchor": LAST_ANCHOR,
        "d_bilevel": LATER,
        "e_turn_then_token": "none of ours: the same as boundary GAE with lambda_token 1, which is compared",
        "estar_boundary_ltok0.5": CREDIT,
        "estar_boundary_ltok1": CREDIT,
        "a_decoupled_lampi0.5_lamv1": CREDIT,
    },
    "random": {
        "verl.gae": CREDIT,
        "trl.gae_inline": CREDIT,
        "openrlhf.gae": CREDIT,
        "skyrl.gae": CREDIT,
        "slime.vanilla_gae": CREDIT,
        "areal.gae_inline[": CREDIT,
        "areal.gae_inline_boot": CREDIT,
        "cleanrl.gae_on_action_tokens": CREDIT,
        "sb3.gae_on_action_tokens": CREDIT,
        "ragen.bi_level": LATER,
        "vagen.no_concat_gae_first": CREDIT,
        "vagen.no_concat_gae_last": LAST_ANCHOR,
        "ref.a_with_boot": CREDIT,
        "ref.c_first_with_boot": CREDIT,
        "ref.d_with_boot": LATER,
        "ref.e_with_boot": CREDIT,
        "ref.estar_with_boot": CREDIT,
        "verl.reinforce_pp_returns": CREDIT,
        "verl.masked_whiten": CREDIT,
        "verl.masked_whiten_noshift": CREDIT,
        "verl.masked_mean_var": CREDIT,
        "trl.masked_whiten": CREDIT,
        "openrlhf.batch_norm_adv(biased)": CREDIT,
        "verl.kl_penalty": LOSSES,
        "verl.kl_penalty.abs": "none of ours: |log ratio| is no estimate of the KL",
        "verl.TIS_token(C=2)": LOSSES,
        "verl.TIS_sequence": "none of ours: weights of whole sequences grow with their length",
        "verl.IcePop": "none of ours: bands on tokens are for later",
        "verl.TIS_token_batchnorm": "none of ours: a weight that depends on the batch's others",
        "verl.RS[token_k1": "none of ours: our band is on episodes",
        "verl.RS[seq_mean_k1": LOSSES,
        "verl.RS[seq_mean_k3": "none of ours: our band is on the geometric mean of the ratio, which is k1",
        "verl.RS[seq_max_k2": "none of ours: our band is on the geometric mean of the ratio",
        "verl.RS[seq_sum_k1": "none of ours: a band on the product of ratios rejects by length",
        "verl.policy_loss_vanilla": LOSSES,
        "verl.agg_loss": LOSSES,
        "verl_jan2026.agg_loss": LOSSES,
        "verl.value_loss": LOSSES,
        "openrlhf.PolicyLoss": LOSSES,
        "verl.logprobs_from_logits_v2": LOSSES,
        "verl.entropy_from_logits": LOSSES,
        "verl.compute_entropy_loss": LOSSES,
        "openrlhf.compute_reward": LOSSES,
        "verl.AdaptiveKLController": LOSSES,
    },
    "cross_checks": {
        **dict.fromkeys(
            (
                "verl.returns vs", "verl.adv vs", "trl vs ref", "lm-human vs trl", "openrlhf vs ref(b2)",
                "skyrl.returns vs", "slime.", "areal(", "cleanrl(", "sb3(", "ragen.bi_level", "vagen ",
                "trl.masked_whiten vs", "skyrl.masked_whiten vs", "ref.whiten vs", "kl ", "TIS ", "IcePop ref",
                "policy loss verl vs ref", "agg ref vs", "value loss ref vs", "openrlhf PolicyLoss vs",
                "openrlhf ValueLoss vs", "skyrl scaled-advantage", "trl selective_log_softmax", "trl entropy vs",
            ),
            ROUNDING,
        ),
        "verl: effect of reward 5.0 on an obs token": CREDIT,
        "verl REINFORCE++ new vs Jan-2026": CREDIT,
        "openrlhf(biased var) vs verl(unbiased) ratio": CREDIT,
        "agg_loss ": LOSSES,
        "RAGEN bilevel": LATER,
    },
    "analytic": {
        "ppo_dL_dlogp": LOSSES,
        "kl_gradient_identities": LOSSES,
        "verl_RS_token_k1_quirk": "none of ours: our band is on episodes, and acts on learner / engine",
        "trl_reward_one_past_last_token": CREDIT,
    },
}  # fmt: skip
"""By section of the records: a key's longest prefix in here says what becomes of it."""


def account_of(section: str, key: str) -> str | None:
    """The longest prefix of the key that is accounted for."""
    return max((prefix for prefix in ACCOUNTS[section] if key.startswith(prefix)), key=len, default=None)


class Random:
    """The random inputs, compacted to model tokens."""

    def __init__(self, golden: dict, dtype: torch.dtype) -> None:
        self.inputs, self.outputs, self.dtype = golden["random"]["inputs"], golden["random"]["outputs"], dtype
        self.mask = torch.tensor(self.inputs["response_mask"]) == 1
        self.turns = torch.tensor(self.inputs["turn_id"])[self.mask]
        self.episodes = torch.arange(4)[:, None].expand_as(self.mask)[self.mask]

    def grid(self, name: str) -> torch.Tensor:
        return torch.tensor(self.inputs[name], dtype=self.dtype)

    def get(self, name: str) -> torch.Tensor:
        return self.grid(name)[self.mask]

    def found(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[self.mask]


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected.double()).abs().max() <= tolerance)


def naive_gae(rewards_T, values_T, bootstrap, gamma, lam):
    """The wrong one, for comparison: the recursion over every token of a row, observations included."""
    advantages, ahead, next_value = [0.0] * len(rewards_T), 0.0, bootstrap
    for t in reversed(range(len(rewards_T))):
        ahead = rewards_T[t] + gamma * next_value - values_T[t] + gamma * lam * ahead
        advantages[t], next_value = ahead, values_T[t]
    return advantages
