"""The queue of a model: rows of all waiting requests, taken in bounded batches.

Two lanes share every batch. Requests of a few short rows go first come, first served; larger ones take turns of a
share of a batch each. While both wait, each has at least half of what is computed: so a single question is in the next
batch or the one after, however long the others are, and a flood of single questions does not starve the long ones.
Nothing waits for company: whatever is there when a forward ends makes the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sakuradite.engine.backend import Layout, Prefix, Row
from sakuradite.engine.plan import PlannedQuestion

MAX_PADDING = (
    1.25  # computed over real tokens; on a CPU 16 rows of 180-930 tokens padded together took 2.6 times as long
)
BATCHES_BEFORE_GROWTH = 64  # a try that is too large costs a forward, so it is rare
SHARE = 4  # a request within this part of a batch is small; larger ones compute about so much in a turn
MAX_PASSED_OVER = 64  # requests looked at that do not fit a batch, before it is sent off as it is


@dataclass(slots=True, eq=False)
class Task:
    """One row that waits for its forward."""

    work: Work
    question: PlannedQuestion
    number: int
    """Which of the question's rows."""


@dataclass(slots=True, eq=False)
class Work:
    """What one request has to be done. `gone` once nobody waits for it; `deadline` by the monotonic clock."""

    deadline: float = float("inf")
    gone: bool = False
    tasks: deque[Task] = field(default_factory=deque)
    turn: int = 0
    """Tokens taken in its present turn."""


class Load:
    """What one forward would compute, as rows are added: the cost model of R11.7 for each layout."""

    def __init__(self, layout: Layout, head: int, max_rows: int, max_tokens: int) -> None:
        self._layout = layout
        self._head = head
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._prefixes: set[int] = set()
        self._longest = 0
        self._real = 0
        self._prefix_tokens = 0
        self.rows = 0
        self.tokens = 0
        """Tokens computed, padding included."""
        self.prompt = 0
        """Tokens of the rows' whole prompts."""

    @property
    def padding(self) -> int:
        """Of the tokens computed, those that belong to no row."""
        return self.tokens - self._prefix_tokens - self._real

    def add(self, prefix: Prefix, row: Row) -> int | None:
        """Take the row in and return the tokens it adds for itself, or None when it does not fit. A first row fits."""
        if self.rows >= self._max_rows:
            return None
        length = len(row.suffix)
        shared = 0
        if self._layout == "padded":
            length += len(prefix.tokens)
        elif id(prefix) not in self._prefixes and prefix.cache is None:
            shared = max(0, len(prefix.tokens) - self._head)  # a row with images has no prefix
        rows, real = self.rows + 1, self._real + length
        longest = max(self._longest, length)
        prefixes = self._prefix_tokens + shared
        laid_out = real if self._layout == "packed" else rows * longest
        if self.rows and (prefixes + laid_out > self._max_tokens or laid_out > MAX_PADDING * real):
            return None
        self._prefixes.add(id(prefix))
        self._prefix_tokens, self._real, self._longest = prefixes, real, longest
        self.rows, self.tokens = rows, prefixes + laid_out
        self.prompt += len(prefix.tokens) + len(row.suffix)
        return shared + length


class Queue:
    """Waiting work. `max_tokens` bounds a batch's computed tokens; a longer row runs alone."""

    def __init__(self, layout: Layout, head: int, max_rows: int, max_tokens: int) -> None:
        self.layout = layout
        self.head = head
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.budget = max_tokens
        """Tokens of a batch for now: lower than `max_tokens` for a while after one did not fit the device."""
        self._fitted = 0
        self.taken = Load(layout, head, max_rows, max_tokens)
        """What the batch taken last computes."""
        self._small: deque[Work] = deque()
        self._large: deque[Work] = deque()
        self._small_leads = True

    def __len__(self) -> int:
        """Requests with waiting rows (some of which may be gone)."""
        return len(self._small) + len(self._large)

    def add(self, work: Work, questions: Iterable[PlannedQuestion]) -> None:
        """Put the rows of a compiled request into the queue."""
        tasks = [Task(work, question, number) for question in questions for number in range(len(question.rows))]
        if not tasks:
            return
        if len(tasks) > 1 and self.layout != "packed":  # rows of like length side by side: less padding
            tasks.sort(key=self._length)
        work.tasks.extend(tasks)
        load = Load(self.layout, self.head, max(1, self.max_rows // SHARE), max(1, self.max_tokens // SHARE))
        small = all(load.add(task.question.prefix, task.question.rows[task.number]) is not None for task in tasks)
        (self._small if small and load.tokens <= self.max_tokens // SHARE else self._large).append(work)

    def take(self, now: float) -> list[Task]:
        """The next batch, empty when nothing waits. Work that is gone or past its deadline is dropped unserved."""
        load = Load(self.layout, self.head, self.max_rows, self.budget)
        batch: list[Task] = []
        lead, other = (self._small, self._large) if self._small_leads else (self._large, self._small)
        if lead and other:
            self._small_leads = not self._small_leads
            self._fill(batch, load, lead, now, self.max_rows // 2, self.budget // 2)
            self._fill(batch, load, other, now, self.max_rows, self.budget)
        self._fill(batch, load, lead or other, now, self.max_rows, self.budget)
        self.taken = load
        return batch

    def shrink(self) -> None:
        """The batch taken last did not fit the device: make the next ones half as large."""
        self.budget = max(1, min(self.budget, self.taken.tokens // 2))
        self._fitted = 0

    def fitted(self) -> None:
        """The batch taken last fitted. After some of these in a row a shrunk budget grows again."""
        if self.budget < self.max_tokens:
            self._fitted += 1
            if self._fitted >= BATCHES_BEFORE_GROWTH:
                self.budget, self._fitted = min(self.max_tokens, 2 * self.budget), 0

    def _fill(
        self, batch: list[Task], load: Load, lane: deque[Work], now: float, max_rows: int, max_tokens: int
    ) -> None:
        """Put rows of a lane into the batch until it has `max_rows` or `max_tokens`, at least one into an empty one."""
        passed_over: list[Work] = []
        while lane and len(passed_over) < MAX_PASSED_OVER:
            if batch and (load.rows >= max_rows or load.tokens >= max_tokens):
                break
            work = lane.popleft()
            if work.gone or work.deadline <= now:
                continue
            tasks, taken = work.tasks, False
            while tasks and not (batch and (load.rows >= max_rows or load.tokens >= max_tokens)):
                added = load.add(tasks[0].question.prefix, tasks[0].question.rows[tasks[0].number])
                if added is None:
                    break
                batch.append(tasks.popleft())
                taken = True
                work.turn += added
                if lane is self._large and work.turn * SHARE >= self.budget:
                    break
            if not tasks:
                continue
            if lane is self._large and work.turn * SHARE >= self.budget:
                work.turn = 0
                lane.append(work)
            elif taken:
                passed_over.append(work)  # its turn goes on in the next batch
                break
            else:
                passed_over.append(work)
        lane.extendleft(reversed(passed_over))

    def _length(self, task: Task) -> int:
        suffix = len(task.question.rows[task.number].suffix)
        return suffix + len(task.question.prefix.tokens) if self.layout == "padded" else suffix
