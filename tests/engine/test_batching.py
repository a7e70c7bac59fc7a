"""The queue: budgets, padding, fairness, and rows that nobody waits for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sakuradite.engine.backend import Layout, Prefix, Read, Row
from sakuradite.engine.batching import MAX_PADDING, Queue, Task, Work
from sakuradite.engine.labels import Labels
from sakuradite.engine.plan import PlannedQuestion

LABELS = Labels(("A",), (), ((0,),))
HEAD = 10
LAYOUTS: tuple[Layout, ...] = ("packed", "cloned", "padded")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def questions(state: int, *lengths: int) -> list[PlannedQuestion]:
    """Questions of these lengths on a state of so many tokens."""
    prefix = Prefix((0,) * (HEAD + state))
    row = [Row((0,) * length, (Read(length - 1, (0,)),)) for length in lengths]
    return [PlannedQuestion(i, prefix, (r,), LABELS, len(prefix.tokens) + len(r.suffix)) for i, r in enumerate(row)]


def queue(layout: Layout = "packed", rows: int = 16, tokens: int = 1000) -> Queue:
    return Queue(layout, HEAD, rows, tokens)


def served(batch: list[Task]) -> dict[int, int]:
    """Rows by request."""
    count: dict[int, int] = {}
    for task in batch:
        count[id(task.work)] = count.get(id(task.work), 0) + 1
    return count


def computed(layout: Layout, batch: list[Task], cached: set[int]) -> int:
    """What a backend computes for a batch, padding included, counted anew."""
    prefixes = {id(t.question.prefix): len(t.question.prefix.tokens) for t in batch}
    suffixes = [len(t.question.rows[t.number].suffix) for t in batch]
    shared = sum(length - HEAD for key, length in prefixes.items() if key not in cached)
    if layout == "packed":
        return shared + sum(suffixes)
    if layout == "cloned":
        return shared + len(batch) * max(suffixes)
    whole = [len(t.question.prefix.tokens) + n for t, n in zip(batch, suffixes, strict=True)]
    return len(batch) * max(whole)


@layouts
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 400), st.lists(st.integers(1, 120), min_size=1, max_size=12)), min_size=1, max_size=12
    )
)
def test_no_batch_is_over_its_budget_and_every_row_comes_once(
    layout: Layout, requests: list[tuple[int, list[int]]]
) -> None:
    waiting = queue(layout, rows=8, tokens=500)
    asked = []
    for state, lengths in requests:
        mine = questions(state, *lengths)
        asked += mine
        waiting.add(Work(), mine)
    cached: set[int] = set()
    came: list[PlannedQuestion] = []
    while batch := waiting.take(0.0):
        assert len(batch) <= 8
        assert len(batch) == 1 or computed(layout, batch, cached) <= 500
        if layout != "packed" and len(batch) > 1:
            sizes = [
                len(t.question.rows[0].suffix) + (len(t.question.prefix.tokens) if layout == "padded" else 0)
                for t in batch
            ]
            assert len(sizes) * max(sizes) <= MAX_PADDING * sum(sizes)
        for task in batch:
            task.question.prefix.cache = "computed"
            cached.add(id(task.question.prefix))
            came.append(task.question)
    assert len(came) == len(asked)
    assert {id(q) for q in came} == {id(q) for q in asked}


@pytest.mark.parametrize(("layout", "within"), [("packed", 1), ("cloned", 2), ("padded", 2)])
def test_a_short_request_is_not_kept_waiting_however_long_the_others_are(layout: Layout, within: int) -> None:
    """It is in the next batch; where padding keeps rows of other lengths apart, in the one after at the latest."""
    for before in range(8):
        waiting = queue(layout)
        for _ in range(5):
            waiting.add(Work(), questions(300, *[60] * 400))
        for _ in range(before):
            waiting.take(0.0)
        short = Work()
        waiting.add(short, questions(50, 20))
        assert any(id(short) in served(waiting.take(0.0)) for _ in range(within))


@layouts
def test_a_long_request_is_not_starved_by_a_stream_of_short_ones(layout: Layout) -> None:
    waiting = queue(layout)
    long = Work()
    waiting.add(long, questions(300, *[60] * 40))
    batches = 0
    while long.tasks and batches < 60:
        batches += 1
        for _ in range(20):  # always more than a batch of them
            waiting.add(Work(), questions(50, 20))
        for task in waiting.take(0.0):
            task.question.prefix.cache = "computed"
    assert not long.tasks
    # 40 rows: half of the 16 rows of a batch in packed layout, half of the batches of 2 whole rows in padded layout
    assert batches <= {"packed": 8, "cloned": 12, "padded": 40}[layout]


def test_long_requests_take_turns() -> None:
    waiting = queue()
    works = [Work() for _ in range(3)]
    for work in works:
        waiting.add(work, questions(100, *[60] * 100))
    rows = {id(work): 0 for work in works}
    for _ in range(12):
        for task in waiting.take(0.0):
            task.question.prefix.cache = "computed"
            rows[id(task.work)] += 1
    assert sum(rows.values()) > 11 * 15
    assert max(rows.values()) - min(rows.values()) <= 5  # a turn: 250 tokens


def test_requests_of_one_length_are_served_in_the_order_they_came() -> None:
    waiting = queue(rows=2)
    works = [Work() for _ in range(6)]
    for work in works:
        waiting.add(work, questions(50, 20))
    order = []
    while batch := waiting.take(0.0):
        order += [task.work for task in batch]
    assert order == works


def test_rows_of_waiting_requests_share_a_batch() -> None:
    waiting = queue(tokens=4000)
    for _ in range(16):
        waiting.add(Work(), questions(50, 20))
    assert len(waiting.take(0.0)) == 16


def test_the_prefix_counts_once_and_not_at_all_when_it_is_kept() -> None:
    waiting = queue(tokens=1000)
    work = Work()
    waiting.add(work, questions(600, *[100] * 12))
    first = waiting.take(0.0)
    assert len(first) == 4
    first[0].question.prefix.cache = "computed"
    assert len(waiting.take(0.0)) == 8


def test_a_row_longer_than_the_budget_runs_alone() -> None:
    waiting = queue(tokens=500)
    waiting.add(Work(), questions(50, 20))
    waiting.add(Work(), questions(3000, 20))
    waiting.add(Work(), questions(50, 20))
    sizes = []
    while batch := waiting.take(0.0):
        sizes.append([len(task.question.prefix.tokens) for task in batch])
    assert sorted(map(len, sizes)) == [1, 2]
    assert [HEAD + 3000] in sizes


def test_padded_batches_hold_rows_of_like_length() -> None:
    waiting = queue("padded", tokens=100_000)
    for state in (100, 900, 105, 880, 95, 910):
        waiting.add(Work(), questions(state, 20))
    lengths = []
    while batch := waiting.take(0.0):
        lengths.append({len(task.question.prefix.tokens) - HEAD for task in batch})
    assert lengths == [{100, 105, 95}, {900, 880, 910}]


@layouts
def test_rows_that_nobody_waits_for_are_dropped(layout: Layout) -> None:
    waiting = queue(layout)
    gone, late, here = Work(), Work(deadline=5.0), Work(deadline=6.0)
    for work in (gone, late, here):
        waiting.add(work, questions(50, 20, 20))
    gone.gone = True
    batch = waiting.take(5.0)
    assert {id(task.work) for task in batch} == {id(here)}
    assert not waiting.take(5.0)
    assert not len(waiting)


def test_a_batch_that_did_not_fit_makes_the_next_ones_smaller_for_a_while() -> None:
    waiting = queue(rows=1000, tokens=1000)
    waiting.add(Work(), questions(0, *[10] * 8000))
    assert len(waiting.take(0.0)) == 100
    waiting.shrink()
    assert len(waiting.take(0.0)) == 50
    for _ in range(64):
        waiting.fitted()
    assert len(waiting.take(0.0)) == 100
