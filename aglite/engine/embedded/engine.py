"""The embedded engine: requests in, sampled tokens out, one scheduler iteration at a time."""

from __future__ import annotations

import secrets
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import numpy as np
import torch

from aglite.engine.base import Chunk, EngineInfo, EngineStats, SamplingParams
from aglite.engine.embedded.architecture import read_architecture
from aglite.engine.embedded.attention import KVStore, Span, StepAttention, WholeAttention
from aglite.engine.embedded.grammar import Grammars, Matcher
from aglite.engine.embedded.kv import PAGE
from aglite.engine.embedded.model import Model
from aglite.engine.embedded.sampler import Allowed, Draws, most_probable, sample, uniforms
from aglite.engine.embedded.scheduler import Scheduler, Sequence, Work, parameter_arrays
from aglite.engine.embedded.weights import Loader, Named, read_folder
from aglite.errors import EngineError, GrammarError

_STEP_TOKENS = {"cpu": 256, "cuda": 2048}  # about what keeps a step under a second
_LOGIT_ROWS = 128  # of the vocabulary's size each, in `logprobs`
_RATE_WINDOW_S = 5.0
_COMPILE_WAIT_S = 0.01  # between two looks at the inbox when there is nothing to do but to wait for a grammar


class EmbeddedEngine:
    """Continuous batching of a Llama, Qwen2 or Qwen3 model in float32. Synchronous; one thread owns it."""

    def __init__(
        self,
        model_dir: Path,
        *,
        context_length: int,
        max_running: int,
        kv_tokens: int,
        threads: int | None = None,
        device: str = "cpu",
        state: Named | None = None,
    ) -> None:
        """Load a Hugging Face model folder, or its configuration only if `state` gives the weights by their names.

        context_length: most tokens of prompt and response. max_running: most requests in one batch. kv_tokens: size
        of the KV pool in tokens. threads: of torch, process-wide; None leaves them. Raises EngineError.
        """
        self.arch = read_architecture(model_dir)
        _check_sizes(self.arch.max_positions, context_length, max_running, kv_tokens)
        if threads:
            torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.model = Model(self.arch, self.device, context_length)
        self._loader = Loader(self.model)
        self._loader.load(read_folder(model_dir) if state is None else state)
        self._kv = KVStore(self.arch, kv_tokens // PAGE, self.device)
        self._scheduler = Scheduler(self._kv.pool, max_running, _STEP_TOKENS.get(self.device.type, 2048))
        self._requests: dict[int, Sequence] = {}
        self._ended: list[tuple[int, Chunk | EngineError]] = []  # requests that end without a step
        has_tokenizer = (model_dir / "tokenizer.json").is_file()
        self._grammars = Grammars(model_dir, self.arch.vocab) if has_tokenizer else None
        self._compiling: dict[int, Future[Matcher]] = {}  # of requests that wait for their grammar
        self._preempted = False
        self._version = 0
        self._sampled = 0
        self._recent: deque[tuple[float, int]] = deque()  # of recent steps: when they began, tokens they sampled
        self.info = EngineInfo(
            kind="embedded",
            model=str(model_dir),
            context_length=context_length,
            vocab_size=self.arch.vocab,
            details={
                "architecture": self.arch.name,
                "dtype": "float32",
                "device": str(self.device),
                "threads": torch.get_num_threads(),
                "packed": self.model.packed,
                "kv_bytes": self._kv.data.nbytes,
            },
            constrains=self._grammars is not None,
        )

    def submit(self, request_id: int, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request. Raises EngineError for a prompt that is empty, has unknown ids or exceeds the context. What
        is wrong with its grammar comes out of `step`."""
        context = self.info.context_length
        if request_id in self._requests:
            raise EngineError(f"request {request_id} is already running", "give every request its own id")
        if not prompt_ids:
            raise EngineError("the prompt is empty", "send at least one token")
        if len(prompt_ids) > context:
            raise EngineError(
                f"the prompt has {len(prompt_ids)} tokens, the context {context}",
                "shorten the prompt or raise the context length",
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.arch.vocab:
            raise EngineError(
                f"the prompt has token ids outside 0..{self.arch.vocab - 1}", "use the tokenizer of this model"
            )
        if params.grammar is not None and self._grammars is None:
            raise GrammarError("the model folder has no tokenizer.json, without which no response can be constrained")
        if params.max_tokens < 1 or len(prompt_ids) == context:
            self._ended.append((request_id, Chunk([], [], self._version, "length")))
            return
        sequence = Sequence(
            id=request_id,
            params=params,
            tokens=list(prompt_ids),
            prompt_length=len(prompt_ids),
            limit=min(context, len(prompt_ids) + params.max_tokens),
            seed=(secrets.randbits(64) if params.seed is None else params.seed) % 2**64,
            stop=frozenset(params.stop_token_ids),
        )
        self._requests[request_id] = sequence
        if params.grammar is None or self._grammars is None:
            self._scheduler.waiting.append(sequence)
        else:
            self._compiling[request_id] = self._grammars.start(params.grammar)

    def cancel(self, request_id: int) -> None:
        """Drop a request; nothing more comes from it. Unknown and finished ones are ignored."""
        sequence = self._requests.pop(request_id, None)
        if sequence is not None and self._compiling.pop(request_id, None) is None:
            self._scheduler.remove(sequence)
        self._ended = [item for item in self._ended if item[0] != request_id]

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return not self._preempted and bool(self._requests or self._ended)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Chunk | EngineError]]:
        """One iteration: part of the prompts that wait, and one token for every request past its prompt.

        Returns (request id, chunk) of every request that got a token or ended, and a GrammarError for those whose
        grammar cannot be enforced.
        """
        if self._preempted:
            return []
        started = time.monotonic()
        self._take_compiled()
        chunks, self._ended = self._ended, []
        work = self._scheduler.schedule()
        if not work:
            if self._compiling and not chunks:
                wait(self._compiling.values(), _COMPILE_WAIT_S, FIRST_COMPLETED)
            return chunks
        hidden = self.model.forward(*self._inputs(work))
        sampling = [w for w in work if w.samples]
        sampled = self._sample(hidden, work, sampling) if sampling else []
        for w in work:
            self._scheduler.computed(w)
        for w, chunk in zip(sampling, sampled, strict=True):
            chunks.append((w.sequence.id, self._append(w.sequence, chunk)))
        self._count(started, len(sampling))
        return chunks

    def preempt(self) -> None:
        """Do nothing in `step` until `resume`; requests keep what they sampled."""
        self._preempted = True

    def resume(self, version: int) -> None:
        """Go on; what is sampled from now on is of policy `version`."""
        self._version = version
        self._preempted = False

    def load_weights(self, named: Named) -> None:
        """Take new weights from (Hugging Face name, tensor) pairs in any order; the tensors are copied.

        The KV pool is dropped, and running requests compute theirs anew. Raises EngineError as `Loader.load`.
        """
        self._scheduler.forget_computed()
        self._loader.load(named)

    @torch.inference_mode()
    def logprobs(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        """Log-probability of every token but the first of each row, given those before it (temperature 0 means 1)."""
        inverse = torch.full((1, 1), 1.0 / (temperature or 1.0), device=self.device)
        return [self._row_logprobs(row, inverse) for row in rows]

    def stats(self) -> EngineStats:
        pool = self._kv.pool
        now = time.monotonic()
        self._forget_before(now - _RATE_WINDOW_S)
        span = now - self._recent[0][0] if self._recent else 0.0
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            tokens_per_s=sum(n for _, n in self._recent) / span if span else 0.0,
            sampled_tokens=self._sampled,
            prefill_tokens=self._scheduler.prefill_tokens,
            reused_tokens=self._scheduler.reused_tokens,
            kv_tokens=pool.used_tokens,
            kv_capacity=pool.size * PAGE,
        )

    def _inputs(self, work: list[Work]) -> tuple[torch.Tensor, torch.Tensor, StepAttention]:
        ids: list[int] = []
        positions: list[int] = []
        for w in work:
            end = w.start + w.count
            ids += w.sequence.tokens[w.start : end]
            positions += range(w.start, end)
        spans = [Span(w.sequence.pages, w.start, w.count) for w in work]
        singles = sum(1 for w in work if w.count == 1)
        attention = StepAttention(self._kv, self.arch, spans, singles)
        return torch.tensor(ids, device=self.device), torch.tensor(positions, device=self.device), attention

    def _take_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled."""
        for request_id in [number for number, future in self._compiling.items() if future.done()]:
            future = self._compiling.pop(request_id)
            sequence = self._requests[request_id]
            try:
                sequence.matcher = future.result()
            except GrammarError as error:
                del self._requests[request_id]
                self._ended.append((request_id, error))
            else:
                self._scheduler.waiting.append(sequence)

    def _sample(self, hidden: torch.Tensor, work: list[Work], sampling: list[Work]) -> list[Chunk | GrammarError]:
        """One token for each of `sampling`."""
        if len(sampling) < len(hidden):
            last = np.cumsum([w.count for w in work]) - 1
            rows = [int(row) for row, w in zip(last, work, strict=True) if w.samples]
            hidden = hidden[torch.tensor(rows, device=self.device)]
        sequences = [w.sequence for w in sampling]
        seeds = np.array([s.seed for s in sequences], np.uint64)
        positions = np.array([len(s.tokens) - s.prompt_length for s in sequences])
        draws = Draws(**parameter_arrays(sequences), uniform=uniforms(seeds, positions))
        inverse = torch.from_numpy(draws.inverse_temperature().astype(np.float32)).to(self.device).unsqueeze(1)
        logits = self.model.logits(hidden, inverse)
        allowed, failed = self._allowed(sequences)
        tokens, logprobs = sample(logits, draws, allowed)
        both = torch.stack((tokens.double(), logprobs.double())).tolist()  # the one wait for the device
        sampled = [(int(token), logprob) for token, logprob in zip(*both, strict=True)]
        top = self._top(logits, sequences, sampled)
        return [
            failed.get(row) or Chunk([token], [logprob], self._version, top=top.get(row))
            for row, (token, logprob) in enumerate(sampled)
        ]

    def _allowed(self, sequences: list[Sequence]) -> tuple[Allowed | None, dict[int, GrammarError]]:
        """What the grammars among `sequences` allow next, and by row the requests that cannot go on."""
        rows, masks, failed = [], [], {}
        for row, sequence in enumerate(sequences):
            if sequence.matcher is None:
                continue
            try:
                masks.append(sequence.matcher.allowed(sequence.stop))
                rows.append(row)
            except GrammarError as error:
                failed[row] = error
        if not rows:
            return None, failed
        tokens = torch.from_numpy(np.stack(masks)).to(self.device)
        return Allowed(torch.tensor(rows, device=self.device), tokens), failed

    def _top(
        self, logits: torch.Tensor, sequences: list[Sequence], sampled: list[tuple[int, float]]
    ) -> dict[int, list[list[tuple[int, float]]]]:
        """By row, for the requests that asked: the most probable tokens and their log-probabilities, best first.

        `sampled`: each row's token and log-probability. Where the token is among the most probable it has this value
        there too, which was computed another way and may differ in the last bits of a float32.
        """
        asked = [row for row, sequence in enumerate(sequences) if sequence.params.top_logprobs]
        if not asked:
            return {}
        most = max(sequences[row].params.top_logprobs for row in asked)
        ids, values = most_probable(logits[torch.tensor(asked, device=self.device)], most)
        top = {}
        for row, tokens, logprobs in zip(asked, ids.tolist(), values.tolist(), strict=True):
            token, logprob = sampled[row]
            best = list(zip(tokens, logprobs, strict=True))[: sequences[row].params.top_logprobs]
            best = [(one, logprob if one == token else value) for one, value in best]
            top[row] = [sorted(best, key=lambda pair: -pair[1])]
        return top

    def _append(self, sequence: Sequence, chunk: Chunk | GrammarError) -> Chunk | GrammarError:
        """Note the token of a chunk and whether the response ends with it."""
        if isinstance(chunk, Chunk):
            token = chunk.token_ids[0]
            sequence.tokens.append(token)
            if token in sequence.stop:
                chunk.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.limit:
                chunk.finish_reason = "length"
            elif sequence.matcher is not None:
                chunk = self._advance(sequence, sequence.matcher, chunk)
        if isinstance(chunk, GrammarError) or chunk.finish_reason:
            self._scheduler.remove(sequence)
            del self._requests[sequence.id]
        return chunk

    @staticmethod
    def _advance(sequence: Sequence, matcher: Matcher, chunk: Chunk) -> Chunk | GrammarError:
        try:
            matcher.take(chunk.token_ids[0])
        except GrammarError as error:
            return error
        if matcher.complete and not sequence.stop:  # no token could say so
            chunk.finish_reason = "stop"
        return chunk

    def _row_logprobs(self, row: list[int], inverse: torch.Tensor) -> list[float]:
        if len(row) < 2:
            return []
        if len(row) > self.info.context_length:
            raise EngineError(
                f"a row has {len(row)} tokens, the context {self.info.context_length}", "give shorter rows"
            )
        ids = torch.tensor(row, device=self.device)
        positions = torch.arange(len(row), device=self.device)
        hidden = self.model.forward(ids, positions, WholeAttention(self.arch, [len(row)]))
        out = []
        for start in range(0, len(row) - 1, _LOGIT_ROWS):
            end = min(start + _LOGIT_ROWS, len(row) - 1)
            logits = self.model.logits(hidden[start:end], inverse)
            chosen = logits.gather(1, ids[start + 1 : end + 1].unsqueeze(1)).squeeze(1)
            out += (chosen - torch.logsumexp(logits, -1)).tolist()
        return out

    def _count(self, started: float, tokens: int) -> None:
        self._sampled += tokens
        self._recent.append((started, tokens))
        self._forget_before(started - _RATE_WINDOW_S)

    def _forget_before(self, moment: float) -> None:
        while self._recent and self._recent[0][0] < moment:
            self._recent.popleft()


def _check_sizes(max_positions: int, context_length: int, max_running: int, kv_tokens: int) -> None:
    if context_length > max_positions:
        raise EngineError(
            f"context_length {context_length} exceeds the {max_positions} positions of the model",
            "lower context_length",
        )
    if context_length < 2 or max_running < 1:
        raise EngineError("context_length must be at least 2 and max_running at least 1", "raise them")
    if kv_tokens // PAGE * PAGE < context_length:
        raise EngineError(
            f"a KV pool of {kv_tokens} tokens cannot hold one request of context_length {context_length}",
            f"raise kv_tokens to at least {-(-context_length // PAGE) * PAGE} (pages of {PAGE} tokens)",
        )
