"""Useful tokens per CPU second of one update: the learner against TRL's PPO and TRL's GRPO.

    python benchmarks/learner_vs_trl.py [--epochs 1] [--repeats 5] [--model FOLDER]

Everybody trains the same model in float32 on the same episodes (lognormal, mean 250 and at most 1024 tokens, a fifth of
them sampled, in several turns), with as many epochs and optimiser steps, on one thread. Useful tokens are the sampled
ones. An update is everything from finished episodes to changed weights: scoring, advantages, forward and backward
passes, optimiser steps. Generation is no part of it. The learner trains a critic of the policy's size; so does TRL's
PPO; TRL's GRPO trains none. TRL's PPO always scores a reference as well: its time is printed also without that pass.

TRL runs in venvs of its own under --cache, made on the first run from PyPI; torch and transformers are this
interpreter's, which both releases accept. Its settings are in `learner_worker.py`; its micro-batches hold --microbatch
rows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import tyro

from benchmarks.learner_worker import Job
from benchmarks.long_tail import LongTail, small_llama, write
from benchmarks.timing import times_as_fast

WORKER = Path(__file__).with_name("learner_worker.py")
NEEDS = ("datasets>=4.7", "pandas", "pyarrow>=21", "multiprocess", "dill", "xxhash", "python-dateutil", "pytz", "six")
"""What TRL imports beside what agentrl's training extra brings; installed without dependencies, torch above all."""
RELEASES = {"trl-ppo": "1.12.0", "trl-grpo": "1.16.0", "trl-grpo-own-width": "1.16.0"}
"""The last release with PPO, and the current one."""


@dataclass(frozen=True)
class Options:
    """What is compared."""

    contestants: tuple[str, ...] = ("agentrl", "agentrl-head", *RELEASES)
    """Which; see learner_worker.py. TRL's GRPO at its own width exists for one epoch."""
    epochs: int = 1
    """Passes over the episodes, each with one optimiser step."""
    repeats: int = 5
    """Rounds, each contestant once."""
    episodes: int = 32
    """Episodes; a multiple of 4 and of --microbatch."""
    model: str | None = None
    """A model's folder, or `smollm2`; a random Llama of 4.3 million parameters where not given."""
    microbatch: int = 8
    """TRL's rows in a forward pass."""
    tokens: int = 2048
    """Our tokens in a forward pass."""
    packing: bool = False
    """Whether we pack several episodes into a line."""
    seed: int = 1
    """Of the episodes."""
    cache: Path = Path("~/.cache/agentrl/benchmarks")
    """Where TRL's venvs are kept."""


class Contestant:
    """A worker process that makes one update each time it is asked."""

    def __init__(self, kind: str, python: Path, job: Path, log: Path) -> None:
        """Starts it."""
        self.kind = kind
        self._log = log
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(python), str(WORKER), kind, str(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
            )

    def update(self) -> dict[str, float]:
        """Asks for one update and waits for its figures."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker has no pipes.")
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            text = self._log.read_text(encoding="utf-8")[-3000:]
            raise RuntimeError(f"{self.kind} ended before its update did:\n{text}")
        found: dict[str, float] = json.loads(answer)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def trl_python(release: str, cache: Path) -> Path:
    """The interpreter of a venv with a TRL release, which is made where it is missing."""
    folder = cache.expanduser() / f"trl-{release}"
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        print(f"making a venv with TRL {release} in {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", f"trl=={release}", *NEEDS]
        subprocess.run(install, check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        shared = folder / "lib" / version / "site-packages" / "shared.pth"
        shared.write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        (folder / "ready").touch()
    return python


def prepare(options: Options, folder: Path) -> tuple[Path, int, int]:
    """Writes model, tokenizer, episodes and job; gives the job's path, the useful tokens and all tokens."""
    if options.model is None:
        from agentrl.config import TinyModel
        from agentrl.learner.tiny import train_tokenizer

        model_folder = folder / "model"
        model = small_llama(4096)
        model.save_pretrained(model_folder)
        train_tokenizer(["a few words"], TinyModel()).save_pretrained(model_folder)
        vocab_size = int(model.config.vocab_size)
    else:
        from agentrl.rollout.load import load_model_and_tokenizer

        model, tokenizer = load_model_and_tokenizer(options.model)
        model_folder, vocab_size = folder / "model", int(model.config.vocab_size)
        model.float().save_pretrained(model_folder)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(model_folder)
    trajectories = LongTail(options.episodes, vocab_size=vocab_size, seed=options.seed).trajectories()
    write(trajectories, folder / "episodes.npz")
    job = Job(
        model=str(model_folder),
        episodes=str(folder / "episodes.npz"),
        epochs=options.epochs,
        microbatch=options.microbatch,
        tokens=options.tokens,
        packing=options.packing,
        seed=options.seed,
        n_episodes=options.episodes,
    )
    path = folder / "job.json"
    path.write_text(json.dumps(job._asdict()), encoding="utf-8")
    return path, sum(t.n_sampled for t in trajectories), sum(t.n_tokens for t in trajectories)


def compete(options: Options, job: Path, folder: Path) -> dict[str, list[dict[str, float]]]:
    """The figures of every contestant by round; the first round warms up and is left out."""
    pythons = {
        kind: trl_python(RELEASES[kind], options.cache) if kind in RELEASES else Path(sys.executable)
        for kind in options.contestants
        if kind != "trl-grpo-own-width" or options.epochs == 1
    }
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in pythons}
    contestants = [Contestant(kind, python, job, folder / f"{kind}.log") for kind, python in pythons.items()]
    try:
        for number in range(options.repeats + 1):
            for contestant in contestants:
                figures = contestant.update()
                if number:
                    found[contestant.kind].append(figures)
    finally:
        for contestant in contestants:
            contestant.__exit__(None, None, None)
    return found


def report(found: Mapping[str, Sequence[Mapping[str, float]]], useful: int) -> dict[str, Any]:
    """Prints a line for each contestant and a ratio for each pair; gives the medians."""
    took_s = {kind: [figures["cpu_s"] for figures in rounds] for kind, rounds in found.items()}
    if any("reference_s" in figures for figures in found.get("trl-ppo", ())):
        without = [figures["cpu_s"] - figures["reference_s"] for figures in found["trl-ppo"]]
        took_s["trl-ppo, reference not counted"] = without
    medians = {kind: statistics.median(times) for kind, times in took_s.items()}
    for kind, median_s in medians.items():
        print(f"{kind:32} {median_s:7.2f} CPU s an update, {useful / median_s:7.0f} useful tokens a CPU second")
    for ours in (kind for kind in took_s if kind.startswith("agentrl")):
        for theirs in (kind for kind in took_s if kind.startswith("trl")):
            print(f"{ours} is {times_as_fast(took_s[theirs], took_s[ours])} as fast as {theirs}")
    return medians


def main(options: Options) -> dict[str, Any]:
    """Runs the comparison."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job, useful, tokens = prepare(options, folder)
        print(
            f"{options.episodes} episodes, {tokens} tokens, {useful} of them sampled; {options.epochs} epoch(s) of one"
            f" optimiser step; torch {torch.__version__}, float32, 1 thread"
        )
        return report(compete(options, job, folder), useful)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
