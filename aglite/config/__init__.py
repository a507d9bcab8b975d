"""The recipe: one typed, validated, documented schema for everything a run can be told.

A recipe that cannot work is refused with the path of the field, the value it has and what to write instead.
"""

from aglite.config.load import find_recipe, load_recipe, parse_recipe
from aglite.config.notify import Notify
from aglite.config.recipe import RESUMABLE, Recipe, is_loopback, is_wildcard
from aglite.config.reward import Reward
from aglite.config.sections import (
    Agent,
    Algorithm,
    EngineSettings,
    Evaluation,
    GatewaySettings,
    Guard,
    Kubernetes,
    Limits,
    Redact,
    Retention,
    Sampling,
    Tasks,
    Tls,
    TrainSampling,
    ValSampling,
)
from aglite.config.trainer import Lora, Trainer

__all__ = [
    "RESUMABLE",
    "Agent",
    "Algorithm",
    "EngineSettings",
    "Evaluation",
    "GatewaySettings",
    "Guard",
    "Kubernetes",
    "Limits",
    "Lora",
    "Notify",
    "Recipe",
    "Redact",
    "Retention",
    "Reward",
    "Sampling",
    "Tasks",
    "Tls",
    "TrainSampling",
    "Trainer",
    "ValSampling",
    "find_recipe",
    "is_loopback",
    "is_wildcard",
    "load_recipe",
    "parse_recipe",
]
