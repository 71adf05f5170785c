"""The token bridge: messages in, token ids out, and no text is ever tokenised a second time.

A chat template is a program over whole conversations. The codec learns from it, once for each sequence of roles, what
it prints around contents: stand-ins take the place of contents, and the print is split at them. What the template
itself prints is encoded with special tokens; contents are encoded with special tokens split, so that a table cell which
holds `<|im_end|>` stays text. Earlier turns are never rendered again: an episode's ids are the opening and then, by
turns, the ids that were sampled and what the template puts between turns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError as JinjaError

from agentrl.errors import TemplateError
from agentrl.rollout import _probe
from agentrl.rollout.messages import as_users
from agentrl.types import Message

ToolRole = Literal["auto", "tool", "user"]

_MARK = "agentrl5d1e0c7a9b"
_EDGE = " \t "  # white space that no template prints by itself: whether it survives tells whether contents are trimmed
_STAND_IN = re.compile(rf"({_EDGE})?{_MARK}(content|name)(\d+)end({_EDGE})?")
_KNOWS_TOOLS = re.compile(r"""['"](tool|tool_response|ipython)['"]""")


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place in a print where a message's content or name stands, and on which sides it keeps its white space."""

    message: int
    field: str
    keeps_left: bool
    keeps_right: bool

    def fill(self, messages: Sequence[Message]) -> str:
        message = messages[self.message]
        text = message.content if self.field == "content" else message.name or ""
        text = text if self.keeps_left else text.lstrip()
        return text if self.keeps_right else text.rstrip()


