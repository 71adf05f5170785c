"""What a codec checks when it is made: that the model is trained on exactly the tokens that it sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.errors import TemplateError
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.rollout.codec import Codec

_AWKWARD = ' "x" & <y>\t{{ z }}\r\n\n naïve Ωμέγα 日本 🎲 1234567  .\n'
_APPEND_ONLY = (
    "Set tokenizer.chat_template to one that only appends (ChatML does; or this one without the lines that cut earlier"
    " messages), and train on that."
)


def _conversation(thought: str) -> list[Message]:
    return [
        Message("system", "You use tools." + _AWKWARD),
        Message("user", _AWKWARD + "A question."),
        Message("assistant", f"{thought}I look it up."),
        Message("tool", "1 row" + _AWKWARD, name="look_up"),
        Message("tool", "2 rows", name="look_up"),
        Message("assistant", f"{thought}```sql\nSELECT 1\n```"),
        Message("user", "That could not be read."),
        Message("assistant", f"{thought}Once more."),
        Message("tool", _AWKWARD, name="look_up"),
        Message("assistant", f"{thought}It is 1."),
    ]


def no_single_stop(codec: Codec, ids: object) -> TemplateError:
    """The error for a template that does not end assistant messages with one token."""
    found = repr(codec.tokenizer.decode(ids)) if isinstance(ids, list) and ids else "nothing"
    return TemplateError(
        "expected the chat template to print one token right after an assistant message, the one that ends it; found"
        f" {found}. Set tokenizer.chat_template to one that ends messages with a special token, as ChatML does."
    )


def check_stop(codec: Codec, end_ids: frozenset[int]) -> None:
    """Checks that what the template prints after an assistant message is what the model ends its messages with.

    Raises:
        TemplateError: If it is another token.
    """
    if codec.stop_id in end_ids:
        return
    names = ", ".join(repr(codec.tokenizer.decode([k])) for k in sorted(end_ids)) or "none"
    raise TemplateError(
        f"the chat template ends assistant messages with {codec.tokenizer.decode([codec.stop_id])!r} (token"
        f" {codec.stop_id}), but the end tokens of the model are {names}: it would not stop where its turn ends. Use"
        " the chat template that the model was trained with, or name the token in generation_config.eos_token_id (and"
        " tokenizer.eos_token) if the model does emit it."
    )


def check_contents(codec: Codec) -> None:
    """Checks that contents survive the tokenizer, and that special tokens in them stay text.

    Raises:
        TemplateError: If some text comes back changed, or turns into a special token.
    """
    tokenizer = codec.tokenizer
    special = {*codec.stop_ids, *tokenizer.all_special_ids}
    for text in (_AWKWARD, *(f"a{tokenizer.decode([k])}b" for k in sorted(special))):
        ids = codec.encode_content(text)
        if not special.isdisjoint(ids):
            raise TemplateError(
                f"the tokenizer turns the text {text!r} into a special token although it was told to split those: a"
                " tool's output could end the model's turn. Load the fast tokenizer of this model, with its end token"
                " marked as special."
            )
        back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if back != text:
            raise TemplateError(
                f"the tokenizer does not give back the text that it was given: expected {text!r}, found {back!r}."
                " Observations would reach the model changed. Use a byte-level tokenizer without normalisation."
            )


def check_conversations(codec: Codec) -> None:
    """Checks at every turn of a plain conversation, and of one with thinking, that appending gives what is printed.

    Raises:
        TemplateError: If the template rewrites what it printed before, or prints anything that appending does not.
    """
    for thought in ("", "<think>\nWhy?\n</think>\n\n"):
        _check_conversation(codec, _conversation(thought), "the thinking in " if thought else "")


def _check_conversation(codec: Codec, messages: Sequence[Message], what: str) -> None:
    ids: list[int] = []
    printed = ""
    start = 0
    for k, message in enumerate(messages):
        if message.role != "assistant":
            continue
        new = messages[start:k]
        ids += codec.opening(new) if start == 0 else codec.between(new)
        expected = codec.render(messages[:k], generate=True)
        if not expected.startswith(printed):
            raise TemplateError(
                f"the chat template rewrites {what}earlier turns once later ones follow{_differ(printed, expected)}:"
                f" the model would be trained on other text than it saw. {_APPEND_ONLY}"
            )
        _compare(codec, ids, expected)
        ids += codec.encode_reply(message.content)
        printed = codec.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        start = k + 1
    whole = codec.render(messages, generate=False)
    if not whole.startswith(printed):
        raise TemplateError(
            f"the chat template prints {what}an assistant message otherwise than it was generated"
            f"{_differ(printed, whole)}. {_APPEND_ONLY}"
        )


def _compare(codec: Codec, ids: list[int], expected: str) -> None:
    found = codec.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if found != expected:
        raise TemplateError(
            "a conversation that is put together turn by turn is not what the chat template prints for the whole"
            f"{_differ(expected, found)}: the template looks into contents or rewrites them. {_APPEND_ONLY}"
        )


def _differ(expected: str, found: str) -> str:
    pairs = zip(expected, found, strict=False)
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    start = max(at - 24, 0)
    return f" (after {expected[start:at]!r}: expected {expected[at : at + 32]!r}, found {found[at : at + 32]!r})"
