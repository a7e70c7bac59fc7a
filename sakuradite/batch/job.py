"""`run`: decide on every row of a file, over replicas on Ray, with everything that is done kept as it is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sakuradite.batch.folder import COMPLETE, Folder, landing
from sakuradite.batch.manifest import check_columns, check_kept, check_same, layout, made_from
from sakuradite.batch.output import Output
from sakuradite.batch.pipeline import Pool, Result, Work
from sakuradite.batch.pipeline import run as run_pipeline
from sakuradite.batch.replica import Asked, error_fields
from sakuradite.batch.source import Source, file_format, other_than_file
from sakuradite.client.embedded import require_backend
from sakuradite.client.request import check_questions
from sakuradite.config import ModelConfig, home_directory
from sakuradite.errors import ConfigurationError, InferenceFailedError, MissingExtraError, ReplicaUnavailableError
from sakuradite.questions import Questions

ROW_SECONDS = 3600.0  # deadline of a row: a forward that hangs should end, a slow machine should not be an error
BATCHES_AHEAD = 4  # rows that wait in a replica, as a multiple of max_batch_size, so that batches can be mixed
NO_USAGE = "RAY_DATA_USAGE_DISABLED"  # else Ray Data starts an actor that collects statistics of use
NO_LIMIT = 1 << 40  # bytes of waiting rows; the part's own limit bounds them already


@dataclass(slots=True)
class Progress:
    """How far a job is. `phase` is reading, starting, deciding, repeating (rows whose replica died) or writing."""

    phase: str = "reading"
    total: int | None = None
    """Rows of the input, once they are counted."""
    done: int = 0
    resumed: int = 0
    """Rows of those that an earlier run had done."""
    errors: int = 0
    input_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a job came to. `errors` of the `rows` have an error in place of answers."""

    output: str
    rows: int
    errors: int
    resumed: int
    input_tokens: int
    seconds: float


type Report = Callable[[Progress], None]


def run(
    source: Path | str,
    target: Path | str,
    questions: Questions,
    model: str | ModelConfig,
    *,
    address: str | None = None,
    state_column: str | None = None,
    whole_row: bool = False,
    keep: Sequence[str] | None = None,
    restart: bool = False,
    home: Path | str | None = None,
    report: Report = lambda progress: None,
) -> Summary:
    """Decide on every row of `source` and write `target`, each a .jsonl, .csv or .parquet file.

    The state is the column `state_column`; without one the column `state` where the input has it, else the whole row;
    always with `whole_row`. Of the input the columns of `keep` stand in the output, by default all. A ModelConfig says
    how many replicas there are and what each gets. `address` names a Ray cluster to join ("auto"), else Ray is
    started here for the time of the job.

    What is done is kept beside the output in a folder `TARGET.batch`, and the same call goes on with it, also after a
    kill -9; with `restart` it begins anew. A row that cannot be decided has an error in the output. `report` is
    called with the same Progress each time it changed. Blocks until the output is there.

    Raises ConfigurationError for an input, an output or a job that cannot be what was meant, ValidationError for the
    questions, InvalidLifecycleError while another process works on the same output, InsufficientStorageError, what
    keeps the model from loading, MissingExtraError.
    """
    _require(address, config := model if isinstance(model, ModelConfig) else ModelConfig(model=model))
    if whole_row and state_column is not None:
        raise ConfigurationError(f"decide on the column {state_column!r} or on the whole row, not on both")
    kept = None if keep is None else list(dict.fromkeys(keep))
    job = Job(Source(Path(source).expanduser()), Path(target).expanduser().absolute(), questions, config, kept, report)
    return job.run(address, state_column, whole_row, restart, home_directory(home)[0])


def _require(address: str | None, config: ModelConfig) -> None:
    if not all(find_spec(module) for module in ("ray", "pyarrow", "pandas")):
        raise MissingExtraError("Bulk work", "batch")
    if address is None:
        require_backend(config.backend)


