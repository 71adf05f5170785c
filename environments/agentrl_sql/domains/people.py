"""Domains about people who learn, heal and train."""

from __future__ import annotations

from agentrl_sql.domains.spec import amount, day, domain, label, measure, ordinal, real, ref, table, word
from agentrl_sql.domains.words import CITIES, WEEKDAYS, people

SCHOOL = domain(
    "school",
    table(
        "teacher", "teachers", (8, 14),
        label("name", people()),
        word("subject", "art", "math", "music", "physics", "biology", "history"),
        measure("salary", 30, 70),
        ordinal("start_year", 1990, 2023),
    ),
    table(
        "pupil", "pupils", (14, 26),
        label("name", people()),
        ref("teacher", nullable=True),
        ordinal("grade", 1, 9),
        word("club", "chess", "choir", "dance", "drama", "robots"),
        measure("height", 110, 180, 2, nullable=True),
    ),
    table(
        "exam", "exams", (26, 40),
        ref("pupil"),
        word("topic", "algebra", "energy", "grammar", "plants", "rivers", "rhythm"),
        measure("points", 0, 100, nullable=True),
        amount("mistakes", 0, 15),
    ),
)  # fmt: skip

CLINIC = domain(
    "clinic",
    table(
        "doctor", "doctors", (8, 14),
        label("name", people()),
        word("ward", "heart", "eyes", "bones", "skin", "lungs"),
        measure("salary", 60, 180, 2),
    ),
    table(
        "patient", "patients", (14, 24),
        label("name", people()),
        word("city", *CITIES),
        measure("age", 1, 90),
        measure("weight", 12, 110, 2, nullable=True),
    ),
    table(
        "visit", "visits", (26, 40),
        ref("doctor"),
        ref("patient", nullable=True),
        word("reason", "check", "fever", "cough", "injury", "vaccine"),
        day("date", 2022, 2024),
        amount("cost", 20, 300, 5),
        amount("minutes", 5, 60, 5, nullable=True),
    ),
)  # fmt: skip

GYM = domain(
    "gym",
    table(
        "coach", "coaches", (8, 12),
        label("name", people()),
        word("sport", "boxing", "yoga", "rowing", "tennis", "judo"),
        real("wage", 12, 40, role="measure"),
    ),
    table(
        "member", "members", (14, 24),
        label("name", people()),
        word("city", *CITIES),
        measure("age", 16, 70, 2),
        measure("weight", 48, 110, 2, nullable=True),
    ),
    table(
        "lesson", "lessons", (14, 24),
        ref("coach", nullable=True),
        word("weekday", *WEEKDAYS),
        ordinal("hour", 7, 21),
        amount("minutes", 30, 90, 5),
        word("level", "easy", "medium", "hard", nullable=True),
    ),
    table(
        "booking", "bookings", (26, 40),
        ref("member"),
        ref("lesson"),
        real("fee", 4, 20),
        measure("stars", 1, 5, nullable=True),
    ),
)  # fmt: skip
