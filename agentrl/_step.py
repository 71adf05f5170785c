"""One step of an episode: the message is parsed, its calls are run in order, the turn is scored."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import replace

from agentrl.episode import OVERRUN_S, LiveEpisode, StepRecord
from agentrl.formats import Format
from agentrl.reward.evidence import TurnView
from agentrl.reward.tree import RewardTree, StepScore
from agentrl.tools import Tool, unknown_tool
from agentrl.types import EndReason, Message, Parsed, ParseResult, ToolCall, ToolResult

MAX_MALFORMED = 3
"""Malformed messages in a row that end an episode."""


class Stepper:
    """Steps the episodes of one environment. It changes the episode's records, and tears nothing down."""

    def __init__(
        self, env: object, fmt: Format, tools: Mapping[str, Tool], reward_tree: RewardTree, plain_text_answers: bool
    ) -> None:
        """Makes a stepper.

        Args:
            env: The environment that the tools belong to.
            fmt: How its tool calls are written.
            tools: Its tools by name.
            reward_tree: Its reward.
            plain_text_answers: Whether a message without a call is the answer.
        """
        self._env = env
        self._format = fmt
        self._tools = tools
        self._schemas = tuple(tool.schema for tool in tools.values())
        self._reward_tree = reward_tree
        self._plain_text_answers = plain_text_answers

    def step(self, episode: LiveEpisode, message: str) -> StepRecord:
        """Takes an assistant message.

        Args:
            episode: The running episode.
            message: The message; anything at all.

        Returns:
            What it came to; scored unless it ended in an error.
        """
        start = time.perf_counter()
        text = encodable(message)
        parsed = self._format.parse(message, self._schemas)
        problem = self._problem(parsed)
        calls = parsed.calls if isinstance(parsed, Parsed) else ()
        timings = {"parse": time.perf_counter() - start}
        episode.messages.append(Message("assistant", text, calls))
        record = StepRecord(calls=calls, malformed=problem, timings=timings)
        if calls:
            record = self._run_calls(episode, record)
        elif problem is None:
            record = replace(record, end=EndReason.ANSWERED)
        timings["tools"] = sum(result.duration_s for result in record.results)
        episode.turns.append(TurnView(text, calls, record.results, problem))
        episode.malformed_in_a_row = 0 if problem is None else episode.malformed_in_a_row + 1
        if record.end is None and episode.malformed_in_a_row >= MAX_MALFORMED:
            record = replace(record, end=EndReason.TOO_MANY_MALFORMED)
        if record.end is None and episode.n_turns >= episode.max_turns:
            record = replace(record, end=EndReason.MAX_TURNS)
        record = self._scored(episode, record)
        if record.end is None:
            nudge = () if problem is None else (self._format.render_nudge(problem),)
            record = replace(record, new_messages=nudge or self._format.render_results(record.results))
            episode.messages += record.new_messages
        return record

    def finish(self, episode: LiveEpisode, reason: EndReason, message: str | None) -> StepRecord:
        """Ends the episode from outside.

        Args:
            episode: The running episode.
            reason: Why it ends.
            message: A message that was cut before it could be acted on; counted as a turn.

        Returns:
            What it came to; scored unless the reason is an error.
        """
        if message is not None:
            text = encodable(message)
            episode.messages.append(Message("assistant", text))
            episode.turns.append(TurnView(text))
        error = f"the episode was ended from outside as {reason}." if reason.is_error else None
        return self._scored(episode, StepRecord(end=reason, error=error, timings={}))

    def _problem(self, parsed: ParseResult) -> str | None:
        if not isinstance(parsed, Parsed):
            return parsed.problem
        if parsed.calls or self._plain_text_answers:
            return None
        return f"The message makes no tool call. Call one of: {', '.join(self._tools)}."

    def _run_calls(self, episode: LiveEpisode, record: StepRecord) -> StepRecord:
        results: list[ToolResult] = []
        end: EndReason | None = None
        error: str | None = None
        for call in record.calls:
            tool = self._tools.get(call.name)
            if tool is None:
                results.append(unknown_tool(call.name, self._tools))
                continue
            result, error = self._run(episode, tool, call)
            if result is not None:
                results.append(result)
            if error is not None:
                end = EndReason.ENV_ERROR
            elif episode.requested_end is not None:
                end = episode.requested_end
                error = f"the tool {tool.name} ended the episode as {end}." if end.is_error else None
            elif tool.ends and result is not None and result.error_kind is None:
                end = EndReason.SUBMITTED
            if end is not None:
                break
        return replace(record, results=tuple(results), end=end, error=error)

    def _run(self, episode: LiveEpisode, tool: Tool, call: ToolCall) -> tuple[ToolResult | None, str | None]:
        """The boundary to an environment's tools: what they raise, but for ToolError, is the environment's fault."""
        try:
            result = tool.call(self._env, call.arguments)
        except Exception:  # noqa: BLE001
            return None, traceback.format_exc()
        if tool.mutates and result.error_kind != "bad_arguments":
            episode.world_version += 1
        if result.duration_s > tool.deadline_s + OVERRUN_S:
            return result, (
                f"the tool {tool.name} ran for {result.duration_s:.1f} s and its deadline is {tool.deadline_s:g} s:"
                " do its work in a Worker or a sandbox, where it is stopped in time."
            )
        return result, None

    def _scored(self, episode: LiveEpisode, record: StepRecord) -> StepRecord:
        """The boundary to components and evidence: what they raise makes the end a VERIFIER_ERROR."""
        if record.end is not None and record.end.is_error:
            return record
        start = time.perf_counter()
        episode.end = record.end
        try:
            scores = [self._score(episode)]
            if scores[0].catastrophe is not None and scores[0].value is not None and episode.end is None:
                episode.end = EndReason.FORBIDDEN
                scores.append(self._score(episode))
            if episode.end is not None and scores[-1].value is not None:
                episode.ledger = self._reward_tree.final(episode.end, episode.evidence_record or None)
        except Exception:  # noqa: BLE001
            return error_record(record, EndReason.VERIFIER_ERROR, traceback.format_exc())
        last = scores[-1]
        spent = {f"reward/{name}": s for score in scores for name, s in score.durations.items()}
        timings = {**record.timings, "reward": time.perf_counter() - start, **spent}
        record = replace(record, ledger=last.ledger or scores[0].ledger, timings=timings)
        if last.value is None:
            error = "\n".join([f"unscored: {last.unscored}", *episode.faults])
            return replace(error_record(record, EndReason.VERIFIER_ERROR, error), unscored=last.unscored)
        reward = float(sum(score.value or 0.0 for score in scores))
        return replace(record, reward=reward, end=episode.end, success=last.success)

    def _score(self, episode: LiveEpisode) -> StepScore:
        end = episode.end
        return self._reward_tree.step(episode, ended=end is not None, bootstraps=end is not None and end.bootstraps)


def error_record(record: StepRecord, end: EndReason, error: str) -> StepRecord:
    """The record of a step that ended in an error: no reward, nothing to be shown.

    Args:
        record: The record so far.
        end: Which error.
        error: What went wrong.
    """
    return replace(record, end=end, error=error, reward=0.0, success=None, new_messages=())


def encodable(text: str) -> str:
    """The text with `?` in the place of characters that UTF-8 has no bytes for."""
    return text.encode("utf-8", "replace").decode()
