"""The KL's reference stays the policy that RL began with, bit for bit, over any number of resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.errors import CheckpointError
from agentrl.learner.reference import check_reference, reference_probe

LORA = {"rank": 2, "alpha": 4}


def move(model, seed: int) -> None:
    """What training does to the policy, as far as the reference is concerned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.policy_parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize(("lora", "after_sft"), [(None, False), (None, True), (LORA, False), (LORA, True)], ids=str)
def test_three_resumes(kit, tmp_path: Path, lora, after_sft: bool) -> None:
    """The way of a run: model, SFT's weights, `begin_rl`, then those of the last checkpoint."""
    config = kit.config(lora=lora, critic="head")
    episodes = kit.batch()[:2]
    micro = kit.micro(episodes)

    def begin(checkpoint: Path | None):
        from agentrl.learner.model import ActorCritic

        model = ActorCritic(kit.model(), config.model, seed=0)
        if after_sft:
            if not (tmp_path / "sft").exists():
                move(model, 1)
                model.save(tmp_path / "sft")
            model.load(tmp_path / "sft")
        model.begin_rl(reference=True)
        if checkpoint is not None:
            model.load(checkpoint)
        return model

    model = begin(None)
    start = model.policy_logprobs(micro, 1.0).logprob_N.detach()
    first, probe = model.reference_logprobs(micro, 1.0), reference_probe(model)
    assert torch.equal(first, start), "the reference is the policy as RL begins"
    for resume in range(3):
        move(model, 10 + resume)
        folder = tmp_path / f"{resume:06d}"
        model.save(folder)
        model = begin(folder)
        assert torch.equal(model.reference_logprobs(micro, 1.0), first)
        assert reference_probe(model) == probe
        check_reference(folder, probe, model)
    assert not torch.allclose(model.policy_logprobs(micro, 1.0).logprob_N, start, atol=1e-2)


def test_another_base_under_the_adapters_is_refused(kit, tmp_path: Path) -> None:
    config = kit.config(lora=LORA, critic="head")
    model = kit.actor_critic(config, reference=True)
    probe = reference_probe(model)
    assert len(probe) == kit.vocab - 1
    model.save(tmp_path)
    other = kit.actor_critic(config, reference=True, seed=1)
    other.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.path"):
        check_reference(tmp_path, probe, other)
    check_reference(tmp_path, None, other)


def test_without_a_reference_there_is_nothing_to_compare(kit, tmp_path: Path) -> None:
    model = kit.actor_critic(kit.config(critic="head"))
    assert reference_probe(model) is None
    check_reference(tmp_path, [1.0], model)
