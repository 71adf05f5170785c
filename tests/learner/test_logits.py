"""Chunked logprobs and entropies against log_softmax of whole logits."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.learner.logits import logprob_and_entropy


def inputs(n=11, hidden=6, vocab=9, dtype=torch.float64, bias=False):
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(hidden, vocab, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    states = torch.randn(n, hidden, generator=generator, dtype=torch.float64).to(dtype)
    return states, torch.randint(0, vocab, (n,), generator=generator), head


def plain(states, target, head, temperature):
    log_pi = (head(states) / temperature).log_softmax(-1)
    return log_pi.gather(-1, target[:, None]).squeeze(-1), -(log_pi.exp() * log_pi).sum(-1)


@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_do_not_depend_on_the_chunk(chunk, temperature, bias):
    states, target, head = inputs(bias=bias)
    results = []
    for compute in (
        lambda h: plain(h, target, head, temperature),
        lambda h: logprob_and_entropy(h, target, head, temperature=temperature, chunk=chunk, entropy_grad=True),
    ):
        leaf = states.clone().requires_grad_(True)
        head.zero_grad()
        logprob, entropy = compute(leaf)
        (logprob.square().sum() + 0.3 * entropy.square().sum()).backward()
        results.append([logprob.detach(), entropy.detach(), leaf.grad, *(p.grad.clone() for p in head.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_entropy_carries_a_gradient_only_where_asked():
    states, target, head = inputs()
    _, entropy = logprob_and_entropy(states.requires_grad_(True), target, head, temperature=1.0, chunk=4)
    assert not entropy.requires_grad
    with torch.no_grad():
        logprob, entropy = logprob_and_entropy(states, target, head, temperature=1.0, chunk=4, entropy_grad=True)
    assert not logprob.requires_grad
    assert not entropy.requires_grad


def test_a_uniform_policy_has_the_entropy_of_its_vocabulary():
    states, target, head = inputs()
    torch.nn.init.zeros_(head.weight)
    logprob, entropy = logprob_and_entropy(states, target, head, temperature=1.0, chunk=4)
    assert torch.allclose(entropy, torch.full_like(entropy, math.log(9)))
    assert torch.allclose(logprob, torch.full_like(logprob, -math.log(9)))


def test_bfloat16_weights_are_scored_in_float32():
    states, target, head = inputs(dtype=torch.bfloat16, hidden=64, vocab=50)
    logprob, _ = logprob_and_entropy(states, target, head, temperature=1.0, chunk=4)
    exact, _ = plain(states.double(), target, head.double(), 1.0)
    assert logprob.dtype == torch.float32
    assert torch.allclose(logprob.double(), exact, atol=1e-4)


def test_large_logits_neither_overflow_nor_lose_the_entropy():
    states, target, head = inputs(dtype=torch.float32)
    with torch.no_grad():
        head.weight.mul_(1e4)
    logprob, entropy = logprob_and_entropy(states, target, head, temperature=1.0, chunk=4)
    assert logprob.isfinite().all()
    assert entropy.isfinite().all()


def test_only_one_chunk_of_logits_is_alive_with_backward():
    """Of all chunks together no more than one's logits wait for the backward pass, which makes them one by one."""
    states, target, head = inputs(n=64, vocab=512)
    sizes: list[int] = []

    def note(tensor):
        if tensor.shape[-1:] == (512,):
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logprob, _ = logprob_and_entropy(states.requires_grad_(True), target, head, temperature=1.0, chunk=8)
        assert sum(sizes) <= 8 * 512
        logprob.sum().backward()
    assert max(sizes, default=0) <= 8 * 512
