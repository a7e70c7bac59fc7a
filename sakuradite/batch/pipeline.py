"""The Ray Data pipeline of a job: one reader beside the driver, a pool of replicas, results as they come.

    reader (1 actor, on the driver's node)  ->  replicas (N actors, anywhere)  ->  the driver, which writes

Only the driver's node needs the files. Ray Data holds the reader back when replicas are busy, restarts replicas that
die and gives their parts to others. A part whose replica died TRIES times does not come back at all.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sakuradite.batch.parts import Part, parts, single
from sakuradite.batch.replica import Asked, Replica
from sakuradite.batch.source import Source
from sakuradite.config import ModelConfig
from sakuradite.errors import InternalError, SakuraditeError

if TYPE_CHECKING:
    import pyarrow

RETRIES = 2  # of a part whose replica died; then its rows go one by one
CALLS = 2  # parts in a replica at once: one is decided while the next comes and the last leaves
IN_FLIGHT = 3  # parts sent to a replica: one more waits at its door
READ_AHEAD = 16
"""Parts that the reader may be ahead of the driver. With Ray Data's own 2 the replicas got no more than 13 a second."""
NODE_ID = "ray.io/node-id"  # Ray's own label of a node


class Result(NamedTuple):
    """What became of rows that travelled together: their fields as JSON, how many are errors, the tokens read."""

    part: int
    first: int
    fields: list[bytes]
    errors: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """What the reader reads: parts of `size` rows but for those that are `done`; or, `alone`, each row of `only`."""

    source: Source
    size: int
    asked: Asked
    done: Container[int] = ()
    only: Container[int] = ()
    alone: bool = False

    def parts(self) -> Iterator[Part]:
        column = self.asked.column
        cut = parts(self.source.rows(None if column is None else [column]), self.size)
        if self.alone:
            return single(cut, self.only)
        return (part for part in cut if part.number not in self.done)

    def blocks(self) -> Iterator[pyarrow.Table]:
        """A block of one row for each part. What keeps the file from being read travels as a block too."""
        try:
            for part in self.parts():
                yield _block(part.number, part.first, [r.data for r in part.rows], [r.problem for r in part.rows])
        except SakuraditeError as error:
            yield _block(-1, 0, [], [], pickle.dumps(error))
        except Exception as error:  # raised, Ray Data would take it for a part to do without
            failure = InternalError(f"reading failed: {type(error).__name__}: {error}")
            yield _block(-1, 0, [], [], pickle.dumps(failure))


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas: how many (least, most), what each asks of Ray (`options`), and the threads that each may use."""

    config: ModelConfig
    home: str
    replicas: tuple[int, int]
    options: dict[str, Any]
    threads: float | None


def run(work: Work, pool: Pool) -> Iterator[Result]:
    """Results in any order, on the connected Ray. Raises the failure that ends the job; closing it stops everything."""
    with _context():
        import ray.data

        reader = ray.data.read_datasource(
            _datasource(work.blocks),
            override_num_blocks=1,
            num_cpus=0,
            compute=ray.data.ActorPoolStrategy(size=1),
            label_selector={NODE_ID: ray.get_runtime_context().get_node_id()},
        )
        results = reader.map_batches(
            Replica,
            fn_constructor_args=(pool.config, pool.home, work.asked, pool.threads),
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                min_size=pool.replicas[0],
                max_size=pool.replicas[1],
                max_tasks_in_flight_per_actor=1 if work.alone else IN_FLIGHT,
                max_concurrent_calls_per_actor=1 if work.alone else CALLS,
                enable_true_multi_threading=True,
            ),
            max_task_retries=RETRIES,
            **pool.options,
        )
    for block in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield from _results(block)


def _results(block: pyarrow.Table) -> Iterable[Result]:
    for row in block.to_pylist():
        if row["failure"] is not None:
            raise pickle.loads(row["failure"])
        yield Result(row["part"], row["first"], row["results"], row["errors"], row["tokens"])


def _block(
    number: int, first: int, data: list[bytes], problems: list[str], failure: bytes | None = None
) -> pyarrow.Table:
    import pyarrow as pa

    return pa.table(
        {
            "part": [number],
            "first": [first],
            "data": pa.array([data], pa.list_(pa.large_binary())),
            "problems": pa.array([problems], pa.list_(pa.string())),
            "failure": pa.array([failure], pa.large_binary()),
        }
    )


def _datasource(blocks: Callable[[], Iterator[pyarrow.Table]]) -> Any:
    """Ray Data's view of one stream of blocks."""
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask

    class Stream(Datasource):  # type: ignore[misc]
        def get_read_tasks(self, *_: Any, **__: Any) -> list[Any]:
            return [ReadTask(blocks, BlockMetadata(None, None, None, None))]

        def estimate_inmemory_data_size(self) -> None:
            return None

    return Stream()


@contextmanager
def _context() -> Iterator[None]:
    """Ray Data's settings for a job of ours, quiet; the program's own are put back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of its own defaults, fatal under `python -W error`
        from ray.data import DataContext

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # each failure is told by us, in a line
        context = DataContext.get_current().copy()
        context.enable_progress_bars = False
        context.target_max_block_size = 1  # byte: each part is a block of its own, however small
        context.max_errored_blocks = -1  # a part that kills its replicas ends nothing; its rows go again, one by one
        _set_read_ahead(context, READ_AHEAD)
        with DataContext.current(context):
            yield


def _set_read_ahead(context: Any, blocks: int) -> None:
    """How many blocks a task may be ahead of what was taken from it. A private name of Ray's; a test watches it."""
    context._max_num_blocks_in_streaming_gen_buffer = blocks
