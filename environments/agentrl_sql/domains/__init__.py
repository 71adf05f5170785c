"""The worlds that questions are asked about. Names of tables are unique across all of them."""

from __future__ import annotations

from agentrl_sql.domains.commerce import BANK, CAFE, HOTEL, SHOP
from agentrl_sql.domains.culture import CINEMA, LIBRARY, MUSEUM, MUSIC
from agentrl_sql.domains.outdoors import AIRLINE, FARM, GARAGE, PORT, ZOO
from agentrl_sql.domains.people import CLINIC, GYM, SCHOOL
from agentrl_sql.domains.spec import by_name

_TRAIN = by_name(SHOP, LIBRARY, SCHOOL, CLINIC, CAFE, FARM, MUSEUM, CINEMA, HOTEL, GYM, AIRLINE, BANK)
_HELDOUT = by_name(ZOO, GARAGE, MUSIC, PORT)

TRAIN_DOMAINS: tuple[str, ...] = tuple(_TRAIN)
"""Domains of the splits `train`, `dev` and `heldout`."""

HELDOUT_DOMAINS: tuple[str, ...] = tuple(_HELDOUT)
"""Domains of the split `heldout_domains`: never trained on."""

DOMAINS = {**_TRAIN, **_HELDOUT}
"""All of them, by name."""
