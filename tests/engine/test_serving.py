"""What requests see: arrivals at any time, cancellation, limits, updates of the weights, a full pool."""

from __future__ import annotations

import random

import pytest
import torch
from engine_driver import VOCAB, Result, collect, greedy, make_engine, make_model, sample_all, teacher_forced

from aglite.engine.base import SamplingParams
from aglite.errors import EngineError


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **changes})


def test_requests_that_arrive_while_others_run(llama):
    reference, folder = llama
    engine = make_engine(folder)
    results: dict[int, Result] = {}
    prompts = [prompt_of(length, length) for length in (5, 70, 200, 3, 128, 64, 1, 90, 150, 33, 17, 80)]
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, params())
        collect(engine, results, steps=number % 4)
    collect(engine, results)
    for number, prompt in enumerate(prompts):
        assert results[number].tokens == greedy(reference, prompt, 12)
    assert not engine.has_work
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_long_prompt_does_not_hold_up_others(llama, monkeypatch):
    engine = make_engine(llama[1])
    engine._scheduler.budget = 40
    engine.submit(0, prompt_of(4), params(max_tokens=30))
    results = collect(engine, {}, steps=1)
    engine.submit(1, prompt_of(200, 1), params())
    for expected in range(2, 7):
        collect(engine, results, steps=1)
        assert len(results[0].tokens) == expected
    assert 1 not in results or len(results[1].tokens) <= 1
    collect(engine, results)
    assert results[1].tokens == greedy(llama[0], prompt_of(200, 1), 12)


def test_a_group_computes_its_prompt_once(llama):
    engine = make_engine(llama[1])
    prompt = prompt_of(150)
    cold = sample_all(engine, [prompt] * 8, temperature=1.0, seed=5)
    assert all(result.tokens == cold[0].tokens for result in cold)
    stats = engine.stats()
    assert stats.prefill_tokens == 150 + 7
    assert stats.reused_tokens == 7 * 149


def test_groups_with_a_common_beginning(llama):
    engine = make_engine(llama[1], max_running=16)
    system, tails = prompt_of(70), [prompt_of(40, seed) for seed in range(1, 5)]
    sample_all(engine, [system + tail for tail in tails for _ in range(4)])
    assert engine.stats().prefill_tokens == 70 + 4 * 40 + 12


def test_turns_of_a_conversation_compute_only_what_is_new(llama):
    reference, folder = llama
    engine = make_engine(folder)
    history = prompt_of(30)
    for turn in range(6):
        before = engine.stats().prefill_tokens
        result = sample_all(engine, [history], max_tokens=25)[0]
        assert result.tokens == greedy(reference, history, 25), "a hot cache gives other tokens than a cold one"
        # The last sampled token was never an input, so it is computed with the next turn's own 10.
        assert engine.stats().prefill_tokens - before == (30 if turn == 0 else 11)
        history = history + result.tokens + prompt_of(10, turn + 1)


def test_seeds_do_not_depend_on_the_batch(llama):
    engine = make_engine(llama[1])
    prompts = [prompt_of(20 + n, n) for n in range(6)]
    together = sample_all(engine, prompts, temperature=1.0, seed=11)
    alone = [sample_all(make_engine(llama[1]), [prompt], temperature=1.0, seed=11)[0] for prompt in prompts]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.tokens for r in sample_all(engine, prompts, temperature=1.0, seed=12)] != [r.tokens for r in together]


def test_without_a_seed_samples_differ(llama):
    engine = make_engine(llama[1])
    assert len({tuple(r.tokens) for r in sample_all(engine, [prompt_of(10)] * 6, temperature=1.0)}) == 6


def test_stop_tokens_and_limits(llama):
    reference, folder = llama
    engine = make_engine(folder, context_length=100)
    expected = greedy(reference, prompt_of(20), 12)
    stop = expected[5]
    result = sample_all(engine, [prompt_of(20)], stop_token_ids=(stop,))[0]
    assert result.tokens == expected[: expected.index(stop) + 1]
    assert result.reason == "stop"
    full = sample_all(engine, [prompt_of(95)], max_tokens=50)[0]
    assert (len(full.tokens), full.reason) == (5, "length")
    last = sample_all(engine, [prompt_of(100)], max_tokens=50)[0]
    assert (last.tokens, last.reason) == ([], "length")


def test_bad_requests_are_refused_and_harm_nobody(llama):
    engine = make_engine(llama[1], context_length=100)
    engine.submit(0, prompt_of(20), params())
    for prompt in (prompt_of(101), [], [3, VOCAB], [-1]):
        with pytest.raises(EngineError):
            engine.submit(1, prompt, params())
    with pytest.raises(EngineError):
        engine.submit(0, prompt_of(20), params())
    results = collect(engine, {})
    assert list(results) == [0]
    assert len(results[0].tokens) == 12


