"""schemathesis against our own OpenAPI document: no 5xx, nothing undocumented, nothing wrong accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sakuradite.http.openapi import document
from sakuradite.http.routes import ROUTES
from tests.http.conftest import ADMIN_KEY, API_KEY
from tests.http.serving import MODEL, ScriptedGateway, serve

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "which"), [(API_KEY, "--exclude-path-regex"), (ADMIN_KEY, "--include-path-regex")])
def test_schemathesis_finds_nothing(tmp_path: Path, key: str, which: str) -> None:
    body = document(ROUTES, True)
    for name in ("DecisionRequest", "SystemOneRequest", "OpenAIDecisionRequest"):
        body["components"]["schemas"][name]["properties"]["model"] = {"const": MODEL}  # else all it sees is 404
    (tmp_path / "openapi.json").write_text(json.dumps(body))
    with serve(ScriptedGateway(), api_key=API_KEY, admin_key=ADMIN_KEY) as served:
        command = [
            str(Path(sys.executable).with_name("st")), "run", "openapi.json", "--url", served.url,
            "--header", f"Authorization: Bearer {key}", which, "^/admin", "--checks", ",".join(CHECKS),
            "--phases", "examples,coverage,fuzzing", "--max-examples", "60", "--continue-on-failure", "--no-color",
        ]  # fmt: skip
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert "Tested: " in found.stdout
