"""Fixtures of the matrix: the demo model's tokenizer, a stage with room for large prompts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aglite.builtin_models import is_cached
from aglite.gateway.renderers import ChatRenderer, load_renderer
from aglite.models import resolve_model


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    named = os.environ.get("AGLITE_DEMO_MODEL")
    if named is None and not is_cached("smollm2-135m"):
        pytest.skip("the demo model is not here: aglite model fetch smollm2-135m")
    return load_renderer(Path(named) if named else resolve_model("smollm2-135m"))
