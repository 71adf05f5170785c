"""What `--smoke` makes of a config: the same parts, everything small."""

from __future__ import annotations

from typing import Any

from agentrl.config import RunConfig


def smoke(config: RunConfig) -> RunConfig:
    """A run of the same parts that ends in under a minute. Sizes only go down, and the run is named apart."""
    tables = config.model_dump()
    tables["name"] = f"{config.name}-smoke"
    _at_most(tables["rollout"], tasks=2, episodes_per_task=2, kv_cache_mib=256)
    _at_most(tables["ppo"], iterations=2, epochs=1, warmup_collections=1, warmup_epochs=1)
    _at_most(tables["eval"], tasks=4, samples=1, dev_tasks=4)
    _at_most(tables["checkpoint"], every=1)
    if tables["sft"] is not None:
        _at_most(tables["sft"], episodes=16, steps=2, batch_episodes=4)
    if tables["model"]["tiny"] is not None:
        _at_most(tables["model"]["tiny"], hidden_size=64, layers=2, intermediate_size=128, corpus_tasks=24)
        # Work this small gains nothing from threads, and where others use the cores they wait for one another.
        tables["threads"] = 1
    return RunConfig.model_validate(tables)


def _at_most(table: dict[str, Any], **caps: int) -> None:
    for name, cap in caps.items():
        table[name] = min(table[name], cap)