def test_cancelled_requests_free_their_place(llama):
    reference, folder = llama
    engine = make_engine(folder, max_running=2)
    for number in range(4):
        engine.submit(number, prompt_of(60, number), params(max_tokens=200))
    results = collect(engine, {}, steps=4)
    assert set(results) == {0, 1}
    counts = {number: len(result.tokens) for number, result in results.items()}
    engine.cancel(0)  # running
    engine.cancel(3)  # waiting
    engine.cancel(77)  # never heard of
    collect(engine, results)
    assert len(results[0].tokens) == counts[0]
    assert 3 not in results
    for number in (1, 2):
        assert results[number].tokens == greedy(reference, prompt_of(60, number), 200)
    engine.submit(5, prompt_of(30), params())
    engine.cancel(5)
    assert not engine.has_work
    assert engine._kv.pool.available == engine._kv.pool.size


def test_a_full_pool_makes_requests_wait(llama):
    reference, folder = llama
    engine = make_engine(folder, kv_tokens=320)
    prompts = [prompt_of(90, number) for number in range(8)]
    results = sample_all(engine, prompts, max_tokens=60)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == greedy(reference, prompt, 60)
    whole = sample_all(engine, [prompt_of(200, 9)], max_tokens=100)[0]
    assert whole.tokens == greedy(reference, prompt_of(200, 9), 100)


def test_pages_that_lie_far_apart_are_moved_together(llama):
    reference, folder = llama
    engine = make_engine(folder)
    prompts = [prompt_of(100, number) for number in range(28)]
    first = sample_all(engine, prompts, max_tokens=2)
    later = [prompts[n] + first[n].tokens + prompt_of(3, n) for n in (0, 14, 27)]
    before = engine.stats().prefill_tokens
    for number, prompt in enumerate(later):
        engine.submit(number, prompt, params(max_tokens=40))
    results = collect(engine, {}, steps=2)
    used = [page.index for sequence in engine._scheduler.running for page in sequence.pages]
    assert max(used) - min(used) < 16, "the pages are read as one range"
    collect(engine, results)
    assert engine.stats().prefill_tokens - before == 4 * 3, "all were found in the pool"
    for number, prompt in enumerate(later):
        assert results[number].tokens == greedy(reference, prompt, 40)
    # What was moved out of the way is intact too.
    again = sample_all(engine, prompts[1:14], max_tokens=2)
    assert [result.tokens for result in again] == [result.tokens for result in first[1:14]]


def test_a_pool_smaller_than_one_request_is_refused(llama):
    with pytest.raises(EngineError, match="320"):
        make_engine(llama[1], kv_tokens=310)


def test_preempted_requests_go_on_with_new_weights(llama, tmp_path):
    old, folder = llama
    new = make_model("llama", tmp_path, seed=1)
    engine = make_engine(folder)
    prompts = [prompt_of(80), prompt_of(80), prompt_of(150, 1)]
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, params(max_tokens=20))
    results = collect(engine, {}, steps=6)
    sampled = {number: list(result.tokens) for number, result in results.items()}
    engine.preempt()
    assert engine.step() == []
    assert not engine.has_work
    engine.submit(3, prompts[0], params(max_tokens=20))  # arrives during the update
    engine.load_weights(new.named_parameters())
    engine.resume(7)
    collect(engine, results)
    for number, prompt in enumerate(prompts):
        before = sampled[number]
        assert 0 < len(before) < 20
        assert before == greedy(old, prompt, len(before))
        # Recomputed from scratch: the new model given the prompt and what the old one sampled.
        assert results[number].tokens == before + greedy(new, prompt + before, 20 - len(before))
        assert results[number].versions == [0] * len(before) + [7] * (20 - len(before))
        expected = teacher_forced(new, prompt + results[number].tokens)[len(prompt) - 1 :]
        assert results[number].logprobs[len(before) :] == pytest.approx(expected[len(before) :], abs=1e-4)
    assert results[3].tokens == greedy(new, prompts[0], 20)
    assert results[3].versions == [7] * 20


def test_a_pause_without_new_weights_keeps_the_cache(llama):
    engine = make_engine(llama[1])
    engine.submit(0, prompt_of(80), params())
    results = collect(engine, {}, steps=3)
    engine.preempt()
    engine.resume(1)
    collect(engine, results)
    assert engine.stats().prefill_tokens == 80
    assert results[0].tokens == greedy(llama[0], prompt_of(80), 12)


def test_the_engine_copies_the_weights_it_is_given(llama, tmp_path):
    model = make_model("llama", tmp_path)
    engine = make_engine(tmp_path, state=list(model.named_parameters()))
    expected = sample_all(engine, [prompt_of(20)])[0].tokens
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert sample_all(engine, [prompt_of(20), prompt_of(21)])[0].tokens == expected
    engine.load_weights(model.named_parameters())
    assert engine.logprobs([prompt_of(20)], 1.0)[0] == pytest.approx([-5.0752] * 19, abs=1e-3)


def test_stats_count_tokens(llama):
    engine = make_engine(llama[1])
    engine.submit(0, prompt_of(70), params())
    collect(engine, {}, steps=3)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.sampled_tokens) == (1, 0, 3)
    assert (stats.kv_tokens, stats.kv_capacity) == (72, 4096)
    assert 0 < stats.tokens_per_s < 10_000
