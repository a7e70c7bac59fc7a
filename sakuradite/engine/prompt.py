"""The wording of a prompt, all of it: what stands before the state, between, and where the answer begins.

Three parts, cut where the request alone decides: the constant head, the state, the question. Question ids are never
shown to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sakuradite.records import Prose, QuestionRecord

HEAD = "Read the text below, then answer the question about it.\n\nText:\n"


@dataclass(frozen=True, slots=True)
class Cue:
    """How the reply begins: the text that is written for the model, and what stands between it and a label."""

    text: str
    gap: str


CUES = (Cue("Answer:", " "), Cue("Answer: ", ""), Cue("Answer:\n", ""), Cue("", ""), Cue("", " "))
"""In order of preference; the first at which the tokenizer keeps the labels apart is taken."""


def prose_text(prose: Prose) -> str:
    """The text of prose that holds no image."""
    return prose[0] if len(prose) == 1 and isinstance(prose[0], str) else "".join(str(part) for part in prose)


def question_text(question: QuestionRecord, codes: Sequence[str]) -> str:
    """What follows the state: the question and its options, each with the code that the model is to answer with."""
    lines = ["\n"]
    if question.instructions is not None:
        lines.append(f"Question: {prose_text(question.instructions)}")
    if question.kind == "noul":
        for candidate, code in zip(question.candidates, codes, strict=True):
            if candidate.description is not None:
                lines.append(f"{code} means: {prose_text(candidate.description)}")
        lines.append(f"Answer {codes[0]} or {codes[1]}.")
        return "\n".join(lines)
    lines.append("Options:" if question.kind == "choice" else "Levels, from lowest to highest:")
    for candidate, code in zip(question.candidates, codes, strict=True):
        about = None if candidate.description is None else prose_text(candidate.description)
        if question.kind == "score":
            lines.append(f"{code}. {about}")
        else:
            lines.append(f"{code}. {candidate.name}" if about is None else f"{code}. {candidate.name}: {about}")
    lines.append("Answer with the code of one option.")
    return "\n".join(lines)
