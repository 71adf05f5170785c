"""LoRA adapters (Hu et al., arXiv:2106.09685) of policy, critic and reference on one frozen base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl.config import LoraConfig
from agentrl.errors import ConfigError
from agentrl.learner.trunk import decoder_layers

POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"


class Adapters:
    """Adapters of one model; `policy` is the active one whenever no method of this class runs.

    Weights are those of the base in its own type; adapters are float32 at least, whatever the base is.
    """

    def __init__(self, policy: Any, lora: LoraConfig, *, critic: bool, seed: int) -> None:
        """Puts adapters into the model's linear layers, and freezes everything else.

        Args:
            policy: A transformers causal model; it is changed in place.
            lora: Rank, scale, layers.
            critic: Whether the critic has an adapter of its own.
            seed: Of the adapters' first values.

        Raises:
            ConfigError: If the model has fewer layers than `lora.layers`.
        """
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer

        settings = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,
            target_modules="all-linear" if lora.layers is None else _linears_of_last(policy, lora.layers),
            task_type="CAUSAL_LM",
        )
        self._policy = policy
        self._device = policy.device
        with self._borrowed_generator():
            torch.manual_seed(seed)
            self._peft = peft.get_peft_model(policy, settings, adapter_name=POLICY)
            if critic:
                self._peft.add_adapter(CRITIC, settings)
        self._modules: list[Any] = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]
        _activate(POLICY, self._modules)

    @property
    def names(self) -> list[str]:
        """Those that exist."""
        return list(self._peft.peft_config)

    @property
    def policy_is_fresh(self) -> bool:
        """Whether the policy still is its base."""
        return not any(bool(weight.any()) for name, weight in self._named(POLICY) if "lora_B" in name)

    def parameters(self, adapter: str) -> list[nn.Parameter]:
        """The weights of one of them."""
        return [weight for _, weight in self._named(adapter)]

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Gives `target` the weights of `source`."""
        for old, new in zip(self.parameters(source), self.parameters(target), strict=True):
            new.copy_(old)

    def add_reference(self) -> None:
        """Makes an adapter `reference`, frozen, where there is none yet."""
        if REFERENCE not in self.names:
            with self._borrowed_generator():
                self._peft.add_adapter(REFERENCE, self._peft.peft_config[POLICY])
        _activate(POLICY, self._modules)

    @contextmanager
    def active(self, adapter: str, within: nn.Module | None = None) -> Iterator[None]:
        """Makes one of them the active one for a while.

        Args:
            adapter: Which.
            within: Only in the adapted layers inside this module; None for all.
        """
        modules = self._modules
        if within is not None:
            inside = {id(module) for module in within.modules()}
            modules = [module for module in modules if id(module) in inside]
        _activate(adapter, modules)
        try:
            yield
        finally:
            _activate(POLICY, modules)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """For a while the model is what KL refers to: the frozen adapter, or the base where there is none."""
        if REFERENCE in self.names:
            with self.active(REFERENCE):
                yield
            return
        for module in self._modules:
            module.enable_adapters(False)
        try:
            yield
        finally:
            for module in self._modules:
                module.enable_adapters(True)
            _activate(POLICY, self._modules)

    def save(self, folder: Path) -> None:
        """Writes each adapter into a folder of its own name, as peft does."""
        # Told not to look for changed embeddings, for which peft would ask the hub.
        self._peft.save_pretrained(folder, selected_adapters=self.names, save_embedding_layers=False)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote.

        Raises:
            ValueError: If an adapter covers other layers than here.
            OSError: If one is missing.
        """
        from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        if (folder / REFERENCE).is_dir():
            self.add_reference()
        for adapter in self.names:
            weights = load_file(folder / adapter / "adapter_model.safetensors")
            if set(weights) != set(get_peft_model_state_dict(self._peft, adapter_name=adapter)):
                raise ValueError(f"adapter {adapter!r} covers other layers")
            set_peft_model_state_dict(self._peft, weights, adapter_name=adapter)

    def _named(self, adapter: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self._policy.named_parameters() if f".{adapter}." in name]

    def _borrowed_generator(self) -> Any:
        """Peft draws an adapter's first values from torch's global generator, which is given back as it was."""
        return torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else [])


def _activate(adapter: str, modules: Iterable[Any]) -> None:
    for module in modules:
        module.set_adapter(adapter)
        # peft freezes the adapter that it leaves, and a gradient that arrives at a frozen weight is dropped: a backward
        # pass may come after the switch back.
        for name, weight in module.named_parameters():
            if f".{POLICY}." in name or f".{CRITIC}." in name:
                weight.requires_grad_(True)
            elif f".{REFERENCE}." in name:
                weight.requires_grad_(False)


def _linears_of_last(policy: Any, layers: int) -> list[str]:
    """Full names of the linear modules in the last decoder layers."""
    found = decoder_layers(policy.base_model)
    if layers > len(found):
        raise ConfigError(
            f"model.lora.layers is {layers}, and {type(policy).__name__} has {len(found)} decoder layers: expected 1 to"
            f" {len(found)}, or leave it out for all of them."
        )
    last = {id(module) for layer in found[-layers:] for module in layer.modules()}
    return [name for name, module in policy.named_modules() if isinstance(module, nn.Linear) and id(module) in last]
