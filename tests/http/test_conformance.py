"""jevcompat, the public conformance suite of System One: conformant with no failure, in every set-up."""

from __future__ import annotations

import pytest
from jevcompat import runner, spec

from tests.http.serving import MODEL, EngineGateway, serve

KEY = "sk-conformance"


@pytest.mark.parametrize("model", [MODEL, "jev-latest", "jev-preview"])
@pytest.mark.parametrize("key", [None, KEY])
def test_conformant(key: str | None, model: str) -> None:
    with serve(EngineGateway(max_input_tokens=1 << 16), api_key=key) as served:
        report = runner.run(served.url, key=key, model=model)
    assert report.verdict == "conformant"
    assert report.aborted is None
    assert [r.id for r in report.results if r.status == "fail"] == []
    untested = {r.id for r in report.results if r.status != "pass"}
    assert untested == ({"auth.ignored-when-off"} if key else {"auth.bearer", "auth.missing", "auth.invalid"})
    assert len(report.results) == len(spec.REQUIREMENTS) == 48
