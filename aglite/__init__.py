"""aglite: train a language model inside the agent program you already run."""

__version__ = "0.1.0"
