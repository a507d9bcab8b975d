"""What `aglite export` writes: every column with its type and what it means. docs/measuring.md is made from it."""

from __future__ import annotations

from typing import Literal

Kind = Literal["text", "integer", "number", "boolean", "integers", "numbers", "texts", "pairs", "numbers by name"]
Columns = dict[str, tuple[Kind, str]]

ROLLOUTS: Columns = {
    "id": ("text", "its id"),
    "task_id": ("text", "the task's"),
    "group": ("text", "the group's id; empty for an external rollout without one"),
    "split": ("text", "`train` or `val`"),
    "state": ("text", "`done`, `failed` (by the agent), `error` (infrastructure), `cancelled`, or unfinished"),
    "cause": ("text", "why it ended other than well"),
    "attempt": ("integer", "its last launch, from 1"),
    "backend": ("text", "`local`, `docker` or `external`"),
    "calls": ("integer", "model calls of the last attempt"),
    "samples": ("integer", "samples that were trained"),
    "prompt_tokens": ("integer", "tokens of all prompts, each turn's counted whole"),
    "sampled_tokens": ("integer", "tokens that the model sampled"),
    "trained_tokens": ("integer", "tokens that carried loss"),
    "policy_version_min": ("integer", "the oldest weights that sampled for it"),
    "policy_version_max": ("integer", "the newest"),
    "reward": ("number", "empty where it was not graded"),
    "breakdown": ("numbers by name", "parts of the reward, as the grader named them"),
    "flags": ("texts", "limits reached, signs of cheating, `stale`, `rolled_back`, `pruned`"),
    "created_at": ("number", "Unix seconds, as all times"),
    "started_at": ("number", "when its last attempt began"),
    "finished_at": ("number", ""),
}

CALLS: Columns = {
    "rollout_id": ("text", "whose call it is"),
    "id": ("integer", "its number, in order of time"),
    "parent_id": ("integer", "the earlier call whose tokens begin this prompt"),
    "fork_cause": ("text", "empty where it goes on from its parent, else why it does not"),
    "dialect": ("text", "the API that the agent spoke"),
    "prompt_ids": ("integers", "token ids of the whole prompt"),
    "response_ids": ("integers", "sampled token ids"),
    "logprobs": ("numbers", "natural logarithm of each sampled token's probability"),
    "versions": ("pairs", "[policy version, tokens], in the order sampled"),
    "constrained": ("boolean", "whether it was held to a grammar"),
    "finish_reason": ("text", "`stop`, `length`, `tool_calls`, ..."),
    "status": ("text", "`ok`, `error` or `cancelled`"),
    "started_at": ("number", ""),
    "first_token_at": ("number", ""),
    "finished_at": ("number", ""),
}

SAMPLES: Columns = {
    "rollout_id": ("text", "whose sample it is"),
    "step": ("integer", "the step that trained it"),
    "input_ids": ("integers", "token ids"),
    "loss_mask": ("integers", "1 on tokens that carry loss"),
    "logprobs": ("numbers", "as recorded when sampled; 0 where the mask is 0"),
    "versions": ("integers", "the policy version that sampled each token; -1 where the mask is 0"),
    "constrained": ("integers", "1 on tokens that were sampled under a grammar"),
    "calls": ("pairs", "[call, 1 if its tokens are trained here], from root to leaf"),
    "advantage": ("number", "of the rollout"),
    "weight": ("number", "of each trained token in the loss"),
}

STEPS: Columns = {
    "id": ("integer", "in order of time; a number of a step is used again after a roll back"),
    "step": ("integer", "from 1"),
    "version": ("integer", "the policy version that it made; of a skipped step the one it left"),
    "state": ("text", "`applied`, `skipped` or `rolled_back`"),
    "started_at": ("number", ""),
    "finished_at": ("number", ""),
    "metrics": ("numbers by name", "what was measured; numbers within others as `forks.edited`"),
}

EVALUATIONS: Columns = {
    "id": ("integer", "in order of time"),
    "step": ("integer", "after which it was made; 0: the untrained model"),
    "version": ("integer", "the policy version evaluated"),
    "split": ("text", "`val` or `train`"),
    "state": ("text", "`done`, `running`, `abandoned` or `rolled_back`"),
    "started_at": ("number", ""),
    "finished_at": ("number", ""),
    "result": ("numbers by name", "`mean`, `stderr`, `low`, `high`, `n`, `pass@1.mean`, `by_kind.word`, ..."),
}

COLUMNS: dict[str, Columns] = {
    "samples": SAMPLES,
    "calls": CALLS,
    "rollouts": ROLLOUTS,
    "steps": STEPS,
    "evaluations": EVALUATIONS,
}
"""By what is exported."""
