"""Domains about fields, animals and things that travel."""

from __future__ import annotations

from agentrl_sql.domains.spec import amount, day, domain, label, measure, ordinal, real, ref, table, word
from agentrl_sql.domains.words import CITIES, COUNTRIES, people, split

FARM = domain(
    "farm",
    table(
        "field", "fields", (10, 18),
        label("name", split(
            "Alder Barley Beacon Brook Church Creek Crow Dale Ferry Fox Hill Hollow Lower Meadow Mill Moor Oak Orchard"
            " Pond Quarry Raven Ridge Stone Upper Valley Willow"
        )),
        word("soil", "clay", "sand", "peat", "loam", "chalk"),
        real("area", 1, 30),
        measure("slope", 0, 24, 2, nullable=True),
    ),
    table(
        "harvest", "harvests", (26, 40),
        ref("field"),
        word("crop", "wheat", "maize", "oats", "beans", "hops", "flax"),
        ordinal("year", 2010, 2024),
        amount("tons", 2, 80),
        amount("profit", 5, 95, 5, nullable=True),
    ),
)  # fmt: skip

AIRLINE = domain(
    "airline",
    table(
        "airport", "airports", (8, 12),
        label("code", split("ABE AKU BRO CEL DAX DUR ELO FIN GAR HEL ISO JUN KAL LIR MOR NAX OST PIR QUE RAL SOL TUM")),
        word("country", *COUNTRIES),
        amount("gates", 4, 60, 2),
    ),
    table(
        "plane", "planes", (8, 16),
        label("name", split(
            "Albatross Bee Condor Crane Dove Eagle Falcon Finch Gull Hawk Heron Ibis Jay Kite Lark Merlin Osprey Owl"
            " Petrel Plover Raven Robin Starling Stork Swan Swift Tern Wren"
        )),
        word("maker", "Aero", "Borel", "Cirro", "Delta"),
        amount("seats", 20, 400, 20),
        ordinal("year", 1990, 2023),
    ),
    table(
        "pilot", "pilots", (8, 14),
        label("name", people()),
        word("role", "captain", "officer", "trainee"),
        measure("age", 24, 64, 2, nullable=True),
    ),
    table(
        "flight", "flights", (24, 36),
        ref("plane"),
        ref("airport"),
        ref("pilot", nullable=True),
        amount("distance", 100, 2900, 50),
        amount("delay", 0, 90, 5, nullable=True),
    ),
    table(
        "ticket", "tickets", (26, 40),
        ref("flight"),
        word("cabin", "first", "business", "economy"),
        amount("price", 40, 900, 10),
        amount("bags", 0, 4, nullable=True),
    ),
)  # fmt: skip

ZOO = domain(
    "zoo",
    table(
        "keeper", "keepers", (8, 12),
        label("name", people()),
        word("house", "birds", "cats", "fish", "apes", "snakes"),
        real("wage", 12, 30, role="measure"),
    ),
    table(
        "animal", "animals", (16, 28),
        label("name", split(
            "Ajax Balu Bimbo Biscuit Bongo Coco Dodo Dusty Fanta Fuzzy Ginger Honey Jumbo Kiki Koko Lulu Mango Milo"
            " Momo Nemo Pixie Pongo Rex Rusty Simba Socks Taco Tiko Tutu Waldo Yoyo Ziggy"
        )),
        ref("keeper", nullable=True),
        word("species", "lion", "otter", "zebra", "parrot", "gibbon", "python"),
        ordinal("birth_year", 2005, 2024),
        amount("weight", 2, 400, 6, nullable=True),
    ),
    table(
        "feeding", "feedings", (24, 40),
        ref("animal"),
        word("food", "hay", "meat", "fruit", "seeds", "insects"),
        ordinal("hour", 6, 20),
        real("kilos", 0.5, 20),
    ),
)  # fmt: skip

GARAGE = domain(
    "garage",
    table(
        "owner", "owners", (8, 14),
        label("name", people()),
        word("city", *CITIES),
        measure("age", 18, 80, nullable=True),
    ),
    table(
        "car", "cars", (14, 24),
        label("plate", tuple(f"{pair}{n}" for pair in ("AB", "CE", "DK", "FL", "HN", "TR") for n in range(12, 92, 11))),
        ref("owner", nullable=True),
        word("brand", "Alfa", "Dacia", "Honda", "Mazda", "Skoda", "Volvo"),
        ordinal("year", 1995, 2023),
        measure("mileage", 10, 300, 10, nullable=True),
    ),
    table(
        "mechanic", "mechanics", (8, 10),
        label("name", people()),
        word("skill", "engine", "paint", "brakes", "wheels"),
        real("wage", 14, 36, role="measure"),
    ),
    table(
        "repair", "repairs", (24, 40),
        ref("car"),
        ref("mechanic", nullable=True),
        day("date", 2022, 2024),
        amount("hours", 1, 16),
        amount("cost", 40, 900, 20, nullable=True),
    ),
)  # fmt: skip

PORT = domain(
    "port",
    table(
        "ship", "ships", (10, 18),
        label("name", split(
            "Aurora Bella Calypso Dolphin Esther Fortuna Galatea Helena Irene Juno Kestrel Lydia Marina Neptune Odessa"
            " Phoenix Regina Selene Triton Undine Victoria Wave Zephyr"
        )),
        word("flag", "Malta", "Panama", "Greece", "Chile", "Kenya"),
        measure("length", 40, 360, 5),
        ordinal("year", 1975, 2022),
    ),
    table(
        "voyage", "voyages", (16, 26),
        ref("ship"),
        word("sea", "Baltic", "Black", "North", "Red", "Coral"),
        amount("days", 2, 45),
        amount("crew", 6, 40, 2, nullable=True),
    ),
    table(
        "cargo", "cargoes", (24, 40),
        ref("voyage", nullable=True),
        word("goods", "coal", "corn", "salt", "steel", "timber", "wool"),
        amount("tons", 5, 900, 5),
        real("duty", 0, 20, nullable=True),
    ),
)  # fmt: skip