class Codec:
    """Encodes and decodes what a chat template prints; checked when it is made, usable from several threads.

    Attributes:
        tokenizer: The tokenizer, as it was given.
        tool_role: The role that tool results are shown under: `tool`, or `user` where the template knows no tools.
        stop_id: The token that the template puts after an assistant message.
        stop_ids: Every token that ends a message of this model.
    """

    def __init__(
        self, tokenizer: Any, tool_role: ToolRole = "auto", eos_ids: int | Iterable[int] | None = None
    ) -> None:
        """Learns the template and checks it.

        Args:
            tokenizer: A transformers tokenizer with a chat template.
            tool_role: `auto` takes `tool` where the template knows that role and keeps its contents, else `user`.
            eos_ids: The tokens that end the model's messages, as its generation config has them; the tokenizer's own
                end token where not given.

        Raises:
            TemplateError: If this template would train on other tokens than the model sees; names the remedy.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "the tokenizer has no chat template: take an instruct model, or set tokenizer.chat_template (ChatML"
                " serves a model that you train yourself) and save the tokenizer beside the model."
            )
        self.tokenizer = tokenizer
        self._encode_template = _encoder(tokenizer, split_special_tokens=False)
        self._encode_content = _encoder(tokenizer, split_special_tokens=True)
        self._layouts: dict[tuple[bool, tuple[tuple[str, bool], ...]], list[list[int] | _Slot]] = {}
        self.tool_role: Literal["tool", "user"] = "user" if tool_role == "auto" else tool_role
        self.stop_id = self._learn_stop()
        self.stop_ids = frozenset({self.stop_id, *_end_ids(tokenizer, eos_ids)})
        _probe.check_stop(self, _end_ids(tokenizer, eos_ids))
        _probe.check_contents(self)
        if tool_role == "auto" and _KNOWS_TOOLS.search(str(tokenizer.chat_template)):
            self.tool_role = "tool"
            try:
                _probe.check_conversations(self)
            except TemplateError:
                self.tool_role = "user"
                self._layouts.clear()
        _probe.check_conversations(self)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation's start, the generation prompt included.

        Args:
            messages: The messages before the first assistant message.

        Returns:
            [T] token ids.
        """
        return self._assemble(messages, after_assistant=False)

    def between(self, messages: Sequence[Message]) -> list[int]:
        """Ids that follow an assistant message's stop token: the rest of its turn, new messages, generation prompt.

        Args:
            messages: What came since the assistant message: tool results, or a user's message.

        Returns:
            [T] token ids.
        """
        return self._assemble(messages, after_assistant=True)

    def decode(self, sampled_ids: Sequence[int]) -> str:
        """Text of an assistant message: without its stop token, any other special token as text.

        Args:
            sampled_ids: [N] ids as they were sampled.

        Returns:
            What the environment reads.
        """
        ids = list(sampled_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_reply(self, text: str) -> list[int]:
        """Ids of an assistant message that somebody else wrote, with the stop token: for demonstrations."""
        return [*self.encode_content(text), self.stop_id]

    def encode_content(self, text: str) -> list[int]:
        """Ids of text in which special tokens stay text. Half surrogate pairs, which are no text, become `?`."""
        return self._encode_content(text.encode("utf-8", "replace").decode())

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        """What the template itself prints for a whole conversation. For checks: no episode's ids are made of it.

        Args:
            messages: The conversation.
            generate: Whether the generation prompt is printed at the end.

        Raises:
            TemplateError: If the template refuses the conversation.
        """
        shown = [message.as_dict() for message in self._shown(messages)]
        try:
            return str(self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=generate))
        except (JinjaError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateError(
                f"the chat template refuses a conversation of the roles {', '.join(m['role'] for m in shown)}:"
                f" {type(error).__name__}: {error}. Expected one that takes a system message and several turns: set"
                " tokenizer.chat_template to such a one, or tool_role='user' if it is the tool role that it refuses."
            ) from error

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages) if self.tool_role == "tool" else as_users(messages)

    def _assemble(self, messages: Sequence[Message], *, after_assistant: bool) -> list[int]:
        shown = self._shown(messages)
        key = (after_assistant, tuple((message.role, message.name is not None) for message in shown))
        if key not in self._layouts:
            self._layouts[key] = self._learn(shown, after_assistant)
        ids: list[int] = []
        for part in self._layouts[key]:
            ids += self.encode_content(part.fill(shown)) if isinstance(part, _Slot) else part
        return ids

    def _learn(self, messages: Sequence[Message], after_assistant: bool) -> list[list[int] | _Slot]:
        before = [Message("system", ""), Message("user", ""), Message("assistant", "")] if after_assistant else []
        parts = self._split([*before, *messages], generate=True)
        if after_assistant:
            at = next(k for k, part in enumerate(parts) if isinstance(part, _Slot) and part.message == 2)
            parts = parts[at + 1 :]
        layout: list[list[int] | _Slot] = []
        for part in parts:
            if isinstance(part, _Slot):
                layout.append(_Slot(part.message - len(before), part.field, part.keeps_left, part.keeps_right))
            else:
                layout.append(self._encode_template(part))
        if after_assistant:
            # The stop token was sampled, or written by encode_reply.
            first = layout[0]
            if isinstance(first, _Slot) or first[:1] != [self.stop_id]:
                raise _probe.no_single_stop(self, first)
            layout[0] = first[1:]
        return layout

    def _split(self, messages: Sequence[Message], *, generate: bool) -> list[str | _Slot]:
        """Renders stand-ins for contents and names; gives text and slots by turns, text first and last."""
        stand_ins = [
            Message(
                message.role,
                f"{_EDGE}{_MARK}content{k}end{_EDGE}",
                name=None if message.name is None else f"{_MARK}name{k}end",
            )
            for k, message in enumerate(messages)
        ]
        printed = self.render(stand_ins, generate=generate)
        parts: list[str | _Slot] = []
        at = 0
        for found in _STAND_IN.finditer(printed):
            is_name = found[2] == "name"
            parts.append(printed[at : found.start()])
            parts.append(_Slot(int(found[3]), found[2], is_name or bool(found[1]), is_name or bool(found[4])))
            at = found.end()
        parts.append(printed[at:])
        contents = [part.message for part in parts if isinstance(part, _Slot) and part.field == "content"]
        if contents != list(range(len(messages))):
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(
                f"the chat template drops, repeats or reorders messages (of the roles {roles}): expected each content"
                " once and in order. Set tokenizer.chat_template to one that prints every message, or tool_role='user'"
                " if it is a tool's message that it drops."
            )
        return parts

    def _learn_stop(self) -> int:
        parts = self._split([Message("system", ""), Message("user", ""), Message("assistant", "")], generate=False)
        ids = self._encode_template(str(parts[-1]))
        if not ids:
            raise _probe.no_single_stop(self, ids)
        return ids[0]


def _end_ids(tokenizer: Any, eos_ids: int | Iterable[int] | None) -> frozenset[int]:
    given = tokenizer.eos_token_id if eos_ids is None else eos_ids
    if given is None:
        return frozenset()
    return frozenset({given} if isinstance(given, int) else given)


def _encoder(tokenizer: Any, *, split_special_tokens: bool) -> Callable[[str], list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(
            tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        )
    # Transformers sets the flag on a shared object at each call, so that two threads would disturb one another.
    own = copy.deepcopy(backend)
    own.no_padding()
    own.no_truncation()
    own.encode_special_tokens = split_special_tokens
    return lambda text: list(own.encode(text, add_special_tokens=False).ids)
