"""An episode once more: a fresh world, the recorded messages, and every answer compared with the recorded one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from agentrl._store import EpisodeFolder
from agentrl.env import ToolEnv
from agentrl.episode import StepRecord
from agentrl.errors import RunError, UsageError
from agentrl.replay.compare import Difference, differences
from agentrl.replay.rewards import ends_apart
from agentrl.replay.world import World, evaluation_world, run_world
from agentrl.run import RunDir, find_episode
from agentrl.types import JSON, EndReason, Message, ToolCall, ToolResult, Trajectory, Turn

_TIMED = frozenset({"duration_s", "timings"})
"""Fields that two equal runs may differ in."""


_OF_THE_BATCH = frozenset({"raw", "trained", "batch"})
"""Fields of a ledger that a batch node wrote, once the collection was whole."""


@dataclass(frozen=True, slots=True)
class EpisodeReplay:
    """What came of executing an episode once more.

    Attributes:
        id: The episode's.
        folder: Where it was found.
        turns: Messages that were said again.
        compared: Values that were compared.
        differences: Where it went another way, in the order of the episode.
        warnings: What is known to be other than it was, or could not be compared.
    """

    id: str
    folder: Path
    turns: int
    compared: int
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.differences

    def as_dict(self) -> dict[str, JSON]:
        """JSON-able."""
        return {
            "id": self.id,
            "folder": str(self.folder),
            "turns": self.turns,
            "compared": self.compared,
            "ok": self.ok,
            "differences": [difference._asdict() for difference in self.differences],
            "warnings": list(self.warnings),
        }


def replay_episode(run: RunDir | Path | str, episode: str) -> EpisodeReplay:
    """Executes the recorded messages of an episode in a fresh world, and compares all that comes back.

    Compared are the opening, each turn's calls, results, complaint, reward and ledger entry, the end, the final ledger
    with its evidence, and the success. Durations are not.

    Args:
        run: A run, its folder, or a folder of episodes in or outside a run (an evaluation's).
        episode: The episode's id, or a part of it that no other has.

    Raises:
        UsageError: If there are no episodes, or none or several fit.
        RunError: If the episode's record is damaged.
        RegistryError: If its environment is not installed here.
    """
    path = run.path if isinstance(run, RunDir) else Path(run)
    folder, record = find_episode(path, episode, "agentrl replay {folder} --episode {episode}")
    trajectory = _trajectory(folder, record["id"])
    world = _world(folder)
    env = world.make()
    try:
        again = _Again(env, trajectory)
        again.go()
    finally:
        env.close()
    notes = (*world.warnings, *again.notes)
    return EpisodeReplay(trajectory.id, folder.path, again.turns, again.compared, tuple(again.differences), notes)


class _Again:
    """An episode that is executed again, and what came of it."""

    def __init__(self, env: ToolEnv, trajectory: Trajectory) -> None:
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.compared = 0
        self.turns = 0
        self._env = env
        self._trajectory = trajectory

    def go(self) -> None:
        """Runs the whole episode. The boundary to the environment: what it raises now is where it differs."""
        try:
            self._go()
        except Exception as error:  # noqa: BLE001
            if self._trajectory.end is EndReason.ENV_ERROR and self.turns == len(self._trajectory.turns):
                self.notes.append(f"the environment broke again: {type(error).__name__}: {error}")
                return
            where = f"turn {self.turns}" if self.turns else "the opening or turn 0"
            self.differences.append(Difference(where, "an answer", f"it raised {type(error).__name__}: {error}"))

    def _go(self) -> None:
        env, trajectory = self._env, self._trajectory
        env.reset(seed=trajectory.seed, options={"task": trajectory.task})
        self._compare("the opening", [_message(m) for m in trajectory.opening], [_message(m) for m in env.messages])
        last = len(trajectory.turns) - 1
        for k, turn in enumerate(trajectory.turns):
            if env.end is not None:
                self.differences.append(Difference(f"turn {k}", turn.text, f"the episode had ended as {env.end}"))
                return
            found = self._take(turn)
            if k == last and env.end is None and ends_apart(trajectory):
                found = _merged(found, self._finished(trajectory.end))
            self._compare_turn(k, turn, found)
            self.turns += 1
        if not trajectory.turns and ends_apart(trajectory):
            self._finished(trajectory.end)
        self._compare_end()

    def _take(self, turn: Turn) -> StepRecord:
        if turn.finish_reason == "length":
            # The cap cut the message: nobody acted on it, and only the rollout knew which cap it was.
            end = self._trajectory.end
            self._env.finish(end if end is EndReason.CONTEXT_FULL else EndReason.MAX_TOKENS, turn.text)
        else:
            self._env.step(turn.text)
        return self._env.last_step

    def _finished(self, end: EndReason) -> StepRecord:
        self._env.finish(end)
        return self._env.last_step

    def _compare_turn(self, k: int, turn: Turn, found: StepRecord) -> None:
        pairs = {
            "calls": ([_fields(call) for call in turn.calls], [_fields(call) for call in found.calls]),
            "results": ([_fields(result) for result in turn.results], [_fields(result) for result in found.results]),
            "malformed": (turn.malformed, found.malformed),
            "reward": (self._earned(k, turn), found.reward),
            "ledger": (turn.ledger, found.ledger),
        }
        for name, (recorded, came) in pairs.items():
            self._compare(f"turn {k}, {name}", recorded, came)

    def _earned(self, k: int, turn: Turn) -> float:
        """What a turn earned by itself, where a batch node made something else of it for training."""
        raw = (self._trajectory.ledger or {}).get("raw")
        return turn.reward if raw is None else raw[k]

    def _compare_end(self) -> None:
        env, trajectory = self._env, self._trajectory
        if trajectory.end.is_error and env.end is None:
            self.notes.append(
                f"the episode ended as {trajectory.end}, which came from outside its messages: only they were compared."
            )
            return
        self._compare("the end", str(trajectory.end), "it goes on" if env.end is None else str(env.end))
        self._compare("success", trajectory.success, env.success)
        ledger = trajectory.ledger
        if ledger is not None and "batch" in ledger:
            self.notes.append("its trained rewards follow from the whole collection: replay its iteration for them.")
            ledger = {key: value for key, value in ledger.items() if key not in _OF_THE_BATCH}
        self._compare("the ledger", ledger, env.ledger)

    def _compare(self, where: str, recorded: JSON, found: JSON) -> None:
        self.compared += 1
        self.differences += differences(recorded, found, where, _TIMED)


def _merged(turn: StepRecord, end: StepRecord) -> StepRecord:
    """What the end earns without a message of its own is earned by the last message."""
    ledger = end.ledger if turn.ledger is None else turn.ledger
    return dataclasses.replace(turn, reward=turn.reward + end.reward, ledger=ledger)


def _message(message: Message) -> JSON:
    return {"role": message.role, "content": message.content}


def _fields(value: ToolCall | ToolResult) -> JSON:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _trajectory(folder: EpisodeFolder, episode: str) -> Trajectory:
    try:
        return next(t for t in folder.trajectories() if t.id == episode)
    except (KeyError, TypeError, ValueError, OSError, StopIteration) as error:
        raise RunError(
            f"episode {episode} in {folder.path} cannot be read ({type(error).__name__}: {error}): a file is damaged."
        ) from error


def _world(folder: EpisodeFolder) -> World:
    run = next((RunDir.open(path) for path in folder.path.resolve().parents if RunDir.is_run(path)), None)
    world = evaluation_world(folder, run)
    if world is not None:
        return world
    if run is None:
        raise UsageError(
            f"{folder.path} lies in no run, and has no request.json of an evaluation: nothing says which environment"
            " its episodes are of. Give the run's folder."
        )
    return run_world(run)
