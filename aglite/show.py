"""A rollout in full, as the control API and `aglite show --json` give it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aglite.errors import AgliteError
from aglite.forks import fork_diffs
from aglite.paths import RunDir
from aglite.shown import is_masked, redactor_of, shown_conversations, shown_rollout
from aglite.store import Store
from aglite.training.samples import build_samples, loss_bearing
from aglite.units import BROKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aglite.gateway.tokenizer import TextTokenizer
    from aglite.store.records import StoredCall

LOG_TAIL_BYTES = 16 * 1024


def rollout_detail(
    store: Store,
    run_dir: RunDir,
    rollout_id: str,
    *,
    tokens: bool = False,
    tokenizer: TextTokenizer | None = None,
) -> dict[str, Any]:
    """The rollout's JSON with `task`, `states`, `log_tail`, `judge_calls` (what the grader asked its judge),
    `call_rows` (each with the `messages` of its prompt, its `reply`, and `fork_diff`, see `forks.fork_diffs`) and
    `sample_rows`; with `tokens` both also carry token ids, log-probabilities and versions, and `token_texts` the text
    of each sampled token by its id.

    `tokenizer`: the model's if it is at hand; by default it is read from the model's folder where a fork needs it.
    Where the run's text is masked, so is all text here, and forks are shown by their messages alone. Raises StoreError
    when there is no such rollout.
    """
    rollout = store.rollout(rollout_id)
    log = run_dir.rollout_log(rollout_id, rollout["attempt"])
    redactor, masked = redactor_of(store), is_masked(store)
    calls = store.calls(rollout_id)
    conversations = shown_conversations(store.conversations(rollout_id), redactor)
    if tokenizer is None and not masked and (tokens or any(call.fork_cause in BROKEN for call in calls)):
        tokenizer = _tokenizer(store, run_dir)
    diffs = fork_diffs(calls, conversations, tokenizer)
    if masked:  # single tokens spell out what no pattern finds in them
        diffs = {call_id: {**diff, "tokens": None} for call_id, diff in diffs.items()}
    detail = {
        **rollout,
        "task": store.task(rollout["split"], rollout["task_id"]),
        "states": store.rollout_states(rollout_id),
        "call_rows": [
            {
                **(call.json() if tokens else {}),
                **call_summary(call),
                "messages": conversations[call.id][0],
                "reply": conversations[call.id][1],
                "fork_diff": diffs.get(call.id),
            }
            for call in calls
        ],
        "sample_rows": [
            {**(sample.json() if tokens else {}), **sample_summary(sample)}
            for sample in store.samples(rollout_id=rollout_id)
        ],
        "judge_calls": store.judge_calls(rollout_id),
        "log_tail": _tail(log) if log.is_file() else "",
    }
    if tokens:
        detail["token_texts"] = {} if masked or tokenizer is None else _token_texts(calls, tokenizer)
    return shown_rollout(detail, redactor)


def _token_texts(calls: Sequence[StoredCall], tokenizer: TextTokenizer) -> dict[str, str]:
    """The text of each sampled token by its id (as text: JSON knows no other keys); part of a character is shown as
    U+FFFD."""
    ids = {token for call in calls for token in call.response_ids}
    return {str(token): tokenizer.token_text(token) for token in sorted(ids)}


def rollout_tokens(store: Store, run_dir: RunDir, rollout_id: str) -> list[dict[str, Any]]:
    """The samples that the last attempt's calls make, whether they were trained or not, token by token.

    Each is `{"calls": [[call id, 1 if trained here]], "ids", "texts", "mask", "logprobs", "versions", "constrained"}`,
    one entry a token in the last six; where the mask is 0 the log-probability is 0 and the version -1. `texts` is null
    where the run's text is masked, since single tokens spell out what no pattern finds, and without a tokenizer. Raises
    NotFoundError when there is no such rollout.
    """
    store.rollout(rollout_id)
    calls = loss_bearing(store.calls(rollout_id))
    tokenizer = None if is_masked(store) else _tokenizer(store, run_dir)

    def spelled(ids: Sequence[int]) -> list[str] | None:
        return [tokenizer.token_text(id) for id in ids] if tokenizer else None

    return [
        {
            "calls": [[call_id, int(trained)] for call_id, trained in sample.calls],
            "ids": list(sample.input_ids),
            "texts": spelled(sample.input_ids),
            "mask": list(sample.loss_mask),
            "logprobs": list(sample.logprobs),
            "versions": list(sample.versions),
            "constrained": list(sample.constrained),
        }
        for sample in build_samples(calls)
    ]


def sample_summary(sample: Any) -> dict[str, Any]:
    """A sample without its tokens."""
    return {
        "step": sample.step,
        "calls": [[call_id, int(trained)] for call_id, trained in sample.calls],
        "tokens": len(sample.input_ids),
        "trained_tokens": sum(sample.loss_mask),
        "constrained_tokens": sum(sample.constrained),
        "advantage": sample.advantage,
        "weight": sample.weight,
    }


def call_summary(call: Any) -> dict[str, Any]:
    """A call without its tokens: the numbers a table shows."""
    return {
        "id": call.id,
        "parent_id": call.parent_id,
        "matched_id": call.matched_id,
        "fork_cause": call.fork_cause,
        "dialect": call.dialect,
        "prompt_tokens": len(call.prompt_ids),
        "sampled_tokens": len(call.response_ids),
        "versions": call.versions,
        "constrained": call.constrained,
        "finish_reason": call.finish_reason,
        "status": call.status,
        "error": call.error,
        "delivered": call.delivered,
        "held_s": call.held_s,
        "started_at": call.started_at,
        "first_token_at": call.first_token_at,
        "finished_at": call.finished_at,
    }


def _tokenizer(store: Store, run_dir: RunDir) -> TextTokenizer | None:
    """The tokenizer of the run's model, or of one of its checkpoints; None when no folder is there any more."""
    from aglite.gateway.tokenizer import TextTokenizer

    kept = [run_dir.path / row["path"] for row in store.checkpoints() if row["state"] == "kept"]
    for folder in [store.meta("model_dir"), *kept]:
        if folder is not None and (Path(folder) / "tokenizer.json").is_file():
            try:
                return TextTokenizer(Path(folder))
            except AgliteError:  # damaged since; another may be whole, and ids can be shown without any
                continue
    return None


def _tail(path: Any) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
