"""Random training batches for the tiny model."""

import random

from aglite.worker.io import pack_floats, pack_ids

LORA = {"rank": 4, "alpha": 8, "targets": []}
"""A small adapter of every linear module, as the trainer is told of it."""

DEFAULTS = {
    "temperature": 0.7,
    "lr": 1e-3,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "none",
    "rollout_rs_bounds": [0.5, 2.0],
    "kl": 0.0,
    "entropy": 0.0,
}


def random_rows(seed, count=8, vocabulary=97):
    """(ids, mask, advantage, weight) with prefixes that are shared by some rows, and gaps between trained tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(12)] for _ in range(2)]
    prompts.append(prompts[0][:6] + prompts[1][6:])
    rows = []
    for index in range(count):
        prompt = prompts[index % 3]
        reply = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(4, 20))]
        mask = [0] * len(prompt) + [int(rng.random() < 0.8) for _ in reply]
        mask[-1] = 1
        rows.append((prompt + reply, mask, rng.gauss(0, 1), rng.random() / 20))
    return rows


def ids_of(rows):
    return [row[0] for row in rows]


def whole(rows):
    """The plan of one update with all rows in one micro-batch."""
    return [[list(range(len(rows)))]]


def message(rows, logprobs, plan, **changes):
    """A `train` message; `logprobs` has for each row the recorded values of every token but the first."""
    packed = [
        {
            "ids": pack_ids(ids),
            "mask": bytes(mask),
            "logprobs": pack_floats([0.0] + [value * kept for value, kept in zip(values, mask[1:], strict=True)]),
            "advantage": advantage,
            "weight": weight,
            "rollout": index,
        }
        for index, ((ids, mask, advantage, weight), values) in enumerate(zip(rows, logprobs, strict=True))
    ]
    return {"rows": packed, "plan": plan, **DEFAULTS, **changes}
