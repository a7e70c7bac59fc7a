"""docs/cli.md: its reference is what the commands are, and its examples are commands that exist."""

from __future__ import annotations

import re
import shlex

from tests.cli.reference import PAGE, page


def test_the_reference_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python -m tests.cli.reference writes it anew"


def test_every_command_is_on_the_page() -> None:
    from sakuradite.cli.shell import WORDS, commands

    text = PAGE.read_text()
    for name in commands():
        assert f"## sakuradite {name}\n" in text
    for word in WORDS:
        assert f"`{word}" in text, word


def test_the_examples_use_options_that_exist() -> None:
    from sakuradite.cli.shell import commands

    known = commands()
    for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition("|")[2] if line.startswith("cat ") else line, comments=True)
            if not words or words[0] != "sakuradite" or len(words) == 1 or words[1].startswith("-"):
                continue
            options = {option for parameter in known[words[1]].params for option in parameter.opts}
            assert {word for word in words[2:] if word.startswith("-")} <= options, line
