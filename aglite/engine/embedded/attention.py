"""Attention of one step over the page pool: single rows of many sequences at once, and chunks of prompts.

Single rows (decoding) work page by page. Each page is one batch entry whose queries are those of the sequences that
read it, so keys and values are read where they lie, whatever the lengths, and a prompt shared by a group is read once
for eight sequences. The partial results of a sequence's pages are then joined by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from aglite.engine.embedded.architecture import Architecture
from aglite.engine.embedded.kv import PAGE, Page, PagePool

_MASKED = -1e30  # finite, so that a page with nothing to see gives a weight of zero and no NaN
_READERS = 8  # sequences beyond the first that one entry serves of a shared page


class KVStore:
    """Keys and values of every layer, [layers, pages, 2 * kv_heads, PAGE, head_dim], the key heads first.

    The memory of pages that were never used is not touched.
    """

    def __init__(self, arch: Architecture, pages: int, device: torch.device) -> None:
        self.heads = 2 * arch.kv_heads
        self.data = torch.empty(arch.layers, pages, self.heads, PAGE, arch.head_dim, device=device)
        self.layers = self.data.unbind(0)
        self.rows = [layer.view(-1, arch.head_dim) for layer in self.layers]
        self.pool = PagePool(pages, self._clear, self._copy)

    def _clear(self, index: int) -> None:
        self.data[:, index].zero_()

    def _copy(self, source: int, target: int) -> None:
        self.data[:, target] = self.data[:, source]

    def gather_close(self, pages: list[Page]) -> None:
        """Move pages to the front of the store if they lie too far apart to be read as one range.

        Costs one copy of the pages that move (about as much as computing half a token each), and is seldom needed.
        """
        wanted = {page.index for page in pages}
        if max(wanted) - min(wanted) + 1 <= 1.5 * len(wanted) + 2:
            return
        moving = [page for page in pages if page.index >= len(wanted)]
        for index in range(len(wanted)):
            if index in wanted:
                continue
            page = moving.pop()
            source = page.index
            if self.pool.move(page, index) is None:
                self._copy(source, index)
            else:
                self.data[:, [index, source]] = self.data[:, [source, index]]


@dataclass(slots=True)
class Span:
    """Rows of a step that belong to one sequence: tokens start..start+count, kept in `pages`."""

    pages: list[Page]
    start: int
    count: int


class StepAttention:
    """Attention for one step. The first `singles` spans have one row each; the others follow as chunks."""

    def __init__(self, store: KVStore, arch: Architecture, spans: list[Span], singles: int) -> None:
        self.store = store
        self.arch = arch
        self.device = store.data.device
        self.singles = singles
        if singles:
            store.gather_close(list({id(p): p for span in spans[:singles] for p in span.pages}.values()))
            self._plan_singles(spans[:singles])
        self.chunks = self._plan_chunks(spans[singles:], singles)
        self.write_rows = self._plan_writes(spans)

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        self.store.rows[layer].index_copy_(0, self.write_rows, key_value.reshape(-1, self.arch.head_dim))
        if not self.chunks:
            return self._attend_singles(layer, query)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self.singles:
            out[: self.singles] = self._attend_singles(layer, query[: self.singles]).view_as(out[: self.singles])
        for chunk in self.chunks:
            rows = slice(chunk.row, chunk.row + chunk.count)
            mixed = self._attend_chunk(layer, chunk, query[rows], key_value[rows])
            out[rows] = mixed.permute(2, 0, 1, 3)
        return out.flatten(1)

    # writing

    def _plan_writes(self, spans: list[Span]) -> torch.Tensor:
        """Row of the store for each (row of the step, head)."""
        at = np.array([at for span in spans for at in range(span.start, span.start + span.count)])
        page = [span.pages[at // PAGE].index for span in spans for at in range(span.start, span.start + span.count)]
        rows = (np.array(page) * (self.store.heads * PAGE) + at % PAGE)[:, None] + np.arange(self.store.heads) * PAGE
        return self._tensor(rows.reshape(-1))

    # single rows

    def _plan_singles(self, spans: list[Span]) -> None:
        counts = np.array([span.start // PAGE + 1 for span in spans])
        readers = np.repeat(np.arange(len(spans)), counts)
        pages = np.array([page.index for span, n in zip(spans, counts, strict=True) for page in span.pages[:n]])
        ends = np.cumsum(counts)
        visible = np.full(len(pages), PAGE)
        visible[ends - 1] = [span.start % PAGE + 1 for span in spans]

        # Each page serves its first reader in the range low..high, where it lies.
        _, first = np.unique(pages, return_index=True)
        low, high = pages.min(), pages.max() + 1
        owner, seen, entry = (
            np.zeros(high - low, np.int64),
            np.zeros(high - low, np.int64),
            np.empty(len(pages), np.int64),
        )
        owner[pages[first] - low] = readers[first]
        seen[pages[first] - low] = visible[first]
        entry[first] = pages[first] - low
        self.range = slice(int(low), int(high))
        self.owner = self._tensor(owner)
        mask = np.where(np.arange(PAGE) < seen[:, None], np.float32(0), np.float32(_MASKED))
        self.mask = self._tensor(mask)[:, None, None].expand(-1, 1, self.arch.groups, -1)

        # Further readers of shared pages, which are full; such pages are gathered.
        others = np.setdiff1d(np.arange(len(pages)), first)
        self.shared = None
        if len(others):
            self._plan_shared(pages, readers, others, entry, int(high - low))
        starts = ends - counts
        column = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        self.pairs = self._tensor(entry[starts[:, None] + column].reshape(-1))
        absent = np.arange(counts.max()) >= counts[:, None]
        self.absent = (
            self._tensor(np.where(absent, np.float32(_MASKED), np.float32(0)))[..., None] if absent.any() else None
        )
        self.table = tuple(column.shape)

    def _plan_shared(
        self, pages: np.ndarray, readers: np.ndarray, others: np.ndarray, entry: np.ndarray, offset: int
    ) -> None:
        others = others[np.argsort(pages[others], kind="stable")]
        _, begin, sizes = np.unique(pages[others], return_index=True, return_counts=True)
        rank = np.arange(len(others)) - np.repeat(begin, sizes)  # of a reader among those of its page
        width = int(min(_READERS, sizes.max()))
        groups = -(-sizes // width)  # entries for each page
        group = np.repeat(np.cumsum(groups) - groups, sizes) + rank // width
        served = np.zeros((int(groups.sum()), width), np.int64)
        served[group, rank % width] = readers[others]
        entry[others] = offset + group * width + rank % width
        self.shared = self._tensor(np.repeat(pages[others][begin], groups))
        self.shared_readers = self._tensor(served.reshape(-1))

    def _attend_singles(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [singles, groups, kv_heads, head_dim] -> [singles, heads * head_dim]"""
        arch, kv = self.arch, self.arch.kv_heads
        heads = arch.groups * kv
        keys_values = self.store.layers[layer][self.range]
        out, lse = attend_partly(
            query.index_select(0, self.owner).transpose(1, 2), keys_values[:, :kv], keys_values[:, kv:], self.mask
        )
        out, lse = out.view(-1, heads, arch.head_dim), lse.view(-1, heads)
        if self.shared is not None:
            keys_values = self.store.layers[layer].index_select(0, self.shared)
            asking = query.index_select(0, self.shared_readers).view(len(self.shared), -1, kv, arch.head_dim)
            more, more_lse = attend_partly(asking.transpose(1, 2), keys_values[:, :kv], keys_values[:, kv:], None)
            out = torch.cat((out, more.view(-1, heads, arch.head_dim)))
            lse = torch.cat((lse, more_lse.view(-1, heads)))
        if self.table[1] == 1:
            return out.index_select(0, self.pairs).flatten(1)
        lse = lse.index_select(0, self.pairs).view(*self.table, heads)
        if self.absent is not None:
            lse = lse + self.absent
        weight = torch.softmax(lse, 1).unsqueeze(-1)
        out = out.index_select(0, self.pairs).view(*self.table, heads, arch.head_dim)
        return (out * weight).sum(1).flatten(1)

    # chunks

    def _plan_chunks(self, spans: list[Span], row: int) -> list[_Chunk]:
        chunks = []
        for span in spans:
            index = mask = None
            if span.start:
                length = span.start + span.count
                index = self._tensor(np.array([page.index for page in span.pages[: -(-length // PAGE)]]))
                columns = torch.arange(length, device=self.device)
                seen = columns <= columns[span.start :, None]
                mask = torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, _MASKED)
            chunks.append(_Chunk(row, span.count, index, mask))
            row += span.count
        return chunks

    def _attend_chunk(self, layer: int, chunk: _Chunk, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """-> [groups, kv_heads, count, head_dim]"""
        kv = self.arch.kv_heads
        if chunk.pages is None:
            key_value = key_value.transpose(0, 1)
        else:
            gathered = self.store.layers[layer].index_select(0, chunk.pages)
            key_value = gathered.transpose(0, 1).flatten(1, 2)[:, : chunk.mask.shape[1]]
        return attend_causally(query, key_value[:kv], key_value[kv:], chunk.mask)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


@dataclass(slots=True)
class _Chunk:
    row: int
    count: int
    pages: torch.Tensor | None  # None: nothing before the chunk
    mask: torch.Tensor | None  # [count, tokens]


class WholeAttention:
    """Causal attention of whole rows of tokens, packed one after the other, without the pool."""

    def __init__(self, arch: Architecture, lengths: list[int]) -> None:
        self.arch = arch
        self.lengths = lengths

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        kv = self.arch.kv_heads
        out = []
        for one_query, one in zip(query.split(self.lengths), key_value.split(self.lengths), strict=True):
            one = one.transpose(0, 1)
            out.append(attend_causally(one_query, one[:kv], one[kv:], None).permute(2, 0, 1, 3).flatten(1))
        return torch.cat(out)


def attend_causally(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """query [rows, groups, kv_heads, head_dim], key and value [kv_heads, tokens, head_dim] -> [groups, kv_heads, rows,
    head_dim]. Without a mask the rows are the tokens."""
    groups = query.shape[1]
    return F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.expand(groups, -1, -1, -1),
        value.expand(groups, -1, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=1.0,
    )


def attend_partly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over part of the keys, with the log-sum-exp that joins it with other parts.

    query [n, kv_heads, queries, head_dim], key and value [n, kv_heads, tokens, head_dim]
    -> [n, queries, kv_heads, head_dim] and [n, queries, kv_heads], both contiguous.
    """
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=1.0
        )
        return out.transpose(1, 2), lse.transpose(1, 2)
    return attend_partly_anywhere(query, key, value, mask)


def attend_partly_anywhere(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_partly` in operations that every device has."""
    scores = query @ key.transpose(2, 3)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ value
    return out.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()
