"""The quickstart under several seeds, as one table: `python benchmarks/quickstart_seeds.py --seeds 0 1 2`.

Prints, for each split and way of decoding, each policy's success and PPO's paired differences with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.evaluate import compare
from agentrl.run import EpisodeFolder, RunDir
from agentrl.types import Trajectory

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "01_quickstart.toml"


def run_seed(seed: int, runs_dir: Path) -> dict[str, Any]:
    """Runs the quickstart in a process of its own and returns its result."""
    name = f"quickstart-seed-{seed}"
    command = [str(Path(sys.executable).with_name("agentrl")), "train", "--config", str(CONFIG), "--json"]
    command += ["--seed", str(seed), "--name", name, "--runs-dir", str(runs_dir)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def show(result: dict[str, Any]) -> None:
    """Prints one line for each policy, split and temperature, then the differences."""
    print(f"seed {result['seed']}: {result['wall_s'] / 60:.1f} minutes, {result['peak_memory_mib']:.0f} MiB")
    for row in result["evals"]:
        decoding = f"T={row['temperature']:g}" if row["temperature"] else "greedy"
        print(f"  {row['policy']:14} {row['split']:16} {decoding:7} {100 * row['summary']['success']:5.1f} %")
    for d in result["differences"]:
        decoding = f"T={d['temperature']:g}" if d["temperature"] else "greedy"
        interval = f"[{100 * d['low']:+5.1f}, {100 * d['high']:+5.1f}]"
        print(f"  {d['a']} - {d['b']:14} {d['split']:16} {decoding:7} {100 * d['mean']:+5.1f} {interval}", flush=True)


def pooled(runs_dir: Path, seeds: Sequence[int]) -> None:
    """Prints PPO's difference over all seeds together, tasks as clusters."""
    for other in ("sft", "sft continued"):
        ours: list[Trajectory] = []
        theirs: list[Trajectory] = []
        for seed in seeds:
            run = RunDir.open(runs_dir / f"quickstart-seed-{seed}")
            ours += EpisodeFolder(run.eval_dir("ppo-heldout-sampled")).trajectories()
            theirs += EpisodeFolder(run.eval_dir(f"{other.replace(' ', '-')}-heldout-sampled")).trajectories()
        d = compare(ours, theirs)
        print(f"all seeds, heldout, T=1: ppo - {other} {100 * d.mean:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]")


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            show(run_seed(seed, Path(folder)))
        pooled(Path(folder), seeds)


if __name__ == "__main__":
    main()
