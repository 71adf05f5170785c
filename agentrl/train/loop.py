"""The PPO loop: collect, check, learn, record, and write the state down often enough that a kill loses little."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.config import RunConfig
from agentrl.configfile import as_tables
from agentrl.learner import checkpoint
from agentrl.learner.ppo import PPOLearner
from agentrl.learner.reference import check_reference, reference_probe
from agentrl.progress import Progress
from agentrl.reward.ledger import check_trajectory
from agentrl.reward.transform import is_trained
from agentrl.rollout.collector import Collector
from agentrl.run import RunDir
from agentrl.train.measure import measure_dev
from agentrl.train.metrics import rollout_metrics
from agentrl.train.parts import Parts
from agentrl.train.sft import STATE
from agentrl.train.tasks import TaskStream, requests_for
from agentrl.types import Trajectory


@dataclass
class Position:
    """Where a run is.

    Attributes:
        iteration: Collections so far.
        updates: Updates of the policy so far; the run ends at `ppo.iterations`.
        warmups: Collections that only the critic was fitted to.
        warm: Whether the critic's warm-up is over.
        next_task: Place of the next task in the stream.
        tokens: Sampled and observed in its rollouts so far, those of the critic's warm-up included.
    """

    iteration: int = 0
    updates: int = 0
    warmups: int = 0
    warm: bool = False
    next_task: int = 0
    tokens: int = 0


class Loop:
    """The PPO part of a run."""

    def __init__(self, config: RunConfig, run: RunDir, parts: Parts, progress: Progress) -> None:
        """Takes the run up at its last good checkpoint, or at the start.

        Args:
            config: The run's.
            run: Open for writing.
            parts: Model at the end of SFT.
            progress: Shows how far it is.
        """
        self._config = config
        self._run = run
        self._parts = parts
        self._progress = progress
        parts.model.begin_rl(reference=config.ppo.kl.needs_reference)
        self._learner = PPOLearner(parts.model, config)
        env = parts.make()
        self._tasks = TaskStream(env.tasks("train"), config.seed)
        self._rewards = env.reward_tree
        self._reward_state = self._rewards.start_state()
        env.close()
        self._position = Position(next_task=config.sft.episodes if config.sft is not None else 0)
        self._unfinished: dict[str, Any] | None = None
        self._restore()
        self._collector = Collector(parts.make, parts.policy, parts.codec, config.rollout, config.seed)

    def go(self) -> Position:
        """Runs to the end.

        Returns:
            Where the run is then.

        Raises:
            InvariantError: If something that must hold does not; everything collected so far is kept.
        """
        at = self._position
        total = self._config.ppo.iterations
        try:
            if self._unfinished is not None:
                open_at = time.monotonic() - self._unfinished["elapsed"]
                self._finish(self._unfinished["metrics"], self._unfinished["times"], open_at)
            with self._progress.stage("PPO", total) as stage:
                stage.advance(at.updates)
                while not self._is_over:
                    before = at.updates
                    metrics = self._iterate()
                    stage.advance(
                        at.updates - before,
                        success=metrics.get("rollout/success"),
                        kl=metrics.get("ppo/kl"),
                        ev=metrics.get("critic/explained_variance"),
                    )
        finally:
            self._collector.close()
        return at

    @property
    def _is_over(self) -> bool:
        at, ppo = self._position, self._config.ppo
        return at.updates >= ppo.iterations or (ppo.rollout_tokens is not None and at.tokens >= ppo.rollout_tokens)

    def _iterate(self) -> dict[str, float]:
        at, config, start = self._position, self._config, time.monotonic()
        at.iteration += 1
        times: dict[str, float] = {}
        with _timed(times, "rollout"):
            trajectories = self._collect()
        metrics = rollout_metrics(trajectories)
        trajectories, found = self._transform(trajectories)
        with _timed(times, "learn"):
            metrics |= found | self._learn(trajectories)
        if at.iteration % config.checkpoint.every == 0 or self._is_over:
            with _timed(times, "checkpoint"):
                self._save({"metrics": metrics, "times": dict(times), "elapsed": time.monotonic() - start})
        return self._finish(metrics, times, start)

    def _finish(self, metrics: dict[str, float], times: dict[str, float], start: float) -> dict[str, float]:
        """What follows an iteration's checkpoint: its evaluation where one is due, and its line."""
        at, config = self._position, self._config
        if config.eval.every and at.iteration % config.eval.every == 0:
            with _timed(times, "eval"):
                metrics |= measure_dev(config, self._run, self._parts, at.iteration)
        times["iteration"] = time.monotonic() - start
        self._run.append_metrics(at.iteration, metrics | {f"time/{stage}": s for stage, s in times.items()})
        return metrics

    def _collect(self) -> list[Trajectory]:
        at, rollout = self._position, self._config.rollout
        tasks = self._tasks.take(at.next_task, rollout.tasks)
        at.next_task += rollout.tasks
        requests = requests_for(tasks, rollout.episodes_per_task, f"{at.iteration:06d}", self._config.seed)
        with self._run.rollouts(at.iteration) as folder:
            self._parts.policy.forget()
            trajectories = self._collector.collect(requests, on_episode=folder.append)
            self._parts.policy.forget()
        at.tokens += sum(trajectory.n_tokens for trajectory in trajectories)
        for trajectory in trajectories:
            check_trajectory(trajectory)
        return trajectories

    def _transform(self, trajectories: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """What is learned from, where a batch node stands between earned and trained rewards, and its metrics.

        The state from before goes to disk first, so that trained rewards there can always be computed again.
        """
        if self._rewards.batch_node is None:
            return trajectories, {}
        batch = self._rewards.transform(trajectories, self._reward_state)
        for trajectory in batch.trajectories:
            check_trajectory(trajectory)
        folder = self._run.rollouts(self._position.iteration)
        folder.write_reward_state(self._reward_state)
        folder.rewrite(batch.trajectories)
        self._reward_state = batch.state
        return [trajectory for trajectory in batch.trajectories if is_trained(trajectory)], batch.metrics

    def _learn(self, trajectories: list[Trajectory]) -> dict[str, float]:
        at, ppo = self._position, self._config.ppo
        if self._learner.has_critic and not at.warm and at.warmups < ppo.warmup_collections:
            metrics = self._learner.warmup(trajectories)
            at.warmups += 1
            at.warm = bool(metrics.get("critic/warm", 0.0))
            return metrics | {"ppo/updates": float(at.updates), "rollout/tokens": float(at.tokens)}
        at.warm = True
        metrics = self._learner.update(trajectories)
        for line in self._learner.alarms.lines:
            self._progress.say(line)
        if self._learner.record is not None:
            self._learner.record.save(self._run.learning_path(at.iteration))
        at.updates += 1
        self._parts.policy.weights_changed()
        return metrics | {"ppo/updates": float(at.updates), "rollout/tokens": float(at.tokens)}

    def _save(self, unfinished: dict[str, Any]) -> None:
        """Writes a checkpoint.

        Args:
            unfinished: What the iteration's line will be made of, should a kill come before it is written.
        """
        state: dict[str, Any] = {
            "config": as_tables(self._config),
            "learner": self._learner.state_dict(),
            "reward": self._reward_state,
            "position": asdict(self._position),
            "policy_version": self._parts.policy.policy_version,
            "reference": reference_probe(self._parts.model) if self._config.ppo.kl.needs_reference else None,
            "torch_rng": torch.get_rng_state(),
            "unfinished": unfinished,
        }

        def write(draft: Path) -> None:
            self._parts.model.save(draft)
            self._parts.tokenizer.save_pretrained(draft)
            checkpoint.write_state(draft / STATE, state)

        name = self._run.checkpoint_dir(self._position.iteration).name
        checkpoint.save(self._run.checkpoints, name, write, keep=self._config.checkpoint.keep)

    def _restore(self) -> None:
        last = checkpoint.latest_good(self._run.checkpoints)
        if last is not None:
            state = checkpoint.read_state(last / STATE)
            checkpoint.check_config(last, state, as_tables(self._config))
            self._parts.model.load(last)
            with checkpoint.fitting(last):
                self._learner.load_state_dict(state["learner"])
                self._reward_state = state["reward"]
                self._position = Position(**state["position"])
                self._parts.policy.weights_changed()
                self._parts.policy.policy_version = state["policy_version"]
                torch.set_rng_state(state["torch_rng"])
                self._unfinished = state["unfinished"]
                check_reference(last, state["reference"], self._parts.model)
            self._rewards.check_state(self._reward_state)
        self._run.truncate_metrics(self._position.iteration)
        self._run.move_later_rollouts(self._position.iteration)
        if any(line["iteration"] == self._position.iteration for line in self._run.read_metrics()):
            self._unfinished = None


@contextmanager
def _timed(times: dict[str, float], stage: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        times[stage] = time.monotonic() - start
