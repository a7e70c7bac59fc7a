"""docs/sdk.md: its examples run, and every public name is in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import sakuradite
from sakuradite.client.faces import AsyncClient, SyncClient
from sakuradite.client.models import AsyncModels, Models
from sakuradite.operations import Operation
from tests.client.conftest import ADMIN_KEY
from tests.http.serving import EngineGateway, FakeAdministration, serve

PAGE = (Path(__file__).parents[2] / "docs" / "sdk.md").read_text()
BLOCK = re.compile(r"^```python( embedded)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(embedded: bool) -> list[str]:
    return [code for tag, code in BLOCK.findall(PAGE) if bool(tag) is embedded]


class Finished(FakeAdministration):
    """Operations that have ended; nothing is resident for it."""

    async def operation(self, operation_id: str) -> Operation:
        return Operation(id=operation_id, kind="load", model="m", status="succeeded")

    async def operations(self) -> Sequence[Operation]:
        return []


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    gateway = EngineGateway("Qwen/Qwen3-0.6B")
    with serve(gateway, Finished(), admin_key=ADMIN_KEY) as served:
        for code in blocks(embedded=False):
            here = code.replace("http://127.0.0.1:7777", served.url)
            exec(compile(here, "docs/sdk.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "refund type='noul'" in printed
    assert "refused:" not in printed


def test_every_public_name_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", PAGE))
    assert set(sakuradite.__all__) - words == {"__version__"}
    for kind in (SyncClient, AsyncClient, Models, AsyncModels):
        methods = {name for name in dir(kind) if not name.startswith("_")}
        assert methods <= words, kind


def test_the_embedded_examples_are_there() -> None:
    assert len(blocks(embedded=True)) == 1  # run on a real Ray in test_embedded
