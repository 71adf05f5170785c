"""A new reward in 5 lines, a new environment in 15, and a model that is made, taught and trained on them.

Takes about a minute on two cores; `--smoke` only shows that it runs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence

import agentrl


@agentrl.component(name="lookup/right")
def right(episode: agentrl.Episode) -> agentrl.Score:
    submitted = [call.arguments.get("number") for turn in episode.turns for call in turn.calls if call.name == "submit"]
    return agentrl.Score(float(submitted[-1:] == [episode.task.data["number"]]), evidence=submitted)


class Lookup(agentrl.ToolEnv):
    system_prompt, reward, splits = "Look the number up, then submit it.", right, ("train", "heldout")

    def tasks(self, split: str) -> Sequence[agentrl.Task]:
        return [agentrl.Task(f"{split}/{n}", "Lookup", "Which number is it?", {"number": n}, split) for n in range(100)]

    @agentrl.tool(mutates=False)
    def look(self) -> str:
        """Shows the number."""
        return str(self.task.data["number"])

    @agentrl.tool(ends=True)
    def submit(self, number: int) -> None:
        """Submits the number."""


class Taught(Lookup):
    """With an expert there is something to imitate first. This one misreads a third of the numbers."""

    name = Lookup.name

    def expert(self, task: agentrl.Task) -> agentrl.MessagePolicy:
        number = task.data["number"]
        number += number % 3 == 0
        return agentrl.ScriptedPolicy(["```look\n```", f'```submit\n{{"number": {number}}}\n```'])


def main(*, smoke: bool) -> None:
    config = agentrl.RunConfig.model_validate(
        {
            "name": "lookup",
            "runs_dir": tempfile.mkdtemp(),
            "env": {"id": f"{__file__}:Taught", "format": "fenced"},
            "model": {
                "critic": "head",
                "tiny": {"vocab_size": 400, "hidden_size": 64, "layers": 2, "intermediate_size": 128, "context": 256},
            },
            "sft": {"episodes": 100, "steps": 3 if smoke else 200, "batch_episodes": 16, "optim": {"lr": 5e-3}},
            "rollout": {"tasks": 16, "sampling": {"max_tokens": 32}},
            "ppo": {"iterations": 1 if smoke else 40, "policy": {"lr": 5e-4}, "critic": {"lr": 1e-3}},
            "eval": {"tasks": 100},
        }
    )
    result = agentrl.train(config)
    for row in result["evals"]:
        print(f"{row['policy']:5} at temperature {row['temperature']:g}: {row['summary']['success']:.0%} right")
    print(f"report: {result['report']}")


if __name__ == "__main__":
    main(smoke="--smoke" in sys.argv)
