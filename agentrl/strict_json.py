"""The JSON that models may write: a value that every tool can take, or a message that tells what to mend."""

from __future__ import annotations

import json
import math

from agentrl.types import JSON

_MAX_DEPTH = 64
_MAX_DIGITS = 20
_MAX_INT = 2**63


class BadJSONError(ValueError):
    """Text that is not JSON, or JSON that is not taken here; the message tells the model what to mend."""


def _integer(digits: str) -> int:
    # The length is looked at first, because converting digits takes time quadratic in their number.
    if len(digits) > _MAX_DIGITS or not -_MAX_INT <= int(digits) < _MAX_INT:
        raise BadJSONError("an integer is beyond 64 bits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadJSONError("a number is too large")
    return value


def _constant(word: str) -> float:
    raise BadJSONError(f"{word} is not a JSON number")


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise BadJSONError("an object has the same key twice")
    return made


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant, strict=False
)


def read_json(text: str, start: int = 0) -> tuple[JSON, int]:
    """Reads the JSON value that starts at a position: no NaN, no key twice, 64-bit integers, limited depth.

    Line breaks inside strings are taken, because models write them.

    Args:
        text: Text with a JSON value in it.
        start: Where the value starts.

    Returns:
        The value, and the position after it.

    Raises:
        BadJSONError: If there is no such value.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise BadJSONError(f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos - start}") from None
    except RecursionError:
        raise BadJSONError("it is nested too deep") from None
    _check(value)
    return value, end


def _check(value: JSON) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: list[JSON] = []
        for item in level:
            if isinstance(item, str):
                if not is_unicode(item):
                    raise BadJSONError("a string holds half of a surrogate pair, which is no character")
            elif isinstance(item, list):
                below += item
            elif isinstance(item, dict):
                below += item.keys()
                below += item.values()
        if not below:
            return
        level = below
    raise BadJSONError("it is nested too deep")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can carry the text: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: JSON) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    kinds = ((bool, "a boolean"), (int, "an integer"), (float, "a number"), (str, "a string"), (list, "an array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "an object")
