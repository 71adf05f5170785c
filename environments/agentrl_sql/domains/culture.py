"""Domains about books, pictures, films and music."""

from __future__ import annotations

from agentrl_sql.domains.spec import amount, day, domain, label, measure, ordinal, real, ref, table, word
from agentrl_sql.domains.words import CITIES, COUNTRIES, WEEKDAYS, people, split, titles

LIBRARY = domain(
    "library",
    table(
        "author", "authors", (8, 14),
        label("name", people()),
        word("country", *COUNTRIES),
        ordinal("birth_year", 1900, 1990),
    ),
    table(
        "book", "books", (16, 28),
        label("title", titles(0)),
        ref("author", nullable=True),
        word("genre", "crime", "drama", "poetry", "travel", "history", "fantasy"),
        amount("pages", 80, 600, 10),
        ordinal("year", 1950, 2020),
    ),
    table(
        "reader", "readers", (10, 18),
        label("name", people()),
        word("city", *CITIES),
        measure("age", 8, 80, 2, nullable=True),
    ),
    table(
        "loan", "loans", (24, 40),
        ref("book"),
        ref("reader"),
        amount("days", 1, 40),
        real("fine", 0.5, 9, nullable=True),
    ),
)  # fmt: skip

MUSEUM = domain(
    "museum",
    table(
        "artist", "artists", (8, 14),
        label("name", people()),
        word("country", *COUNTRIES),
        ordinal("birth_year", 1600, 1960),
    ),
    table(
        "gallery", "galleries", (8, 10),
        label("name", split(
            "Arch Atrium Cellar Chapel Court Dome Grotto Ivory Loft Marble Mosaic Nave North South Vault"
        )),
        word("wing", "east", "west", "old", "new"),
        ordinal("floor", 0, 4),
    ),
    table(
        "painting", "paintings", (18, 32),
        label("title", titles(1)),
        ref("artist", nullable=True),
        ref("gallery", nullable=True),
        word("style", "baroque", "cubist", "modern", "realist", "romantic"),
        ordinal("year", 1650, 1990),
        amount("value", 10, 900, 10, nullable=True),
        measure("height", 20, 240, 2),
    ),
)  # fmt: skip

CINEMA = domain(
    "cinema",
    table(
        "film", "films", (12, 24),
        label("title", titles(2)),
        word("genre", "action", "comedy", "drama", "horror", "western"),
        measure("minutes", 75, 190),
        real("rating", 1, 10, role="measure", nullable=True),
    ),
    table(
        "screen", "screens", (8, 10),
        label("name", split("Apollo Astra City Delta Globe Luna Orion Palace Pluto Regal Rex Roxy Star Titan Vega")),
        word("sound", "stereo", "mono", "surround"),
        amount("seats", 40, 300, 10),
    ),
    table(
        "showing", "showings", (24, 40),
        ref("film"),
        ref("screen"),
        word("weekday", *WEEKDAYS),
        real("price", 5, 16),
        amount("sales", 0, 120, 4, nullable=True),
    ),
)  # fmt: skip

MUSIC = domain(
    "music",
    table(
        "band", "bands", (8, 14),
        label("name", split(
            "Amber Arrow Basalt Comet Copper Crow Ember Falcon Fjord Frost Glass Granite Harbor Lynx Mango Meadow"
            " Nebula Orbit Otter Pepper Quartz Raven Signal Velvet"
        )),
        word("style", "jazz", "rock", "folk", "soul", "metal"),
        word("country", *COUNTRIES),
        ordinal("year", 1960, 2020),
    ),
    table(
        "album", "albums", (12, 24),
        label("title", titles(3)),
        ref("band"),
        ordinal("release", 1970, 2024),
        amount("copies", 5, 900, 15, nullable=True),
    ),
    table(
        "song", "songs", (24, 40),
        ref("album", nullable=True),
        word("mood", "calm", "happy", "sad", "wild"),
        measure("seconds", 90, 400, 5),
        amount("plays", 5, 995, 5),
    ),
    table(
        "concert", "concerts", (16, 28),
        ref("band"),
        word("city", *CITIES),
        day("date", 2021, 2024),
        amount("visitors", 50, 990, 10),
    ),
)  # fmt: skip
