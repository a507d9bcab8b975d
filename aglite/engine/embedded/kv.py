"""Which tokens' keys and values the pool holds: pages of a prefix tree, shared between sequences.

Pure bookkeeping; the tensors are in `attention.KVStore`, told through two callbacks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from aglite.arrays import common_prefix

PAGE = 64  # tokens


class Page:
    """Up to PAGE consecutive tokens of some sequence. `tokens` are those whose keys and values are computed.

    What a page holds depends on everything before it, so pages form a tree: `parent` holds the tokens before.
    """

    __slots__ = ("children", "index", "parent", "readers", "tokens", "used")

    def __init__(self, index: int, parent: Page | None) -> None:
        self.index = index
        self.parent = parent
        self.children: list[Page] = []
        self.tokens: list[int] = []
        self.readers = 0
        self.used = 0


class PagePool:
    """A fixed number of pages: free, read by running sequences, or kept for later prompts with the same prefix.

    Kept pages are given up least recently used first, the end of a sequence before its beginning. The lowest free
    page is taken first, so that pages in use stay close together.
    """

    def __init__(
        self,
        pages: int,
        clear: Callable[[int], None] = lambda index: None,
        copy: Callable[[int, int], None] = lambda a, b: None,
    ) -> None:
        self.size = pages
        self._clear = clear  # page index -> finite values everywhere
        self._copy = copy  # from page index, to page index
        self.reset()

    def reset(self) -> None:
        """Forget everything. No sequence may hold pages."""
        self.root = Page(-1, None)
        self.pages: list[Page | None] = [None] * self.size
        self._free = list(range(self.size))
        self._clock = 0
        self._idle = 0  # pages without readers

    @property
    def available(self) -> int:
        """Pages that `extend` can still hand out."""
        return len(self._free) + self._idle

    @property
    def used_tokens(self) -> int:
        return sum(len(page.tokens) for page in self.pages if page is not None)

    def find(self, tokens: list[int]) -> tuple[list[Page], Page | None, int]:
        """The longest prefix of `tokens` in the pool: whole pages, then a page of which `n` first tokens match."""
        whole: list[Page] = []
        node = self.root
        while len(tokens) > len(whole) * PAGE:
            want = tokens[len(whole) * PAGE : (len(whole) + 1) * PAGE]
            best, matched = None, 0
            for child in node.children:
                if child.tokens and child.tokens[0] == want[0]:
                    common = common_prefix(child.tokens, want)
                    if common > matched:
                        best, matched = child, common
            if matched < PAGE:
                return whole, best, matched
            whole.append(best)
            node = best
        return whole, None, 0

    def idle(self, pages: list[Page]) -> int:
        """How many of these pages have no reader (and would no longer be available once taken)."""
        return sum(1 for page in pages if page.readers == 0)

    def take(self, whole: list[Page], partial: Page | None, matched: int) -> tuple[list[Page], int]:
        """Share what `find` found, a partly matching page by copying it. Returns the pages and their tokens."""
        pages = list(whole)
        for page in pages:
            self._acquire(page)
        count = len(pages) * PAGE
        if partial is not None:
            self._acquire(partial)  # so that making room does not take it
            copied = self._new_page(pages[-1] if pages else self.root)
            if copied is not None:
                self._copy(partial.index, copied.index)
                copied.tokens = partial.tokens[:matched]
                pages.append(copied)
                count += matched
            self.release([partial])
        return pages, count

    def extend(self, pages: list[Page]) -> bool:
        """Add an empty page to a sequence's pages. False if every page is read by running sequences."""
        page = self._new_page(pages[-1] if pages else self.root)
        if page is None:
            return False
        self._clear(page.index)
        pages.append(page)
        return True

    def release(self, pages: list[Page]) -> None:
        """A sequence no longer reads these; they are kept until their room is needed."""
        self._clock += 1
        for page in reversed(pages):
            page.readers -= 1
            page.used = self._clock
            if page.readers == 0:
                self._idle += 1
                if not page.tokens:
                    self._drop(page)

    def move(self, page: Page, index: int) -> Page | None:
        """Note that a page now is at `index`; what was there is at the page's old place. Returns that other page."""
        other, old = self.pages[index], page.index
        self.pages[index], self.pages[old] = page, other
        page.index = index
        if other is None:
            self._free[self._free.index(index)] = old
            heapq.heapify(self._free)
        else:
            other.index = old
        return other

    def _acquire(self, page: Page) -> None:
        if page.readers == 0:
            self._idle -= 1
        page.readers += 1

    def _new_page(self, parent: Page) -> Page | None:
        if not self._free:
            idle = [page for page in self.pages if page is not None and page.readers == 0 and not page.children]
            if not idle:
                return None
            self._drop(min(idle, key=lambda page: page.used))
        page = Page(heapq.heappop(self._free), parent)
        page.readers = 1
        parent.children.append(page)
        self.pages[page.index] = page
        return page

    def _drop(self, page: Page) -> None:
        page.parent.children.remove(page)
        self.pages[page.index] = None
        heapq.heappush(self._free, page.index)
        self._idle -= 1
