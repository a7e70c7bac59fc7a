"""The queue of a model: rows of all waiting requests, taken in bounded batches.

Fair by start-time fair queueing: a request's turn comes by the tokens it has been served, and a new request starts
level with the one whose turn it is. So a short request goes into the next batch however long the others are, and a
long one keeps its share; long ones among themselves take turns of a batch each. Nothing waits for company: whatever is
there when a forward ends makes the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from sakuradite.engine.backend import Layout, Prefix, Row
from sakuradite.engine.plan import PlannedQuestion

MAX_PADDING = (
    1.25  # computed over real tokens; on a CPU 16 rows of 180-930 tokens padded together took 2.6 times as long
)
BATCHES_BEFORE_GROWTH = 64  # a try that is too large costs a forward, so it is rare
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
    served: float = 0.0
    """Its place in the fair order: tokens served, counted from where the queue stood when it came."""


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

    def add(self, prefix: Prefix, row: Row) -> int | None:
        """Take the row in and return the tokens it adds for itself, or None when it does not fit. A first row fits."""
        if self.rows >= self._max_rows:
            return None
        length = len(row.suffix)
        shared = 0
        if self._layout == "padded":
            length += len(prefix.tokens)
        elif id(prefix) not in self._prefixes and prefix.cache is None:
            shared = len(prefix.tokens) - self._head
        rows, real = self.rows + 1, self._real + length
        longest = max(self._longest, length)
        prefixes = self._prefix_tokens + shared
        laid_out = real if self._layout == "packed" else rows * longest
        if self.rows and (prefixes + laid_out > self._max_tokens or laid_out > MAX_PADDING * real):
            return None
        self._prefixes.add(id(prefix))
        self._prefix_tokens, self._real, self._longest = prefixes, real, longest
        self.rows, self.tokens = rows, prefixes + laid_out
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
        self._batch_tokens = 0
        self._heap: list[tuple[float, int, Work]] = []
        self._order = count()
        self._now = 0.0  # the fair order's clock: where the request stood whose turn came last

    def __len__(self) -> int:
        """Requests with waiting rows (some of which may be gone)."""
        return len(self._heap)

    def add(self, work: Work, questions: Iterable[PlannedQuestion]) -> None:
        """Put the rows of a compiled request into the queue."""
        tasks = [Task(work, question, number) for question in questions for number in range(len(question.rows))]
        if self.layout != "packed":  # rows of like length side by side: less padding
            tasks.sort(key=self._length)
        work.tasks.extend(tasks)
        work.served = self._now
        heappush(self._heap, (work.served, next(self._order), work))

    def take(self, now: float) -> list[Task]:
        """The next batch, empty when nothing waits. Work that is gone or past its deadline is dropped unserved."""
        load = Load(self.layout, self.head, self.max_rows, self.budget)
        batch: list[Task] = []
        passed_over: list[tuple[float, int, Work]] = []
        heap = self._heap
        while heap and load.rows < self.max_rows and len(passed_over) < MAX_PASSED_OVER:
            entry = heappop(heap)
            work = entry[2]
            if work.gone or work.deadline <= now:
                continue
            if not batch:
                self._now = work.served
            fitted = True
            while work.tasks:
                task = work.tasks[0]
                added = load.add(task.question.prefix, task.question.rows[task.number])
                if added is None:
                    fitted = False
                    break
                work.tasks.popleft()
                batch.append(task)
                work.served += added
                if heap and work.served > heap[0][0] + self.budget:
                    break
            if work.tasks:
                place = (work.served, entry[1], work)
                if fitted:
                    heappush(heap, place)
                else:
                    passed_over.append(place)
        for place in passed_over:
            heappush(heap, place)
        self._batch_tokens = load.tokens
        return batch

    def shrink(self) -> None:
        """The batch taken last did not fit the device: make the next ones half as large."""
        self.budget = max(1, min(self.budget, self._batch_tokens // 2))
        self._fitted = 0

    def fitted(self) -> None:
        """The batch taken last fitted. After some of these in a row a shrunk budget grows again."""
        if self.budget < self.max_tokens:
            self._fitted += 1
            if self._fitted >= BATCHES_BEFORE_GROWTH:
                self.budget, self._fitted = min(self.max_tokens, 2 * self.budget), 0

    def _length(self, task: Task) -> int:
        suffix = len(task.question.rows[task.number].suffix)
        return suffix + len(task.question.prefix.tokens) if self.layout == "padded" else suffix
