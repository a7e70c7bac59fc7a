"""Every end that a pull can come to, as its operation tells it; and what is kept of operations, over restarts too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sakuradite.cluster.journal import MAX_COMPLETED, History, Journal
from sakuradite.cluster.lifecycle import Lifecycle
from sakuradite.errors import InvalidLifecycleError, NotFoundError, ValidationError
from sakuradite.hub.store import Store
from sakuradite.operations import Operation
from tests.hub.conftest import checkpoint, write
from tests.hub.standin import Fault, StandIn

MODEL = "org/tiny"


def lifecycle(home: Path, session: str = "one") -> Lifecycle:
    """The catalog's books, without a cluster: pulls need none."""
    return Lifecycle(Journal(home), home, session, drain=1.0, changed=lambda: None, published=no_routers)


async def no_routers() -> None:
    """There is nobody to tell."""


async def ended(books: Lifecycle, operation_id: str) -> Operation:
    while (operation := books.operation(operation_id)).status in ("pending", "running"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # as an administrator polls
    return operation


def offered(standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())


def gated(standin: StandIn) -> None:
    standin.add(MODEL, checkpoint(), gated=True)


def pickled(standin: StandIn) -> None:
    standin.add(MODEL, {"config.json": b"{}", "pytorch_model.bin": b"x"})


def huge(standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    standin.claims["model.safetensors"] = 1 << 60


def down(standin: StandIn) -> None:
    standin.faults[f"/api/models/{MODEL}"] = Fault(times=99, status=503)


def nothing(standin: StandIn) -> None:
    pass


@pytest.mark.parametrize(
    ("hub", "options", "status", "code", "status_code", "says"),
    [
        (offered, {}, "succeeded", None, None, ""),
        (nothing, {}, "failed", "model_not_found", 404, "The hub has no model 'org/tiny'"),
        (offered, {"revision": "v9"}, "failed", "model_not_found", 404, "has no revision 'v9'"),
        (gated, {}, "failed", "model_access_denied", 403, "is gated"),
        (pickled, {}, "failed", "unsupported_model", 422, "its weights are pickles"),
        (huge, {}, "failed", "insufficient_storage", 507, "needs 1152921504606"),
        (down, {}, "failed", "hub_unavailable", 502, "answered 503"),
        (offered, {"offline": True}, "failed", "offline_missing", 409, "is neither in the store"),
        (
            offered,
            {"revision": "no such/../revision"},
            "failed",
            "validation_error",
            422,
            "is no branch, tag or commit",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_the_end_of_a_pull(
    home: Path,
    standin: StandIn,
    hub: Callable[[StandIn], None],
    options: dict[str, str | bool],
    status: str,
    code: str | None,
    status_code: int | None,
    says: str,
) -> None:
    hub(standin)
    books = lifecycle(home)
    begun = books.pull(MODEL, options.get("revision"), bool(options.get("offline")))  # type: ignore[arg-type]
    assert (begun.kind, begun.model, begun.status, begun.progress.phase) == ("pull", MODEL, "pending", "pending")
    operation = await ended(books, begun.id)
    assert operation.status == status
    assert operation.finished is not None
    assert operation.finished >= operation.created
    if code is None:
        assert operation.error is None
        assert operation.result == {"model": MODEL, "revision": standin.repositories[MODEL].branches["main"]}
        assert operation.progress.phase == "done"
        assert operation.progress.bytes_done == operation.progress.bytes_total
    else:
        assert operation.error is not None
        assert (operation.error.code, operation.error.status_code) == (code, status_code)
        assert says in operation.error.message
    assert (Store(home).find(MODEL) is not None) is (code is None)
    assert lifecycle(home).operation(begun.id) == operation, "another catalog reads the same from the disk"


async def test_a_pull_of_a_folder_ends_at_once_and_a_path_that_leads_nowhere_begins_nothing(
    home: Path, standin: StandIn, tmp_path: Path
) -> None:
    books = lifecycle(home)
    folder = write(tmp_path / "tiny", checkpoint())
    operation = await ended(books, books.pull(str(folder), None, False).id)
    assert (operation.status, operation.model) == ("succeeded", str(folder))
    with pytest.raises(ValidationError):
        books.pull("not an id", None, False)
    assert list(books.operations) == [operation.id]


def hold(standin: StandIn) -> threading.Event:
    """Let downloads of weights wait for the event, which is set at the end of the test in any case."""
    go = threading.Event()
    standin.before_send = lambda name: None if name != "model.safetensors" else (go.wait(30), None)[1]
    return go


async def running(books: Lifecycle, operation_id: str) -> Operation:
    while (operation := books.operation(operation_id)).progress.phase != "downloading":
        assert operation.status in ("pending", "running")
        await asyncio.sleep(0.01)
    return operation


async def test_while_it_runs_it_tells_bytes_and_the_same_pull_is_the_same_operation(
    home: Path, standin: StandIn
) -> None:
    commit = standin.add(MODEL, checkpoint())
    go = hold(standin)
    books = lifecycle(home)
    begun = books.pull(MODEL, None, False)
    operation = await running(books, begun.id)
    assert operation.status == "running"
    assert operation.finished is None
    assert (operation.progress.bytes_total or 0) > 40_000
    assert (operation.progress.bytes_done or 0) < 40_000
    assert books.pull(MODEL, None, False).id == begun.id
    other = books.pull(MODEL, commit, False)
    assert other.id != begun.id
    with pytest.raises(InvalidLifecycleError, match="org/tiny is being downloaded"):
        await books.remove(MODEL)
    go.set()
    assert (await ended(books, begun.id)).status == (await ended(books, other.id)).status == "succeeded"
    assert len(standin.downloads("model.safetensors")) == 1
    anew = books.pull(MODEL, None, False)
    assert anew.id != begun.id
    await ended(books, anew.id)
    await books.remove(MODEL)
    assert list(Store(home).list()) == []


async def test_cancelled_by_a_shutdown_and_taken_up_where_it_ended(home: Path, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    go = hold(standin)
    books = lifecycle(home)
    begun = books.pull(MODEL, None, False)
    await running(books, begun.id)
    await books.close()
    operation = books.operation(begun.id)
    assert operation.status == "cancelled"
    assert operation.error is not None
    assert (operation.error.code, operation.error.status_code) == ("cancelled", 409)
    with pytest.raises(InvalidLifecycleError, match="shutting down"):
        books.pull(MODEL, None, False)
    go.set()
    again = lifecycle(home, "two")
    assert again.operation(begun.id) == operation
    assert (await ended(again, again.pull(MODEL, None, False).id)).status == "succeeded"


async def test_cut_off_by_a_crash(home: Path, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    go = hold(standin)
    books = lifecycle(home)
    begun = books.pull(MODEL, None, False)
    await running(books, begun.id)
    after = lifecycle(home, "another Ray session")
    operation = after.operation(begun.id)
    assert operation.status == "failed"
    assert operation.error is not None
    assert (operation.error.code, operation.error.status_code) == ("interrupted", 503)
    assert operation.error.message == "cut off when the daemon ended; start it again"
    go.set()
    await ended(books, begun.id)


async def test_a_new_catalog_of_the_same_cluster_goes_on_with_a_pull(home: Path, standin: StandIn) -> None:
    commit = standin.add(MODEL, checkpoint(), branch="v1")
    begun = Operation(id="op_1", kind="pull", model=MODEL, status="running", result={"key": f"{MODEL}@v1"})
    journal = Journal(home)
    state, _ = journal.read()
    journal.write_state(state.model_copy(update={"session": "one"}))
    journal.write_history(History(operations=[begun]))
    operation = await ended(lifecycle(home), "op_1")
    assert (operation.status, operation.result) == ("succeeded", {"model": MODEL, "revision": commit})


async def test_the_latest_256_completed_ones_and_all_others_are_kept(home: Path, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    go = hold(standin)
    books = lifecycle(home)
    first = books.pull(MODEL, None, False)
    await running(books, first.id)
    made = []
    for n in range(MAX_COMPLETED + 10):
        made.append(books.pull(f"org/m{n}", None, True).id)
        await ended(books, made[-1])
    for old in made[:10]:
        with pytest.raises(NotFoundError, match="the latest 256 completed ones are kept"):
            books.operation(old)
    assert [o.id for o in books.operations.values()] == [first.id, *made[10:]]
    assert books.operation(first.id).status == "running"
    assert set(lifecycle(home).operations) == {first.id, *made[10:]}
    go.set()
    await ended(books, first.id)
    assert [o.id for o in books.operations.values()] == [first.id, *made[11:]]
