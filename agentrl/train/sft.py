"""The supervised part of a run: the model that it starts from, its demonstrations, and fine-tuning on them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from agentrl.config import RunConfig, SftConfig, TinyModel
from agentrl.learner import checkpoint
from agentrl.learner.sft import SftTrainer
from agentrl.learner.tiny import make_tiny_model
from agentrl.progress import Progress
from agentrl.run import RunDir
from agentrl.train.parts import Parts, collect_demonstrations, environment_factory
from agentrl.train.tasks import TaskStream, requests_for
from agentrl.types import Trajectory

STATE = Path("trainer") / "state.pt"
"""Where in a checkpoint the trainer's state is."""


def starting_model(config: RunConfig, run: RunDir, progress: Progress) -> str:
    """The folder or name that the run's model is loaded from; makes the tiny one where that is asked for.

    The tokenizer of a tiny model is trained on the episodes of the first tasks that the run trains on.
    """
    if config.model.tiny is None:
        return str(config.model.path)
    folder = run.model_dir
    if not (folder / checkpoint.MANIFEST).exists():
        tiny = config.model.tiny
        episodes = _corpus(config, tiny, progress)
        prompts = [episode.opening[0].content for episode in episodes]
        texts = [text for episode in episodes for text in _texts(episode)]

        def write(draft: Path) -> None:
            make_tiny_model(prompts, texts, tiny, config.seed, draft)

        checkpoint.save(folder.parent, folder.name, write, keep=1)
    return str(folder)


def _corpus(config: RunConfig, tiny: TinyModel, progress: Progress) -> list[Trajectory]:
    make = environment_factory(config, None)
    env = make()
    tasks = TaskStream(env.tasks("train"), config.seed).take(0, tiny.corpus_tasks)
    env.close()
    requests = requests_for(tasks, 1, "corpus", config.seed)
    with progress.stage("tokenizer text", len(tasks)) as stage:
        return collect_demonstrations(config, make, None, requests, lambda _: stage.advance())


def _texts(episode: Trajectory) -> Iterator[str]:
    yield from (message.content for message in episode.opening[1:])
    for turn in episode.turns:
        yield turn.text
        yield from (result.content for result in turn.results)


def demonstrations(
    config: RunConfig, sft: SftConfig, run: RunDir, parts: Parts, progress: Progress
) -> list[Trajectory]:
    """The fixed set of demonstrations, from the run directory where it is complete, else collected."""
    env = parts.make()
    tasks = TaskStream(env.tasks("train"), config.seed).take(0, sft.episodes)
    env.close()
    requests = requests_for(tasks, 1, "sft", config.seed)
    with run.demonstrations() as folder:
        done = {t.id for t in folder.trajectories()}
        missing = [request for request in requests if request.id not in done]
        with progress.stage("demonstrations", len(requests)) as stage:
            stage.advance(len(requests) - len(missing))

            def keep(trajectory: Trajectory) -> None:
                folder.append(trajectory)
                stage.advance()

            if missing:
                collect_demonstrations(config, parts.make, parts.codec, missing, keep)
    return [t for t in run.demonstrations().trajectories() if t.end.in_loss]


def fine_tune(config: RunConfig, run: RunDir, parts: Parts, progress: Progress) -> None:
    """Brings the policy to the end of SFT, from the last checkpoint of it where there is one.

    Without an `sft` section nothing is done.
    """
    if config.sft is None:
        return
    sft = config.sft
    trainer = SftTrainer(parts.model, config)
    last = checkpoint.latest_good(run.sft_dir)
    if last is not None:
        parts.model.load(last)
        trainer.load_state_dict(checkpoint.read_state(last / STATE))
    if trainer.batches < sft.steps:
        episodes = demonstrations(config, sft, run, parts, progress)
        with progress.stage("SFT", sft.steps) as stage:
            stage.advance(trainer.batches)
            while trainer.batches < sft.steps:
                metrics = trainer.step(trainer.next_batch(episodes))
                run.append_sft_metrics(trainer.batches, metrics)
                stage.advance(loss=metrics["loss/sft"])
                if trainer.batches % sft.checkpoint_every == 0 or trainer.batches == sft.steps:
                    _save(run, parts, trainer)
    parts.policy.weights_changed()


def continue_sft(
    config: RunConfig, sft: SftConfig, run: RunDir, parts: Parts, seconds: float, progress: Progress
) -> int:
    """Goes on with SFT from its end, on the same demonstrations, for a given time.

    Args:
        config: The run's.
        sft: Its `sft` section.
        run: The run.
        parts: A policy of its own, which is changed.
        seconds: Wall time.
        progress: Shows how far it is.

    Returns:
        Steps taken.
    """
    trainer = SftTrainer(parts.model, config)
    last = checkpoint.latest_good(run.sft_dir)
    if last is not None:
        parts.model.load(last)
        trainer.load_state_dict(checkpoint.read_state(last / STATE))
    episodes = demonstrations(config, sft, run, parts, progress)
    first, start = trainer.batches, time.monotonic()
    with progress.stage("SFT continued", round(seconds)) as stage:
        said = 0
        while (elapsed := time.monotonic() - start) < seconds:
            metrics = trainer.step(trainer.next_batch(episodes))
            stage.advance(round(elapsed) - said, loss=metrics["loss/sft"])
            said = round(elapsed)
    parts.policy.weights_changed()
    return trainer.batches - first


def _save(run: RunDir, parts: Parts, trainer: SftTrainer) -> None:
    def write(draft: Path) -> None:
        parts.model.save(draft)
        parts.tokenizer.save_pretrained(draft)
        checkpoint.write_state(draft / STATE, trainer.state_dict())

    checkpoint.save(run.sft_dir, f"{trainer.batches:06d}", write, keep=0)
