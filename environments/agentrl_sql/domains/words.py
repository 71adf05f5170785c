"""Word lists that several domains share."""

from __future__ import annotations

_FIRST_NAMES = """
Alma Anna Ben Bruno Carl Clara Cora David Dina Elsa Emma Enzo Felix Finn Gina Greta Hans Hugo Ida Iris Ivan Jan Jon
Karin Kira Lars Leo Lina Maria Mia Nils Nina Noah Olga Otto Paul Petra Ravi Rosa Sam Sara Tara Tom Uwe Vera Viktor
Wanda Will Yara Zoe
"""

CITIES = ("Oslo", "Rome", "Lima", "Paris", "Cairo", "Delhi", "Quito")

COUNTRIES = ("Norway", "Italy", "Peru", "France", "Egypt", "India", "Japan")

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_ADJECTIVES = "Blue Cold Dark Early Golden Hidden Last Open Quiet Red Silver White"

_NOUNS = "Bridge Coast Dream Forest Garden House Island Letter Night River Storm Winter"


def people() -> tuple[str, ...]:
    """First names."""
    return split(_FIRST_NAMES)


def titles(start: int) -> tuple[str, ...]:
    """36 titles of two words, such as those of books; each start in 0..3 gives others."""
    pairs = [
        f"{adjective} {noun}"
        for i, adjective in enumerate(split(_ADJECTIVES))
        for j, noun in enumerate(split(_NOUNS))
        if (i + j) % 4 == start
    ]
    return tuple(pairs)


def split(words: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(words.split())
