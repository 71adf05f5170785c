"""Domains where something is bought and sold."""

from __future__ import annotations

from agentrl_sql.domains.spec import amount, day, domain, label, measure, ordinal, real, ref, table, word
from agentrl_sql.domains.words import CITIES, COUNTRIES, people, split

SHOP = domain(
    "shop",
    table(
        "customer", "customers", (10, 18),
        label("name", people()),
        word("city", *CITIES),
        measure("age", 18, 70, 2, nullable=True),
    ),
    table(
        "product", "products", (12, 24),
        label("name", split(
            "ball bell bowl brush candle chair clock cup drum fan fork glove hammer kettle kite knife ladder lamp mat"
            " mirror mug pan pen pillow plate pot puzzle rake rope rug saw scarf shelf spoon tent torch towel vase"
        )),
        word("category", "toys", "tools", "garden", "kitchen", "sport", "office"),
        real("price", 2, 40),
        amount("stock", 0, 90, 5, nullable=True),
    ),
    table(
        "purchase", "purchases", (24, 40),
        ref("customer", nullable=True),
        ref("product"),
        amount("quantity", 1, 9),
        ordinal("month", 1, 12),
    ),
)  # fmt: skip

CAFE = domain(
    "cafe",
    table(
        "dish", "dishes", (12, 22),
        label("name", split(
            "bagel bean beet bread broth cake carrot cheese curry dal egg fig fish gnocchi ham hummus jam kale lentil"
            " muffin noodle oat olive pasta pea pie pizza rice salad salmon soup stew taco toast waffle yam"
        )),
        word("course", "starter", "main", "side", "dessert", "drink"),
        real("price", 2, 24),
        measure("calories", 60, 900, 10, nullable=True),
    ),
    table(
        "waiter", "waiters", (8, 12),
        label("name", people()),
        word("shift", "morning", "noon", "evening", "night"),
        real("wage", 10, 24, role="measure"),
    ),
    table(
        "bill", "bills", (14, 24),
        ref("waiter", nullable=True),
        word("area", "bar", "hall", "terrace", "window"),
        amount("guests", 1, 8),
        real("tip", 0, 12, nullable=True),
    ),
    table(
        "serving", "servings", (26, 40),
        ref("bill"),
        ref("dish"),
        amount("portions", 1, 6),
        measure("wait", 3, 40, nullable=True),
    ),
)  # fmt: skip

HOTEL = domain(
    "hotel",
    table(
        "suite", "suites", (10, 18),
        label("name", split(
            "Amber Aster Birch Cedar Clover Coral Daisy Elm Fern Hazel Heron Iris Ivory Jade Lark Lilac Lotus Maple"
            " Olive Onyx Opal Pearl Pine Robin Ruby Sage Swan Topaz Tulip Willow"
        )),
        word("view", "sea", "park", "street", "yard", "lake"),
        ordinal("floor", 1, 9),
        amount("beds", 1, 5),
        amount("rate", 60, 300, 5),
    ),
    table(
        "guest", "guests", (12, 20),
        label("name", people()),
        word("country", *COUNTRIES),
        measure("age", 18, 80, 2, nullable=True),
    ),
    table(
        "stay", "stays", (22, 36),
        ref("suite"),
        ref("guest"),
        day("arrival", 2022, 2024),
        amount("nights", 1, 14),
        measure("score", 1, 10, nullable=True),
    ),
)  # fmt: skip

BANK = domain(
    "bank",
    table(
        "branch", "branches", (8, 12),
        label("name", split(
            "North South East West Harbor Market Castle Station Bridge Garden Mill Tower Museum Forest"
        )),
        word("city", *CITIES),
        ordinal("year", 1950, 2020, 5),
    ),
    table(
        "client", "clients", (12, 20),
        label("name", people()),
        ref("branch"),
        word("job", "baker", "driver", "nurse", "pilot", "tailor", "writer"),
        measure("income", 20, 95, 5, nullable=True),
    ),
    table(
        "account", "accounts", (16, 26),
        ref("client", nullable=True),
        word("type", "basic", "saving", "joint", "student"),
        amount("balance", 5, 995, 5),
    ),
    table(
        "card", "cards", (12, 20),
        ref("account"),
        word("color", "black", "blue", "gold", "green", "white"),
        amount("ceiling", 100, 950, 50),
        ordinal("expiry", 2025, 2031),
    ),
    table(
        "payment", "payments", (26, 40),
        ref("account"),
        word("purpose", "rent", "food", "fuel", "gift", "loan", "travel"),
        amount("amount", 5, 400, 5),
        amount("fee", 0, 9, nullable=True),
    ),
)  # fmt: skip
