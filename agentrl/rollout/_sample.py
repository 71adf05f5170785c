"""How a token is drawn from logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from agentrl.types import Sampling


def draw(logits_BV: Tensor, noise_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draws one token for each row by inverting its distribution function.

    One uniform number a token, so that a row's draw depends on its own logits and noise and on nothing else.

    Args:
        logits_BV: [B, V] float32.
        noise_B: [B] float64 in [0, 1).
        sampling: Temperature and cuts; at temperature 0 the most likely token is taken.

    Returns:
        [B] int64 ids, and [B] float32 natural logarithms of their probabilities in the whole distribution at the
        sampling temperature (at 0: of temperature 1), cuts or not.
    """
    scaled_BV = logits_BV if sampling.temperature in (0.0, 1.0) else logits_BV / sampling.temperature
    logprob_BV = nn.functional.log_softmax(scaled_BV, dim=-1)
    if sampling.temperature == 0.0:
        id_B = logits_BV.argmax(-1)
    else:
        prob_BV = logprob_BV.exp()
        if sampling.cuts_support:
            prob_BV = cut(prob_BV, sampling)
        mass_BV = prob_BV.cumsum(-1, dtype=torch.float64)
        target_B1 = noise_B[:, None] * mass_BV[:, -1:]
        # The clamp matters for rows that are not a number: they are reported later, not by an index error.
        id_B = torch.searchsorted(mass_BV, target_B1, right=True).squeeze(1).clamp_(max=logits_BV.shape[1] - 1)
    return id_B, logprob_BV.gather(1, id_B[:, None]).squeeze(1)


def cut(prob_BV: Tensor, sampling: Sampling) -> Tensor:
    """Sets to 0 what top-k, then top-p, then min-p leave out; tokens as likely as the last one kept are kept too.

    Args:
        prob_BV: [B, V] probabilities.
        sampling: The cuts.

    Returns:
        [B, V], not renormalised.
    """
    if 0 < sampling.top_k < prob_BV.shape[1]:
        least_B1 = prob_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        prob_BV = prob_BV.where(prob_BV >= least_B1, 0.0)
    if sampling.top_p < 1.0:
        sorted_BV = prob_BV.sort(dim=-1, descending=True).values
        mass_BV = sorted_BV.cumsum(-1)
        inside_BV = mass_BV - sorted_BV < sampling.top_p * mass_BV[:, -1:]
        least_B1 = sorted_BV.masked_fill(~inside_BV, 2.0).amin(-1, keepdim=True)
        prob_BV = prob_BV.where(prob_BV >= least_B1, 0.0)
    if sampling.min_p > 0.0:
        prob_BV = prob_BV.where(prob_BV >= sampling.min_p * prob_BV.amax(-1, keepdim=True), 0.0)
    return prob_BV
