"""Answers for people: each question with its candidates and a bar per probability."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sakuradite.answers import ChoiceAnswer, DecisionResult, NoulAnswer, ScoreAnswer

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 24  # characters of a probability of 1
EIGHTHS = " ▏▎▍▌▋▊▉"


def print_answers(
    answers: Mapping[str, NoulAnswer | ChoiceAnswer | ScoreAnswer], terminal: Console, titles: Mapping[str, str] = {}
) -> None:
    """Print answers by question id; `titles` may name the questions otherwise."""
    from rich.table import Table
    from rich.text import Text

    for key, answer in answers.items():
        terminal.print(Text.assemble((titles.get(key, key), "bold"), "  ", (headline(answer), "bold green")))
        table = Table.grid(padding=(0, 1))
        table.add_column(max_width=40, overflow="ellipsis", no_wrap=True)
        table.add_column(justify="right")
        table.add_column(no_wrap=True)
        for name, p, chosen in candidates(answer):
            style = "green" if chosen else "dim"
            table.add_row(Text("  " + name, style), Text(f"{p:.3f}", style), Text(bar(p), style))
        terminal.print(table)


def print_result(result: DecisionResult, terminal: Console) -> None:
    """Print a whole result, with the model and what was read."""
    print_answers(result.answers, terminal)
    terminal.print(f"{result.model}, {result.usage.input_tokens} tokens read", style="dim")


def headline(answer: NoulAnswer | ChoiceAnswer | ScoreAnswer) -> str:
    """The answer in a few words."""
    match answer:
        case NoulAnswer(noul=p):
            return f"{'true' if p >= 0.5 else 'false'} ({p:.3f} true)"
        case ChoiceAnswer(choice=name, confidence=confidence):
            return f"{name} (confidence {confidence:.3f})"
        case ScoreAnswer(score=score, confidence=confidence, legend=legend):
            return f"{score:.2f} of {len(legend) - 1} (confidence {confidence:.3f})"


def candidates(answer: NoulAnswer | ChoiceAnswer | ScoreAnswer) -> Iterable[tuple[str, float, bool]]:
    """Name, probability and whether it is the most probable one, for each candidate."""
    match answer:
        case NoulAnswer(noul=p):
            named = [("true", p), ("false", 1 - p)]
        case ChoiceAnswer(probabilities=probabilities):
            named = list(probabilities.items())
        case ScoreAnswer(probabilities=probabilities, legend=legend):
            named = [(f"{key} {_text(legend[key])}", p) for key, p in probabilities.items()]
    best = max(p for _, p in named)
    return [(name, p, p == best) for name, p in named]


def bar(p: float) -> str:
    """A bar of BAR_WIDTH characters for a probability of 1, in eighths of a character."""
    eighths = round(p * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _text(level: object) -> str:
    from sakuradite.questions import render

    return level if isinstance(level, str) else render(level)  # type: ignore[arg-type]
