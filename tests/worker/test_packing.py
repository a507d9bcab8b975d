from hypothesis import given
from hypothesis import strategies as st

from aglite.worker.packing import build_forest, plan_rows, row_by_row

rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(rows)
def test_a_forest_has_one_node_for_each_distinct_prefix(rows):
    forest = build_forest(rows)
    assert len(forest.ids) == len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
    for row, path, (first, end, shared) in zip(rows, forest.paths, forest.spans, strict=True):
        assert [forest.ids[node] for node in path] == row
        assert [forest.positions[node] for node in path] == list(range(len(row)))
        assert path[shared:] == list(range(first, end))
    assert sorted(node for first, end, _ in forest.spans for node in range(first, end)) == list(range(len(forest.ids)))


@given(rows, st.integers(1, 30))
def test_a_plan_holds_every_row_once_within_the_budget(rows, budget):
    plan = plan_rows(rows, budget)
    assert sorted(index for part in plan for index in part) == list(range(len(rows)))
    for part in plan:
        size = len(build_forest([rows[index] for index in part]).ids)
        assert size <= budget or len(part) == 1 or len({tuple(rows[index]) for index in part}) == 1


def test_rows_of_one_prompt_stay_together():
    prompts = [[1] * 20, [2] * 20]
    mixed = [prompts[i % 2] + [3 + i] * 4 for i in range(8)]
    plan = plan_rows(mixed, 40)
    assert sorted(map(sorted, plan)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@given(rows, st.integers(1, 30))
def test_rows_that_share_nothing_follow_each_other(rows, budget):
    for part in (parts := plan_rows(rows, budget, shared=False)):
        members = [rows[index] for index in part]
        forest = row_by_row(members)
        assert len(forest.ids) == sum(map(len, members)) <= max(budget, len(members[0]))
        for row, path, span in zip(members, forest.paths, forest.spans, strict=True):
            assert [forest.ids[node] for node in path] == row
            assert [forest.positions[node] for node in path] == list(range(len(row)))
            assert path == list(range(*span[:2])) and span[2] == 0
    assert sorted(index for part in parts for index in part) == list(range(len(rows)))
