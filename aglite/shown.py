"""What of a run's text may be seen: the patterns in force, and applying them to what is shown and exported."""

from __future__ import annotations

from typing import Any

from aglite.redact import MESSAGE_KEYS, NAMED, Redactor
from aglite.store import Store
from aglite.store.rollouts import masked_task
from aglite.units import plain_json

Conversation = tuple[list[dict[str, Any]], dict[str, Any] | None]

PLAIN_KEYS = MESSAGE_KEYS | {
    "task_id",
    "group",
    "split",
    "state",
    "backend",
    "dialect",
    "fork_cause",
    "finish_reason",
    "status",
    "run",
    "recipe",
    "model",
    "dir",
    "mode",
    "phase",
    "kind",
    "level",
    "path",
}
"""Keys of the control API's JSON whose values are names and words of aglite's own: they are never masked."""

HIDDEN = frozenset({"agent.env", "redact.patterns", "notify.url", "notify.command"})
"""Settings whose values may be secrets."""


def redactor_of(store: Store) -> Redactor:
    """What masks the text of a run by the `redact` section of its recipe; false when nothing is to be masked."""
    settings = store.meta("redact") or {}
    return Redactor([*(NAMED[name] for name in settings.get("named", ())), *settings.get("patterns", ())])


def is_masked(store: Store) -> bool:
    """Whether text of the run is masked: when it is shown, or in the store already."""
    return bool(redactor_of(store)) or store.meta("masked_at") is not None


def shown(value: Any, redactor: Redactor) -> Any:
    """Rollouts, events, a status, as far as they may be seen."""
    return redactor.value(value, PLAIN_KEYS)


def shown_result(result: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """An evaluation's result; kinds of tasks are the recipe's words."""
    kinds = result.get("by_kind") or {}
    return {**result, "by_kind": {redactor.text(kind): mean for kind, mean in kinds.items()}}


def shown_conversations(conversations: dict[int, Conversation], redactor: Redactor) -> dict[int, Conversation]:
    """Prompts and replies by call, as far as they may be seen. A message that many share is looked at once."""
    if not redactor:
        return conversations
    seen: dict[int, Any] = {}

    def once(message: Any) -> Any:
        if id(message) not in seen:
            seen[id(message)] = redactor.message(message)
        return seen[id(message)]

    return {
        call_id: ([once(message) for message in prompt], reply and once(reply))
        for call_id, (prompt, reply) in conversations.items()
    }


def shown_rollout(detail: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """A rollout in full, as far as it may be seen; its calls have gone through `shown_conversations` already."""
    if not redactor:
        return detail
    task, calls = detail["task"], detail["call_rows"]
    done = ("messages", "reply")
    rows = [
        shown({key: value for key, value in call.items() if key not in done}, redactor)
        | {key: call[key] for key in done}
        for call in calls
    ]
    return {
        **shown({**detail, "task": None, "call_rows": None}, redactor),
        "task": task and masked_task(task, redactor),
        "call_rows": rows,
    }


def shown_settings(recipe: dict[str, Any], redactor: Redactor, prefix: str = "") -> dict[str, Any]:
    """A resolved recipe as it may be given to others, a setting a key (`trainer.lr`)."""
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        if name in HIDDEN:
            if value:
                found[name] = "(not shown)"
        elif isinstance(value, dict) and value:
            found |= shown_settings(value, redactor, f"{name}.")
        else:
            found[name] = plain_json(redactor.value(value))
    return found
