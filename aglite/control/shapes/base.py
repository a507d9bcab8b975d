"""What all shapes are made of."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

State = Literal["queued", "starting", "running", "grading", "done", "failed", "error", "cancelled"]
Phase = Literal["starting", "rollout", "draining", "sleeping", "training", "syncing", "evaluating", "paused", "stopped"]


class Shape(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)
