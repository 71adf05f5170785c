"""The record of an update survives the disk bit for bit, and damage is named."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import RunError
from agentrl.learner.record import StepRecord, UpdateRecord


def _record(reference: bool = True) -> UpdateRecord:
    generator = torch.Generator().manual_seed(1)

    def draw(n: int = 6) -> torch.Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    blank_N = torch.full((6,), math.nan, dtype=torch.float64)
    logprob_N = blank_N.clone()
    logprob_N[[0, 1, 4]] = draw(3)
    mask_N = draw() > 0.5
    first = StepRecord((0, 2), logprob_N, blank_N, 2 * logprob_N, True, 0.1 + 0.2, math.nan, kl_loss=1e-300)
    empty = StepRecord((), blank_N, blank_N, blank_N, False, 0.0, 0.0)
    shared_N = draw()
    return UpdateRecord(
        ("a/1", "b\u2028", "c"), 1 / 3, shared_N, mask_N, draw() if reference else None, shared_N, draw(3), draw(),
        shared_N, draw(), mask_N, ~mask_N, (first, empty),
    )  # fmt: skip


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, StepRecord) and isinstance(b, StepRecord):
        return all(_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(_equal(left, right) for left, right in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("reference", [True, False])
def test_round_trip(tmp_path: Path, reference: bool) -> None:
    record = _record(reference)
    record.save(tmp_path / "deep" / "learning.safetensors")
    found = UpdateRecord.load(tmp_path / "deep" / "learning.safetensors")
    for field in fields(UpdateRecord):
        assert _equal(getattr(record, field.name), getattr(found, field.name)), field.name
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["learning.safetensors"]


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "learning.safetensors"
    _record().save(path)
    data = path.read_bytes()
    for cut in (0, 4, 200, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(RunError, match=r"learning\.safetensors"):
            UpdateRecord.load(path)
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(RunError, match="was written by something else"):
        UpdateRecord.load(path)
    save_file({"x": torch.zeros(3)}, path, {"agentrl": '{"format": 99}'})
    with pytest.raises(RunError, match="format 99"):
        UpdateRecord.load(path)
    with pytest.raises(RunError, match="missing"):
        UpdateRecord.load(tmp_path / "nowhere")
