"""`agentrl sft`: supervised fine-tuning on demonstrations, and nothing after it."""

from __future__ import annotations

from agentrl.commands.train import run_command


def main(arguments: list[str]) -> int:
    """Trains on demonstrations; see `agentrl sft --help`."""
    return run_command("sft", "Trains a policy on an environment's demonstrations; the config needs [sft].", arguments)
