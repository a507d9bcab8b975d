"""The trainer in this process, against plain torch."""

import math

import pytest

torch = pytest.importorskip("torch")

from training_rows import ids_of, message, random_rows, whole  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from aglite.errors import AgliteError  # noqa: E402
from aglite.worker import memory  # noqa: E402
from aglite.worker.model_inputs import Layout  # noqa: E402
from aglite.worker.trainer import Trainer  # noqa: E402


def row_logprobs(model, ids, temperature):
    ids = torch.tensor([ids])
    return (model(ids).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def row_entropy(model, ids, temperature):
    logs = (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def sequence_ratios(rows, log_ratios, numbers):
    """(sum, mean) of the log-ratios over the trained tokens of each row's rollout."""
    found = {}
    for number in set(numbers):
        values = [
            value
            for (_, mask, *_), logs, other in zip(rows, log_ratios, numbers, strict=True)
            if other == number
            for value, kept in zip(logs.tolist(), mask[1:], strict=True)
            if kept
        ]
        found[number] = torch.tensor([sum(values), sum(values) / len(values)])
    return [found[number] for number in numbers]


def reference_step(model, rows, recorded, batch, grad_clip=1.0, reference=None):
    """The design's formulas, one row at a time: [(loss, gradient norm)] of each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=batch["lr"], weight_decay=0.0)
    with torch.no_grad():
        starts = [row_logprobs(model, ids, batch["temperature"]) for ids, *_ in rows]
        refs = [row_logprobs(reference, ids, batch["temperature"]) for ids, *_ in rows] if reference else starts
    log_ratios = [start - torch.tensor(values) for start, values in zip(starts, recorded, strict=True)]
    sequences = sequence_ratios(rows, log_ratios, [row["rollout"] for row in batch["rows"]])
    updates = []
    for mini in batch["plan"]:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for index in (index for micro in mini for index in micro):
            ids, mask, advantage, weight = rows[index]
            mask = torch.tensor(mask[1:], dtype=torch.float32)
            now = row_logprobs(model, ids, batch["temperature"])
            ratio = (now - starts[index]).exp()
            clipped = ratio.clamp(1 - batch["clip_low"], 1 + batch["clip_high"])
            value = torch.minimum(ratio * advantage, clipped * advantage)
            if advantage < 0:
                value = torch.maximum(value, torch.tensor(3.0 * advantage))
            if batch["rollout_is"] != "none":
                logs = sequences[index][0] if batch["rollout_is"] == "sequence" else log_ratios[index]
                value = value * logs.exp().clamp(max=batch["rollout_is_threshold"])
            if batch["rollout_rs"] != "none":
                of = (sequences[index][1] if batch["rollout_rs"] == "sequence" else log_ratios[index]).exp()
                mask = mask * ((of >= batch["rollout_rs_bounds"][0]) & (of <= batch["rollout_rs_bounds"][1]))
            k3 = ((refs[index] - now).exp() - 1 - (refs[index] - now)).clamp(max=10)
            loss = loss - (weight * value * mask).sum() + batch["kl"] * (weight * k3 * mask).sum()
            loss = loss - batch["entropy"] * (weight * row_entropy(model, ids, batch["temperature"]) * mask).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        updates.append((loss.item(), norm.item()))
    return updates


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_same_weights(trainer, model, lr):
    """After one update. AdamW divides a gradient by its own size, so only where that is not nearly 0 does rounding
    leave the step alone."""
    ours = dict(trainer.weights())
    clear = 0
    for name, value in model.named_parameters():
        gap = (ours[name] - value.detach()).abs()
        assert gap.max() < lr
        assert gap[value.grad.abs() > 1e-5].max() < 1e-3 * lr, name
        clear += int((value.grad.abs() > 1e-5).sum())
    assert clear > 50_000


@pytest.mark.parametrize("level", ["token", "none"])
def test_one_update_equals_plain_torch(make_trainer, tiny_model, level):
    rows = random_rows(1)
    trainer, model = make_trainer(), plain(tiny_model)
    recorded = [
        [value + 0.4 * (i % 3 - 1) for i, value in enumerate(row)] for row in trainer.logprobs(ids_of(rows), 0.7)
    ]
    batch = message(rows, recorded, [[[0, 1, 2], [3, 4], [5, 6, 7]]], rollout_is=level, rollout_is_threshold=1.2)
    before = torch.cat([value.flatten().clone() for _, value in trainer.weights()])
    result = trainer.train(batch)
    ((loss, norm),) = reference_step(model, rows, recorded, batch)
    assert result["loss"] == pytest.approx(loss, rel=5e-5, abs=1e-7)
    assert result["grad_norm"] == pytest.approx(norm, rel=5e-5)
    assert (result["applied"], result["updates"], result["skipped"]) == (True, 1, 0)
    assert_same_weights(trainer, model, batch["lr"])
    after = torch.cat([value.flatten() for _, value in trainer.weights()])
    assert (after - before).abs().mean() > 0.3 * batch["lr"]
    if level == "token":
        assert 0.2 < result["correction_capped"] < 0.5


def test_several_updates_clip_against_the_start_of_the_step(make_trainer, tiny_model):
    rows = random_rows(2)
    trainer, model = make_trainer(), plain(tiny_model)
    recorded = trainer.logprobs(ids_of(rows), 0.7)
    plan = [[[0, 1], [2]], [[0, 1, 3]], [[4, 5], [6, 7]]]  # rows 0 and 1 twice, so that their ratio has moved
    batch = message(rows, recorded, plan, lr=2e-2)
    result = trainer.train(batch)
    updates = reference_step(model, rows, recorded, batch)
    assert result["loss"] == pytest.approx(sum(loss for loss, _ in updates) / 3, rel=1e-4)
    assert result["grad_norm"] == pytest.approx(sum(norm for _, norm in updates) / 3, rel=1e-3)
    assert result["clip_fraction"] > 0
    assert result["updates"] == 3


def test_kl_to_the_reference_is_weighted_like_the_tokens(make_trainer, tiny_model):
    rows = random_rows(3)
    trainer, model, reference = make_trainer(kl=0.5), plain(tiny_model), plain(tiny_model)
    recorded = trainer.logprobs(ids_of(rows), 0.7)
    batch = message(rows, recorded, [[list(range(8))], [list(range(8))]], kl=0.5, lr=3e-4)
    result = trainer.train(batch)
    updates = reference_step(model, rows, recorded, batch, reference=reference)
    assert result["loss"] == pytest.approx(sum(loss for loss, _ in updates) / 2, rel=1e-4)
    assert result["grad_norm"] == pytest.approx(sum(norm for _, norm in updates) / 2, rel=1e-4)
    assert result["kl_ref"] > 0


def off_policy_batch(trainer, rows, **changes):
    """Rows two by two of one rollout, recorded under weights that differ more and more from row to row."""
    exact = trainer.logprobs(ids_of(rows), 0.7)
    recorded = [
        [value + 0.04 * (index + 1) * (0.5 if at % 3 else -2.6) for at, value in enumerate(row)]
        for index, row in enumerate(exact)
    ]
    batch = message(rows, recorded, whole(rows), **changes)
    for index, row in enumerate(batch["rows"]):
        row["rollout"] = index // 2
    return batch, recorded


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
        {"rollout_rs": "token", "rollout_rs_bounds": [0.8, 1.3]},
        {"rollout_rs": "sequence", "rollout_rs_bounds": [0.97, 1.12], "rollout_is": "none"},
        {"rollout_rs": "token", "rollout_rs_bounds": [0.0, 1.0], "kl": 0.3, "entropy": 0.02},
    ],
    ids=["sequence weights", "token rejection", "sequence rejection", "every term"],
)
def test_weights_and_rejection_equal_plain_torch(make_trainer, tiny_model, changes):
    rows = random_rows(13)
    trainer = make_trainer(kl=changes.get("kl", 0.0))
    batch, recorded = off_policy_batch(trainer, rows, **changes)
    result = trainer.train(batch)
    ((loss, norm),) = reference_step(plain(tiny_model), rows, recorded, batch, reference=plain(tiny_model))
    assert result["loss"] == pytest.approx(loss, rel=5e-5, abs=1e-7)
    assert result["grad_norm"] == pytest.approx(norm, rel=5e-5)
    trained = sum(sum(row[1]) for row in rows)
    assert result["rejected_tokens"] < trained
    assert (result["rejected_tokens"] > 0) == ("rollout_rs" in changes)
    # other settings give another update: each of them counts
    other = make_trainer(kl=changes.get("kl", 0.0))
    usual = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "none"}
    unlike = other.train(off_policy_batch(other, rows, **changes | usual)[0])
    assert unlike["grad_norm"] != pytest.approx(norm, rel=1e-3)


def test_the_mismatch_is_measured_on_what_was_sampled_freely(make_trainer):
    rows = random_rows(14)
    trainer = make_trainer()
    exact = trainer.logprobs(ids_of(rows), 0.7)
    off = [[value - 0.1 for value in row] for row in exact]
    off[3][-1] = exact[3][-1] - 1.5
    batch = message(rows, off, whole(rows), rollout_is_threshold=2.0)
    batch["rows"][3]["fresh"] = bytes(rows[3][1])
    result = trainer.train(batch)
    trained, fresh = sum(sum(row[1]) for row in rows), sum(rows[3][1])
    k3 = {gap: math.exp(gap) - 1 - gap for gap in (0.1, 1.5)}
    assert result["kl_rollout"] == pytest.approx((k3[0.1] * (trained - 1) + k3[1.5]) / trained, rel=1e-3)
    assert result["ratio_max"] == pytest.approx(math.exp(1.5), rel=1e-4)
    assert result["correction_capped"] == pytest.approx(1 / trained)
    assert result["logprob_gap_kl"] == pytest.approx((k3[0.1] * (fresh - 1) + k3[1.5]) / fresh, rel=1e-3)


def test_the_entropy_bonus_is_weighted_like_the_tokens(make_trainer, tiny_model):
    rows = random_rows(15)
    trainer = make_trainer()
    recorded = trainer.logprobs(ids_of(rows), 0.7)
    batch = message(rows, recorded, whole(rows), entropy=8.0)
    result = trainer.train(batch)
    ((loss, norm),) = reference_step(plain(tiny_model), rows, recorded, batch)
    assert result["loss"] == pytest.approx(loss, rel=5e-5)
    assert result["grad_norm"] == pytest.approx(norm, rel=5e-5)
    ((_, without),) = reference_step(plain(tiny_model), rows, recorded, batch | {"entropy": 0.0})
    assert norm != pytest.approx(without, rel=1e-2)


def test_the_split_into_micro_batches_changes_nothing(make_trainer):
    rows = random_rows(4)
    outcomes = []
    for budget, micro in (
        (10_000, [list(range(8))]),
        (60, [[7, 0, 3], [1, 2, 4], [5, 6]]),
        (1, [[i] for i in range(8)]),
    ):
        trainer = make_trainer(tokens_per_micro_batch=budget)
        recorded = trainer.logprobs(ids_of(rows), 0.7)
        result = trainer.train(message(rows, recorded, [micro]))
        weights = torch.cat([value.flatten() for _, value in trainer.weights()])
        outcomes.append((result, weights))
    (whole, weights), *others = outcomes
    assert [result["micro_batches"] for result, _ in outcomes] == [1, pytest.approx(2, abs=1), 8]
    for result, other in others:
        for key in ("loss", "grad_norm", "entropy", "kl_rollout"):
            assert result[key] == pytest.approx(whole[key], rel=5e-5, abs=1e-6), key
        # Not each weight: one whose gradient is rounding error alone moves by any part of lr, whichever way.
        assert (other - weights).square().mean().sqrt() < 0.01 * 1e-3


def test_the_memory_of_a_pass_is_known_before(make_trainer):
    """Three short passes say what a long one keeps."""
    how = (make_trainer().module, Layout(), torch.float32)
    known = memory.pass_bytes(*how)
    for tokens in (100, 230):
        assert known(tokens, 0) == pytest.approx(memory._saved_bytes(how[0], tokens, *how[1:]), rel=0.05)
    assert known(100, 10) - known(100, 0) == 10 * 97 * 4 * memory.LOGITS


def test_a_step_that_does_not_fit_is_refused_and_names_the_rollout_and_the_setting(make_trainer, monkeypatch):
    rows = random_rows(16)
    rows[5] = (rows[5][0] + [7] * 60, [*rows[5][1], *[1] * 60], 1.0, 0.1)
    trainer = make_trainer(tokens_per_micro_batch=10_000)
    batch = message(rows, trainer.logprobs(ids_of(rows), 0.7), whole(rows))
    for index, row in enumerate(batch["rows"]):
        row["name"] = f"r-{index}"
    before = torch.cat([weight.flatten().clone() for _, weight in trainer.weights()])
    result = trainer.train(batch | {"lr": 0.0})
    need = result["micro_batch_mb_max"]
    assert result["micro_batch_tokens_max"] == result["computed_tokens"] and need > 1
    monkeypatch.setattr(memory, "free_bytes", lambda: (need - 1) << 20)
    with pytest.raises(AgliteError) as refusal:
        trainer.train(batch)
    assert f"rollout r-5 with {len(rows[5][0])} tokens" in refusal.value.message
    assert f"takes {need - 1} MB" in refusal.value.message or f"takes {need} MB" in refusal.value.message
    assert "trainer.tokens_per_micro_batch" in refusal.value.mend
    alone = message(rows[5:6], trainer.logprobs([rows[5][0]], 0.7), [[[0]]])
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 10)
    with pytest.raises(AgliteError) as refusal:
        trainer.train(alone)
    assert "engine.context_length" in refusal.value.mend
    assert torch.equal(before, torch.cat([weight.flatten() for _, weight in trainer.weights()]))


def test_shared_prefixes_are_computed_once(make_trainer):
    rows = random_rows(5)
    trainer = make_trainer(tokens_per_micro_batch=10_000)
    result = trainer.train(message(rows, trainer.logprobs(ids_of(rows), 0.7), whole(rows)))
    assert result["tokens"] == sum(len(ids) for ids, *_ in rows)
    assert result["computed_tokens"] == len({tuple(ids[: end + 1]) for ids, *_ in rows for end in range(len(ids))})


@pytest.mark.parametrize(("field", "value"), [(2, math.nan), (2, math.inf), (3, 3e38)])
def test_an_update_that_is_not_finite_is_not_applied(make_trainer, field, value):
    rows = random_rows(6)
    trainer = make_trainer()
    recorded = trainer.logprobs(ids_of(rows), 0.7)
    spoiled = [
        tuple(value if index == 5 and at == field else v for at, v in enumerate(r)) for index, r in enumerate(rows)
    ]
    before = {name: weight.clone() for name, weight in trainer.weights()}
    result = trainer.train(message(spoiled, recorded, whole(rows)))
    assert (result["applied"], result["updates"], result["skipped"]) == (False, 0, 1)
    assert not (math.isfinite(result["loss"]) and math.isfinite(result["grad_norm"]))
    assert all(torch.equal(before[name], weight) for name, weight in trainer.weights())
    assert not trainer.optimizer.state_dict()["state"]
    good = trainer.train(message(rows, recorded, whole(rows)))
    fresh = make_trainer()
    assert good["grad_norm"] == fresh.train(message(rows, recorded, whole(rows)))["grad_norm"]
    assert all(torch.equal(dict(fresh.weights())[name], weight) for name, weight in trainer.weights())


def test_fresh_tokens_and_engine_values_are_compared(make_trainer):
    rows = random_rows(7)
    trainer = make_trainer()
    exact = trainer.logprobs(ids_of(rows), 0.7)
    off = [[value + 0.25 for value in row] for row in exact]
    batch = message(rows, off, whole(rows))
    batch["rows"][0]["fresh"] = bytes(rows[0][1])
    result = trainer.train(batch)
    assert result["logprob_gap_mean"] == pytest.approx(0.25, abs=1e-4)
    assert result["logprob_gap_tokens"] == sum(rows[0][1])
    engine = [
        value + 0.5 * (at == len(rows[1][0]) - 2) for at, value in enumerate(trainer.logprobs([rows[1][0]], 0.7)[0])
    ]
    result = trainer.train(message(rows, exact, whole(rows)), {1: engine})
    assert result["logprob_gap_max"] == pytest.approx(0.5, abs=1e-4)
    assert result["logprob_gap_tokens"] == sum(rows[1][1])


@pytest.mark.parametrize(
    "plan", [[[[0, 1], [2, 3, 4], [5, 6, 7]]], [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]], ids=["one", "two"]
)
def test_constrained_tokens_weigh_one_and_are_compared_with_nothing(make_trainer, tiny_model, plan):
    """Whatever was recorded for them: the step is the one in which engine and trainer agree on them."""
    rows = random_rows(12)
    trainer = make_trainer()
    exact = trainer.logprobs(ids_of(rows), 0.7)
    free = [[value + 0.1 * (-1) ** at for at, value in enumerate(row)] for row in exact]
    held = [[at % 3 == 0 or index == 1 for at in range(len(row[0]))] for index, row in enumerate(rows)]

    def recorded(value):
        return [
            [value(exact[i][at], free[i][at]) if held[i][at + 1] else free[i][at] for at in range(len(exact[i]))]
            for i in range(len(rows))
        ]

    batch = message(rows, recorded(lambda _, other: other - 25.0), plan, rollout_is_threshold=1.05)
    for row, flags in zip(batch["rows"], held, strict=True):
        row["constrained"] = bytes(on and kept for on, kept in zip(flags, row["mask"], strict=True))
        row["fresh"] = bytes(kept and not on for on, kept in zip(flags, row["mask"], strict=True))
    result = trainer.train(batch, {1: [value + 7.0 for value in exact[1]]})
    model = plain(tiny_model)
    expected = reference_step(model, rows, recorded(lambda value, _: value), batch)
    assert result["loss"] == pytest.approx(sum(loss for loss, _ in expected) / len(expected), rel=1e-4)
    assert result["grad_norm"] == pytest.approx(sum(norm for _, norm in expected) / len(expected), rel=1e-3)
    count = sum(sum(row["constrained"]) for row in batch["rows"])
    assert result["constrained_tokens"] == count > 20
    assert result["off_policy_gap_mean"] == pytest.approx(0.1, abs=1e-4)
    assert result["kl_rollout"] < 0.01 and 0.3 < result["correction_capped"] < 0.7
    if len(plan) == 1:  # afterwards the weights are no longer those that sampled
        assert result["logprob_gap_mean"] == pytest.approx(0.1, abs=1e-4)
    assert result["logprob_gap_tokens"] == sum(sum(row["fresh"]) for row in batch["rows"])
    assert result["trained_tokens"] == sum(sum(row[1]) for row in rows)


def test_a_checkpoint_resumes_bit_for_bit(make_trainer, tiny_model, tmp_path):
    rows = random_rows(8)
    trainer = make_trainer()
    recorded = trainer.logprobs(ids_of(rows), 0.7)
    batch = message(rows, recorded, whole(rows))
    trainer.train(batch)
    trainer.save(tmp_path / "step-1", {"step": 1, "cursor": [3, 4]})
    trainer.train(batch)
    trainer.train(batch)
    random = torch.rand(3)

    other = make_trainer(seed=99)
    other.train(message(rows[:3], recorded[:3], [[[0, 1, 2]]]))
    assert other.load(tmp_path / "step-1") == {"step": 1, "cursor": [3, 4]}
    other.train(batch)
    other.train(batch)
    mine = dict(trainer.weights())
    assert all(torch.equal(mine[name], weight) for name, weight in other.weights())
    for one, two in zip(
        trainer.optimizer.state_dict()["state"].values(), other.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(one[key], two[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    assert torch.equal(torch.rand(3), random)


def test_a_checkpoint_and_an_export_are_model_folders(make_trainer, tmp_path):
    trainer = make_trainer()
    rows = random_rows(9)
    trainer.train(message(rows, trainer.logprobs(ids_of(rows), 0.7), whole(rows)))
    trainer.save(tmp_path / "step-1", {})
    trainer.export(tmp_path / "export")
    ours = dict(trainer.weights())
    for folder in (tmp_path / "step-1", tmp_path / "export"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        assert all(torch.equal(ours[name], value) for name, value in model.named_parameters())
        assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2
    again = Trainer(tmp_path / "step-1")
    assert all(torch.equal(ours[name], value) for name, value in again.weights())
    with pytest.raises(AgliteError, match="no checkpoint"):
        trainer.load(tmp_path / "export")


def test_rows_that_cannot_be_trained_are_refused(make_trainer):
    rows = random_rows(10)[:1]
    trainer = make_trainer()
    batch = message(rows, trainer.logprobs([rows[0][0]], 0.7), [[[0]]])
    for mask in (bytes(len(rows[0][0])), b"\1" * len(rows[0][0]), b"\0\1"):
        batch["rows"][0]["mask"] = mask
        with pytest.raises(AgliteError, match="row 0"):
            trainer.train(batch)
