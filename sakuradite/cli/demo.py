"""`sakuradite demo`: the main job on a real model, with nothing to download but what was installed with the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sakuradite.cli.exits import UsageError
from sakuradite.cli.output import console, print_json
from sakuradite.cli.place import place_of
from sakuradite.cli.progress import operation_progress, spinner

if TYPE_CHECKING:
    from pathlib import Path

    from sakuradite.answers import DecisionResult
    from sakuradite.questions import Choice, Noul, Score

STATE = (
    "Hello, since the last update the app crashes every time I open it, so I cannot log in. My files are in there and "
    "I need them for a meeting today. Please fix this error. Thank you, Dana"
)

NOTE = (
    "This is SmolLM2 with 135 million parameters: it shows that everything works, not how well a model can decide. "
    "So small a model answers mostly by habit, and its probabilities are not calibrated. "
    "With access to a hub, a better model answers the same way:"
)
BETTER = "sakuradite run --local Qwen/Qwen3-0.6B --state-file ticket.txt --questions questions.json --table"


def questions() -> dict[str, Noul | Choice | Score]:
    """What the demo asks about its ticket: one question of each type."""
    from sakuradite.questions import Choice, Noul, Score

    return {
        "refund": Noul(instructions="The customer asks for a refund."),
        "team": Choice(
            instructions="Which team should answer this message?",
            criteria={
                "billing": "payments and refunds",
                "shipping": "parcels and delivery",
                "technical": "errors in the app",
            },
        ),
        "urgency": Score(instructions="How urgent is this message?", criteria=["can wait", "this week", "today"]),
    }


def demo(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print the decision as JSON, and nothing else.")] = False,
) -> None:
    """Decide on a support ticket with a small real model, here."""
    from sakuradite import Sakuradite
    from sakuradite.client.embedded import require_backend
    from sakuradite.config import home_directory

    require_backend("torch")  # told before the conversion, not after it
    home, _ = home_directory(place_of(context).home)
    checkpoint = _checkpoint(home)
    asked = questions()
    with spinner("starting Ray and loading the model"):
        client = Sakuradite(checkpoint, base_url="", backend="torch", home=home).open()
    with client:
        result = client.decide(STATE, asked)
    if json:
        print_json(result)
    else:
        _show(result, asked)


def _checkpoint(home: Path) -> Path:
    """The demo's checkpoint, made under the home the first time."""
    from sakuradite.errors import ModelNotFoundError
    from sakuradite.hub import smollm2
    from sakuradite.operations import Operation, Progress

    with operation_progress(smollm2.NAME) as tell:

        def report(progress: Progress) -> None:
            tell(Operation(id="demo", kind="load", model=smollm2.NAME, status="running", progress=progress))

        try:
            return smollm2.checkpoint(home, report)
        except ModelNotFoundError as error:  # the package is not installed
            raise UsageError(str(error)) from None


def _show(result: DecisionResult, asked: dict[str, Noul | Choice | Score]) -> None:
    from rich.padding import Padding

    from sakuradite.cli.answers import print_answers

    terminal = console()
    terminal.print(Padding(STATE, (1, 2)), style="italic")
    titles = {key: f"{question.type}: {question.instructions}" for key, question in asked.items()}
    print_answers(result.answers, terminal, titles)
    terminal.print(f"\n{NOTE}", style="dim")
    terminal.print(f"  {BETTER}", style="dim", soft_wrap=True)  # one line, whatever the width: it is to be copied
