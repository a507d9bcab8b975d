"""Which tokens of which sequences the next step computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from aglite.engine.base import SamplingParams
from aglite.engine.embedded.grammar import Matcher
from aglite.engine.embedded.kv import PAGE, Page, PagePool

# A sequence waits for another to compute a prefix that both have if that saves at least this many tokens.
_WORTH_WAITING = 16
# Prompt tokens a step computes at least, however many sequences are decoding.
_LEAST_PREFILL = 32


@dataclass(slots=True, eq=False)
class Sequence:
    """A request: its prompt and what was sampled so far (`tokens`), of which `computed` have keys and values."""

    id: int
    params: SamplingParams
    tokens: list[int]
    prompt_length: int
    limit: int  # tokens at which it ends, by max_tokens or the context
    seed: int
    stop: frozenset[int]
    computed: int = 0
    pages: list[Page] = field(default_factory=list)
    matcher: Matcher | None = None  # of a constrained response

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(slots=True)
class Work:
    """Compute tokens start..start+count of a sequence; if these are its last, sample the next one."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """First come, first served. Sequences wait for a place (`max_running`) and for pages; when running ones need more
    pages than there are, the latest gives up its own and waits again, keeping what it sampled."""

    def __init__(self, pool: PagePool, max_running: int, budget: int) -> None:
        self.pool = pool
        self.max_running = max_running
        self.budget = budget  # tokens a step
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.prefill_tokens = 0
        self.reused_tokens = 0

    def remove(self, sequence: Sequence) -> None:
        """It has finished or was cancelled."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.release(sequence.pages)
        else:
            self.waiting.remove(sequence)

    def forget_computed(self) -> None:
        """The weights changed: everything in the pool is worthless, running sequences start over with their tokens."""
        for sequence in self.running:
            sequence.pages = []
            sequence.computed = 0
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self.pool.reset()

    def schedule(self) -> list[Work]:
        """The next step's work, sequences with a single row first."""
        self._admit()
        singles, chunks = [], []
        pending = [(sequence, sequence.pending) for sequence in self.running]
        budget = max(self.budget - sum(1 for _, n in pending if n == 1), _LEAST_PREFILL)
        for sequence, n in pending:
            if n > 1:
                n = min(n, budget)
                budget -= n
            if n == 0 or sequence not in self.running or not self._reserve(sequence, sequence.computed + n):
                continue
            (singles if n == 1 else chunks).append(Work(sequence, sequence.computed, n))
        return [work for work in singles + chunks if work.sequence.pages]

    def computed(self, work: Work) -> None:
        """Note that the keys and values of this work are in the pool now."""
        sequence = work.sequence
        if sequence.pending > 1 or len(sequence.tokens) == sequence.prompt_length:
            self.prefill_tokens += work.count
        at, end = work.start, work.start + work.count
        while at < end:
            until = min(end, (at // PAGE + 1) * PAGE)
            sequence.pages[at // PAGE].tokens += sequence.tokens[at:until]
            at = until
        sequence.computed = end

    def _admit(self) -> None:
        deferred = []
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting.popleft()
            # At least one token is computed, since its logits are needed.
            whole, partial, matched = self.pool.find(sequence.tokens[:-1])
            known = len(whole) * PAGE + matched
            if self._is_being_computed(sequence, known):
                deferred.append(sequence)
                continue
            need = -(-len(sequence.tokens) // PAGE) - len(whole)
            if self.running and need > self.pool.available - self.pool.idle(whole):
                self.waiting.appendleft(sequence)
                break
            sequence.pages, sequence.computed = self.pool.take(whole, partial, matched)
            self.reused_tokens += sequence.computed
            self.running.append(sequence)
        self.waiting.extendleft(reversed(deferred))

    def _is_being_computed(self, sequence: Sequence, known: int) -> bool:
        """Whether a running sequence is about to compute more of this one's prompt than the pool knows."""
        worth = known + _WORTH_WAITING
        for other in self.running:
            if (
                other.pending > 1
                and worth < len(sequence.tokens)
                and other.tokens[known:worth] == sequence.tokens[known:worth]
                and other.tokens[:known] == sequence.tokens[:known]
            ):
                return True
        return False

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence pages for this many tokens, at the cost of the latest ones; False if it was the latest."""
        while len(sequence.pages) * PAGE < tokens:
            if self.pool.extend(sequence.pages):
                continue
            latest = self.running.pop()
            self.pool.release(latest.pages)
            latest.pages, latest.computed = [], 0
            self.waiting.appendleft(latest)
            if latest is sequence:
                return False
        return True


def parameter_arrays(sequences: list[Sequence]) -> dict[str, np.ndarray]:
    """Sampling parameters of sequences as arrays, in the fields of `sampler.Draws` but the uniform numbers."""
    params = [sequence.params for sequence in sequences]
    return {
        "temperature": np.array([p.temperature for p in params], np.float64),
        "top_p": np.array([p.top_p for p in params], np.float64),
        "top_k": np.array([p.top_k for p in params], np.int64),
        "min_p": np.array([p.min_p for p in params], np.float64),
    }