@dataclass
class Job:
    """One run of a job."""

    source: Source
    target: Path
    questions: Questions
    config: ModelConfig
    keep: list[str] | None
    report: Report
    progress: Progress = field(default_factory=Progress)

    def run(self, address: str | None, column: str | None, whole_row: bool, restart: bool, home: Path) -> Summary:
        """All of it. See `run`."""
        clock = time.monotonic()
        self._check()
        folder = Folder(self.target)
        begun = folder.open(restart)
        try:
            self._tell("reading")
            manifest = self._manifest(folder, begun, column, whole_row)
            if (summary := manifest.get(COMPLETE)) is not None:  # killed while it tidied up
                folder.remove()
                return Summary(**summary)
            done = self._resume(folder, manifest["rows"])
            if self.progress.done < manifest["rows"]:
                asked = Asked(_plain_questions(self.checked), manifest["state"])
                work = Work(self.source, manifest["part_rows"], asked, done)
                self._tell("starting")
                parts = -(-(manifest["rows"] - self.progress.done) // work.size)
                with _ray(address):
                    self._decide(folder, work, _pool(self.config, home, address is None, parts))
            self._tell("writing")
            output = Output(self.source, self.target, self.checked, self.keep, manifest["columns"])
            output.write(folder.output, folder.lines(), manifest["rows"], manifest["input"])
            made, seconds = self.progress, round(time.monotonic() - clock, 3)
            found = Summary(str(self.target), made.done, made.errors, made.resumed, made.input_tokens, seconds)
            folder.finish({**manifest, COMPLETE: asdict(found)})
        finally:
            folder.release()
        return found

    def _check(self) -> None:
        """What can be refused before anything is read or made."""
        self.source.check()
        check_kept(self.source, self.keep)
        if found := other_than_file(self.target):
            raise ConfigurationError(f"{self.target}: is {found}; the output has to be a file, which is made whole")
        file_format(self.target)
        if not (parent := landing(self.target).parent).is_dir():
            raise ConfigurationError(f"{parent}: no such folder")
        if self.target.exists() and self.target.samefile(self.source.path):
            raise ConfigurationError(f"{self.target}: is the input")
        self.checked, _ = check_questions(self.questions)

    def _manifest(
        self, folder: Folder, begun: Mapping[str, Any] | None, column: str | None, whole_row: bool
    ) -> Mapping[str, Any]:
        """What the job is made from; of an earlier run, once it is the same."""
        now = made_from(self.source, _plain_questions(self.checked), self.config, column, whole_row)
        if begun is not None and (COMPLETE not in begun or self.target.exists()):
            check_same(begun, now, folder.path)
            check_columns(begun["columns"], self.checked, self.keep)  # what is kept may have changed
            return begun
        manifest = {**now, **layout(self.source, self.target, self.checked, self.keep)}
        folder.begin(manifest)
        return manifest

    def _resume(self, folder: Folder, rows: int) -> set[int]:
        """Count what an earlier run has done; the numbers of its parts."""
        done, progress = folder.done(), self.progress
        progress.total = rows
        for part_rows, errors, tokens in done.values():
            progress.done += part_rows
            progress.errors += errors
            progress.input_tokens += tokens
        progress.resumed = progress.done
        return set(done)

    def _decide(self, folder: Folder, work: Work, pool: Pool) -> None:
        """Decide on what is not done yet, and keep it."""
        kept = set[int]()
        for result in run_pipeline(work, pool):
            if result.part not in kept:  # nothing is counted twice, whatever Ray repeated
                kept.add(result.part)
                self._keep(folder, result)
        if self.progress.done == self.progress.total:
            return
        left = {part.number: len(part.rows) for part in _left(work, folder).parts()}
        self._tell("repeating")
        pieces: dict[int, dict[int, Result]] = {number: {} for number in left}
        for result in run_pipeline(_alone(work, left), pool):
            found = pieces[result.part]
            found[result.first] = result
            if len(found) == left[result.part]:
                self._keep(folder, _joined(result.part, found, left[result.part]))
                del pieces[result.part]
        for number, found in pieces.items():
            self._keep(folder, _joined(number, found, left[number]))

    def _keep(self, folder: Folder, result: Result) -> None:
        folder.add(result.part, result.fields, result.errors, result.tokens)
        self.progress.done += len(result.fields)
        self.progress.errors += result.errors
        self.progress.input_tokens += result.tokens
        self._tell("repeating" if self.progress.phase == "repeating" else "deciding")

    def _tell(self, phase: str) -> None:
        self.progress.phase = phase
        self.report(self.progress)


def _plain_questions(checked: Mapping[str, Any]) -> dict[str, Any]:
    return {key: question.model_dump(mode="json") for key, question in checked.items()}


def _left(work: Work, folder: Folder) -> Work:
    return Work(work.source, work.size, work.asked, set(folder.done()))


def _alone(work: Work, only: Mapping[int, int]) -> Work:
    return Work(work.source, work.size, work.asked, only=set(only), alone=True)


def _joined(part: int, found: Mapping[int, Result], rows: int) -> Result:
    """A part of rows that went one by one; of those that never came back, the replica died each time."""
    lost = InferenceFailedError("the model's process ended each time it was asked about this row")
    fields = [found[i].fields[0] if i in found else error_fields(lost) for i in range(rows)]
    errors = sum(result.errors for result in found.values()) + rows - len(found)
    return Result(part, 0, fields, errors, sum(result.tokens for result in found.values()))


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """Ray, joined or started for the time of the job. What Ray says of a failure is put in one line."""
    from sakuradite.cluster import local

    before = os.environ.get(NO_USAGE)
    os.environ[NO_USAGE] = "1"
    if address is None:
        local.acquire(cluster=True, serve=False)
    else:
        local.join(address, "Bulk work", "batch", serve=False)
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ReplicaUnavailableError(f"Ray could not go on: {said[-1]}") from error
    finally:
        local.release()
        os.environ.pop(NO_USAGE)
        if before is not None:
            os.environ[NO_USAGE] = before


def _pool(config: ModelConfig, home: Path, here: bool, parts: int) -> Pool:
    """The replicas that a job of so many parts can use, with what each asks of Ray.

    Raises InsufficientResourcesError where the cluster has not even the fewest.
    """
    from sakuradite.cluster.resources import check_resources

    wanted = config.replicas
    bounds = (wanted, wanted) if isinstance(wanted, int) else (max(1, wanted.min), wanted.max)
    least, most = (max(1, min(parts, bound)) for bound in bounds)
    threads = config.num_cpus
    asked = config.model_copy(update={"replicas": least})
    if here:  # this machine is ours alone: its cores are shared out, not scheduled
        if threads is None and most > 1:
            threads = max(1, (os.cpu_count() or 1) // most)
        asked = asked.model_copy(update={"num_cpus": 0.0})
    options = check_resources(asked)
    inside = config.model_copy(
        update={
            "timeout": max(config.timeout, ROW_SECONDS),
            "max_pending_requests": BATCHES_AHEAD * config.max_batch_size,
            "max_pending_bytes": NO_LIMIT,
        }
    )
    return Pool(inside, str(home), (least, most), options, threads)
