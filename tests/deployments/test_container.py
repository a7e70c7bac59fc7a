"""The container file, read as a linter would: no registry can be asked to build it here."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import orjson

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "cluster-configs" / "container" / "Containerfile").read_text()
KNOWN = {
    "ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "LABEL", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "CMD",
}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    """The instructions and what follows them, continued lines joined."""
    lines = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined]


def all_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_every_instruction_is_one_and_none_fetches_from_elsewhere() -> None:
    assert {name for name, _ in instructions()} == KNOWN


def test_what_is_built_does_not_bring_its_tools_along() -> None:
    bases = all_of("FROM")
    assert len(bases) == 2
    assert bases[0].endswith(" AS build")
    assert [rest for rest in all_of("COPY") if "--from=build" in rest]
    assert bases[1].split()[0] == bases[0].split()[0], "a virtual environment goes with its Python"


def test_every_version_is_pinned() -> None:
    (base,) = [rest for rest in all_of("ARG") if rest.startswith("PYTHON=")]
    assert re.search(r":3\.12-slim-\w+$", base)
    for command in all_of("RUN"):
        for part in command.split("&&"):
            if "pip install" in part:
                assert "-c constraints.txt" in part or "constraints.txt |" in part, part
    assert {"torch", "torchvision"} <= {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    }


def test_what_is_copied_is_there() -> None:
    for rest in all_of("COPY"):
        if "--from" not in rest:
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source


def test_it_runs_as_a_numbered_user_who_is_not_root() -> None:
    (user,) = all_of("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("CMD")


def test_it_has_a_health_check_of_a_route_that_needs_no_key_and_commands_that_exist() -> None:
    (check,) = all_of("HEALTHCHECK")
    command = orjson.loads(check[check.index("[") :])
    compile(command[2], "HEALTHCHECK", "exec")
    (port,) = all_of("EXPOSE")
    assert f":{port}/healthz" in command[2]
    (started,) = all_of("CMD")
    program, *arguments = orjson.loads(started)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert program in project["scripts"]
    assert arguments == ["serve", "--host", "0.0.0.0"]
    (extras,) = [rest for rest in all_of("ARG") if rest.startswith("EXTRAS=")]
    assert set(extras.partition("=")[2].split(",")) <= set(project["optional-dependencies"])


def test_nothing_secret_is_in_it() -> None:
    for rest in (*all_of("ENV"), *all_of("ARG")):
        for word in shlex.split(rest):
            assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", word.partition("=")[0], re.IGNORECASE), word


def test_a_pipe_or_a_list_of_commands_does_not_hide_a_failure() -> None:
    for command in all_of("RUN"):
        assert "|| true" not in command
        assert not re.search(r";\s*(?!fi\b|then\b)\w", command.replace("; then", " then")), command
