"""Agents as Jobs of a Kubernetes cluster. `backend.py` is the place; `api.py` all that is said to the API server."""
