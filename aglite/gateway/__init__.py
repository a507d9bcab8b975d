"""Agents talk to the model here: dialects in and out, exact continuation, the gate, capture."""
