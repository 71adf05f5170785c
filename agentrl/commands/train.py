"""`agentrl train`: a whole run, from the model to the report."""

from __future__ import annotations

from typing import Literal

from agentrl.commands._flags import parse_run
from agentrl.commands._output import print_json, quiet_transformers, show
from agentrl.commands._smoke import smoke
from agentrl.configfile import as_tables
from agentrl.progress import stderr_console


def main(arguments: list[str]) -> int:
    """Trains; see `agentrl train --help`."""
    return run_command("train", "Trains a policy by PPO: model, SFT, evaluation, PPO, evaluation, report.", arguments)


def run_command(command: Literal["train", "sft"], description: str, arguments: list[str]) -> int:
    """What `train` and `sft` share: files and flags in, result out."""
    options, config = parse_run(arguments, command, description)
    if options.smoke:
        config = smoke(config)
    if options.dry_run:
        print_json(as_tables(config))
        return 0
    from agentrl.report.terminal import result_tables
    from agentrl.train import sft, train

    quiet_transformers()
    work = train if command == "train" else sft
    result = work(config, resume=options.resume, console=stderr_console())
    if options.json:
        print_json(result)
    else:
        show(result_tables(result))
    return 0
