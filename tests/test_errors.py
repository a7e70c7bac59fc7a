"""The error tree: every class survives pickling, its record, and names a code of the contract."""

import pickle
import re
from pathlib import Path

import pytest

import sakuradite
from sakuradite import errors
from sakuradite.errors import APIError, ErrorRecord, FieldProblem, MissingExtraError, TransportError, place_of

CONTRACT = {
    "configuration_error": 400,
    "invalid_request": 400,
    "unauthorized": 401,
    "model_access_denied": 403,
    "forbidden": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "invalid_lifecycle": 409,
    "offline_missing": 409,
    "request_too_large": 413,
    "context_exceeded": 413,
    "unsupported_media_type": 415,
    "validation_error": 422,
    "unsupported_model": 422,
    "insufficient_resources": 422,
    "capacity_exceeded": 429,
    "inference_failed": 500,
    "internal_error": 500,
    "hub_unavailable": 502,
    "model_loading": 503,
    "model_load_failed": 503,
    "replica_unavailable": 503,
    "request_timeout": 504,
    "insufficient_storage": 507,
}
CLASSES = APIError.__subclasses__()


def test_every_code_of_the_contract_has_its_class_and_status() -> None:
    found = {c.code: c.status for c in CLASSES}
    assert CONTRACT.items() <= found.items()
    assert set(found) - set(CONTRACT) == {"cancelled", "interrupted"}  # how an operation ends, never a request


def test_impossible_requests_are_never_marked_retryable() -> None:
    assert {c.code for c in CLASSES if c.retryable and c.status < 429} == set()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.code)
def test_an_error_raised_in_a_worker_arrives_as_the_same_class(kind: type[APIError]) -> None:
    detail = (FieldProblem(("body", "questions", "q"), "too long", "too_long"),)
    error = kind("what to do", param="questions.q", detail=detail, retry_after=2.0, request_id="r1")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (
        back.record() == error.record() == ErrorRecord(kind.code, kind.status, "what to do", "questions.q", detail, 2.0)
    )
    assert (str(back), back.request_id, back.retryable) == ("what to do", "r1", kind.retryable)


def test_a_code_of_a_newer_server_is_kept() -> None:
    error = errors.error_from_record(ErrorRecord("teapot", 503, "later"))
    assert (type(error), error.code, error.status, error.retryable) == (APIError, "teapot", 503, True)
    assert pickle.loads(pickle.dumps(error)).record() == error.record()


def test_errors_that_are_no_answers_survive_pickling_too() -> None:
    missing = pickle.loads(pickle.dumps(MissingExtraError("PyTorch", "torch")))
    assert str(missing) == "PyTorch needs the extra [torch]: pip install 'sakuradite[torch]'"
    lost = pickle.loads(pickle.dumps(TransportError("connection refused", sent=False)))
    assert (str(lost), lost.sent) == ("connection refused", False)


def test_a_log_gets_the_place_of_a_defect_and_not_its_text() -> None:
    text = "what somebody wrote"
    try:
        int(text)
    except ValueError as error:
        said = place_of(error)
    assert said.startswith("ValueError\n")
    assert "test_errors.py" in said
    assert text not in said


def test_no_log_in_the_path_of_a_request_takes_the_text_of_an_exception() -> None:
    """Only what fails without a request (loads, pulls, probes) is logged with its text."""
    package = Path(sakuradite.__file__).parent
    allowed = {
        "cluster/model.py": 1,
        "cluster/lifecycle.py": 2,
        "engine/worker.py": 1,
        "engine/torch/assembly.py": 1,
        "engine/torch/decoder.py": 1,
    }
    found = {
        str(path.relative_to(package)): count
        for path in package.rglob("*.py")
        if (count := len(re.findall(r"log(?:ger)?\.exception\(|exc_info=", path.read_text())))
    }
    assert found == allowed
