"""The page pool against a slow reference that keeps every token's whole history."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aglite.arrays import common_prefix
from aglite.engine.embedded.kv import PAGE, Page, PagePool


class Store:
    """Stands for the KV tensors: what is computed at a place depends on all tokens up to it."""

    def __init__(self, pages: int) -> None:
        self.places: list[list[tuple[int, ...] | None]] = [[None] * PAGE for _ in range(pages)]
        self.pool = PagePool(pages, self._clear, self._copy)

    def _clear(self, index: int) -> None:
        self.places[index] = [None] * PAGE

    def _copy(self, source: int, target: int) -> None:
        self.places[target] = list(self.places[source])

    def compute(self, pages: list[Page], tokens: list[int], start: int, end: int) -> None:
        for at in range(start, end):
            self.places[pages[at // PAGE].index][at % PAGE] = tuple(tokens[: at + 1])
            pages[at // PAGE].tokens.append(tokens[at])

    def holds(self, pages: list[Page], tokens: list[int]) -> bool:
        return all(
            self.places[pages[at // PAGE].index][at % PAGE] == tuple(tokens[: at + 1]) for at in range(len(tokens))
        )

    def longest_prefix(self, tokens: list[int]) -> int:
        """By looking at every place of the pages that are not free."""
        histories = set()
        for page in self.pool.pages:
            if page is not None:
                histories.update(self.places[page.index][: len(page.tokens)])
        return max((n for n in range(len(tokens) + 1) if n == 0 or tuple(tokens[:n]) in histories), default=0)


# Token lists made of a few repeated pieces, so that prefixes are shared, and end anywhere in a page.
piece = st.tuples(st.integers(0, 2), st.sampled_from((1, 10, 32, 63, 64, 65, 100)))
token_lists = st.lists(piece, min_size=1, max_size=4).map(lambda pieces: [t for t, n in pieces for _ in range(n)])
actions = st.lists(
    st.one_of(
        st.tuples(st.just("start"), token_lists),
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("move"), st.integers(0, 11)),
    ),
    max_size=25,
)


@settings(max_examples=150)
@given(actions)
def test_pool_shares_exactly_what_it_holds(steps):
    store = Store(12)
    pool = store.pool
    running: list[tuple[list[Page], list[int]]] = []
    for action, value in steps:
        if action == "start":
            whole, partial, matched = pool.find(value)
            expected = store.longest_prefix(value)
            assert len(whole) * PAGE + matched == expected, "not the longest prefix"
            pages, known = pool.take(whole, partial, matched)
            # A page that matches in part is copied, if there is a page to copy it to.
            assert known in (expected, len(whole) * PAGE)
            assert store.holds(pages, value[:known])
            done = known
            while done < len(value):
                if len(pages) * PAGE == done and not pool.extend(pages):
                    break
                end = min(len(value), len(pages) * PAGE)
                store.compute(pages, value, done, end)
                done = end
            running.append((pages, value[:done]))
        elif action == "finish" and running:
            pages, tokens = running.pop(value % len(running))
            pool.release(pages)
            assert store.longest_prefix(tokens) == len(tokens), "finished sequences are kept until room is needed"
        elif action == "move":
            page = next((page for page in pool.pages if page is not None), None)
            if page is not None and page.index != value:
                source = page.index
                pool.move(page, value)
                store.places[source], store.places[value] = store.places[value], store.places[source]
        for pages, tokens in running:
            assert store.holds(pages, tokens), "a running sequence lost what it had computed"
        check_accounts(pool, running)
    for pages, _ in running:
        pool.release(pages)
    assert pool.available == pool.size


def check_accounts(pool: PagePool, running: list[tuple[list[Page], list[int]]]) -> None:
    readers: dict[int, int] = {}
    for pages, _ in running:
        for page in pages:
            readers[page.index] = readers.get(page.index, 0) + 1
    assert pool.available == pool.size - len(readers)
    for index, page in enumerate(pool.pages):
        if page is not None:
            assert page.index == index
            assert page.readers == readers.get(index, 0)
            assert page in page.parent.children


def test_the_oldest_sequence_is_given_up_first_and_from_its_end():
    store = Store(4)
    for token in (1, 2):
        pages: list[Page] = []
        for _ in range(2):
            assert store.pool.extend(pages)
        store.compute(pages, [token] * 128, 0, 128)
        store.pool.release(pages)
    whole, _, _ = store.pool.find([1] * 128)
    pages, known = store.pool.take(whole, None, 0)  # use the first again: the second is the oldest now
    store.pool.release(pages)
    assert known == 128
    assert store.pool.extend([])
    assert store.longest_prefix([1] * 128) == 128
    assert store.longest_prefix([2] * 128) == 64


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(0, 40))
def test_common_prefix(a, b, shared):
    b = a[:shared] + b
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(a, b) == expected
