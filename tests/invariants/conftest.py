"""The learner's kit, for the invariants too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PATH = Path(__file__).resolve().parent.parent / "learner" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("agentrl_tests_learner_kit", _PATH)
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

kit = _MODULE.kit
_one_thread = _MODULE._one_thread
