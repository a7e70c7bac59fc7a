"""docs/batch.md and docs/scaling.md: commands that exist, Python that is well typed enough to compile, true numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from sakuradite.batch import manifest, parts, pipeline
from sakuradite.cli.shell import commands
from sakuradite.errors import OF_THE_ROW
from sakuradite.questions import Choice, Noul, Score

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "batch.md").read_text(encoding="utf-8")


def test_the_commands_have_these_options() -> None:
    known = {option for parameter in commands()["batch"].params for option in parameter.opts}
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines():
        words = shlex.split(line)
        assert words[:2] == ["sakuradite", "batch"]
        assert {word for word in words if word.startswith("-")} <= known
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known | {"--jsonl", "--questions"}


def test_the_python_example_names_what_there_is() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"run": lambda *_, **__: type("Summary", (), {"rows": 1, "errors": 0, "input_tokens": 2})}
    code = example.replace("from sakuradite.batch import Progress, run", "from sakuradite.batch import Progress")
    exec(compile(code, "batch.md", "exec"), names)


def test_every_code_of_a_row_is_explained() -> None:
    assert {code for code in OF_THE_ROW if f"`{code}`" not in PAGE} == set()


def test_the_columns_are_those_of_a_flat_output() -> None:
    from sakuradite.batch.flat import answer_columns

    asked: dict[str, Noul | Choice | Score] = {
        "a": Noul(),
        "b": Choice(criteria={"x": None, "y": None}),
        "c": Score(criteria=["low", "high"]),
    }
    for name in answer_columns(asked):
        told = re.sub(r"^[abc]\.", "ID.", name).replace(".x", ".NAME").replace(".NAME_label_mass", ".x_label_mass")
        told = told.replace(".y", ".NAME").replace("probabilities.1", "probabilities.0")
        assert f"`{told}`" in PAGE, name


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"A part has {parts.MIN_ROWS} to {parts.MAX_ROWS:,} rows, a {parts.PARTS:,}th" in PAGE
    assert f"none of the first {manifest.LOOK} rows of a `.jsonl`" in PAGE
    assert f"at most {parts.PART_BYTES >> 20} MiB of JSON" in PAGE
    assert (pipeline.CALLS, pipeline.IN_FLIGHT, pipeline.RETRIES) == (2, 3, 2)  # two parts, a third waits, three times
