"""A program that kills runs at named moments, resumes them, and leaves all of them for a test to compare.

    python resume_phases.py FOLDER

makes FOLDER/whole/run without interruption, and FOLDER/PHASE/run, killed in that phase by SIGKILL and then resumed.
It forks, so that the heavy packages are imported once; torch has one thread and has done no work before a fork.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

LAST = 4
"""The last iteration, with a checkpoint and an evaluation; the checkpoint before it is that of iteration 2."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """Makes one call the last thing that the process does."""

    def __init__(self) -> None:
        self.iteration = 0

    def follow(self) -> None:
        """Keeps count of iterations."""
        from agentrl.train.loop import Loop

        iterate = Loop._iterate

        def counted(loop: Any) -> Any:
            self.iteration = loop._position.iteration + 1
            return iterate(loop)

        Loop._iterate = counted

    def at(
        self,
        owner: Any,
        name: str,
        iteration: int,
        *,
        call: int = 1,
        after: bool = False,
        when: Callable[..., bool] = lambda *_, **__: True,
        last_words: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        """Replaces a function by one that kills the process at its `call`-th call in an iteration."""
        original = getattr(owner, name)
        calls = 0

        def replaced(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if self.iteration == iteration and when(*args, **kwargs):
                calls += 1
                if calls == call and not after:
                    last_words(*args, **kwargs)
                    die()
                if calls == call:
                    original(*args, **kwargs)
                    die()
            return original(*args, **kwargs)

        setattr(owner, name, replaced)


def phases(kill: Killer) -> dict[str, Callable[[], None]]:
    from agentrl import _files, _store, evaluate
    from agentrl.env import ToolEnv
    from agentrl.learner import checkpoint, ppo
    from agentrl.learner.minibatch import Objective
    from agentrl.learner.model import ActorCritic
    from agentrl.learner.optim import Optimizer
    from agentrl.learner.record import UpdateRecord
    from agentrl.learner.sft import SftTrainer
    from agentrl.run import RunDir

    def half(path: Path, state: Any) -> None:
        checkpoint_bytes = b"half of a training state"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(checkpoint_bytes)

    def torn(file: Any, data: bytes) -> None:
        with file._path.open("ab") as raw:
            raw.write(data[: len(data) // 2])

    def is_metrics(file: Any, data: bytes) -> bool:
        return file._path.name == "metrics.jsonl"

    def is_eval(folder: Any, *_: Any) -> bool:
        return "evals" in folder.path.parts

    def is_draft(path: Path, *_: Any) -> bool:
        return path.name.startswith(".draft-")

    return {
        "SFT step": lambda: kill.at(SftTrainer, "step", 0, call=36),
        "SFT checkpoint": lambda: kill.at(checkpoint, "write_state", 0, call=2, last_words=half),
        "first evaluation": lambda: kill.at(_store.EpisodeFolder, "append", 0, call=2, after=True, when=is_eval),
        "warm-up": lambda: kill.at(Objective, "fit_values", 1, call=3),
        "collecting": lambda: kill.at(ToolEnv, "step", 3, call=3),
        "line of an episode": lambda: kill.at(_files.Appender, "append_record", 3, call=2),
        "packing of tokens": lambda: kill.at(_store.EpisodeFolder, "finish", 3),
        "trained rewards": lambda: kill.at(_store.EpisodeFolder, "rewrite", 3),
        "scoring": lambda: kill.at(ppo, "score", 3),
        "between micro-batches": lambda: kill.at(Objective, "_backward", 3, call=2),
        "between policy and critic": lambda: kill.at(Optimizer, "step", 3, after=True),
        "between minibatches": lambda: kill.at(Objective, "accumulate", LAST, call=3),
        "record of the update": lambda: kill.at(UpdateRecord, "save", LAST, after=True),
        "weights of the checkpoint": lambda: kill.at(ActorCritic, "save", LAST, after=True),
        "state of the checkpoint": lambda: kill.at(checkpoint, "write_state", LAST, last_words=half),
        "before the rename": lambda: kill.at(Path, "rename", LAST, when=is_draft),
        "after the rename": lambda: kill.at(Path, "rename", LAST, after=True, when=is_draft),
        "evaluation": lambda: kill.at(_store.EpisodeFolder, "append", LAST, call=2, after=True, when=is_eval),
        "summary of the evaluation": lambda: kill.at(evaluate.EpisodeFolder, "write_summary", LAST),
        "half a line of metrics": lambda: kill.at(_files.Appender, "append", LAST, when=is_metrics, last_words=torn),
        "whole line of metrics": lambda: kill.at(RunDir, "append_metrics", LAST, after=True),
        "last evaluation": lambda: kill.at(
            _store.EpisodeFolder,
            "append",
            LAST,
            call=2,
            when=lambda folder, *_: folder.path.name.startswith("ppo-"),
        ),
        "result": lambda: kill.at(RunDir, "write_result", LAST),
    }


def _forked(work: Callable[[], object]) -> int:
    """Runs work in a fork, and gives its exit status as `os.waitpid` does."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 (the boundary of the fork)
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(folder: Path) -> None:
    from words_run import words_config

    from agentrl.progress import stderr_console
    from agentrl.train import train

    def go(name: str) -> None:
        train(words_config(folder / name), resume=True, console=stderr_console())

    def go_and_die(name: str) -> None:
        kill = Killer()
        kill.follow()
        phases(kill)[name]()
        go(name)

    assert _forked(lambda: go("whole")) == 0
    for name in phases(Killer()):
        if name not in {"SFT step", "SFT checkpoint"}:
            # The same start for all: it ends where SFT does.
            for part in ("config.json", "manifest.json", "model", "demonstrations", "sft"):
                source, target = folder / "whole" / "run" / part, folder / name / "run" / part
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        status = _forked(lambda name=name: go_and_die(name))
        assert os.WIFSIGNALED(status), f"{name}: the run was not killed: status {status}"
        assert _forked(lambda name=name: go(name)) == 0, name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
