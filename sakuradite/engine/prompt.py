"""The wording of a prompt, all of it: what stands before the state, between, and where the reply begins.

Three parts, cut where the request alone decides: the constant head, the state, the question. Question ids are never
shown to the model. Which wording is best was measured: docs/quality.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from sakuradite.records import Candidate, Prose, QuestionRecord


@dataclass(frozen=True, slots=True)
class Cue:
    """How the reply begins: the text that is written for the model, and what stands between it and a label."""

    text: str
    gap: str


@dataclass(frozen=True, slots=True)
class Wording:
    """Every fixed word. `{}` stands for the caller's words, `{code}` for a label; an empty text leaves its line out."""

    head: str = "Read the text below, then answer the question about it.\n\nText:\n"
    """Before the state: the same for all requests, so it is computed once per model."""
    image_head: str = "Look at the images and read the text below, then answer the question about them.\n\nText:\n"
    """In place of `head` where a question shows images. Images that the state begins with stand before it."""
    before: str = "\n"
    """Between the state and the question."""
    question: str = "Question: {}"
    statement: str = "Question: {}"
    """The instructions of a noul."""
    options: str = "Options:"
    levels: str = "Levels, from lowest to highest:"
    option: str = "{code}. {text}"
    described: str = "{name}: {about}"
    reply: str = "Answer with the code of one option."
    meaning: str = "{code} means: {text}"
    """One side of a noul's criteria."""
    noul_reply: str = "Answer {} only if the text clearly says so. Otherwise answer {}."
    """After a plain "Answer Yes or No." small models say Yes too often (docs/quality.md)."""
    noul_names: tuple[str, str] | None = None
    """Set: a noul is asked as a choice of two coded options of these names. None: it is answered with a word."""
    noul_words: tuple[tuple[str, str], ...] = (("Yes", "No"), ("yes", "no"), ("True", "False"))
    """Pairs of words to answer a noul with; the first that the tokenizer keeps apart is taken, else two codes."""
    noul_turned: bool = False
    """Name the negative side of a noul first."""
    choice_codes: Sequence[str] = ascii_uppercase
    score_codes: Sequence[str] = ascii_uppercase
    """Labels of one token each for as many options; other alphabets follow for more, or where these are not clean."""
    cues: tuple[Cue, ...] = (Cue("Answer:", " "), Cue("Answer: ", ""), Cue("Answer:\n", ""), Cue("", ""), Cue("", " "))
    """The first at which the tokenizer keeps the labels apart is taken."""


WORDING = Wording()
"""The one in use."""


def prose_text(prose: Prose) -> str:
    """The text of prose that holds no image."""
    return prose[0] if len(prose) == 1 and isinstance(prose[0], str) else "".join(str(part) for part in prose)


def question_text(question: QuestionRecord, codes: Sequence[str], wording: Wording = WORDING) -> str:
    """What follows the state: the question and its options, each with the code that the model is to answer with."""
    about = None if question.instructions is None else prose_text(question.instructions)
    sides = list(zip(codes, question.candidates, strict=True))
    if question.kind == "noul":
        lines = [] if about is None else [wording.statement.format(about)]
        if wording.noul_turned:
            sides.reverse()
        if wording.noul_names is None:
            described = [(code, prose_text(c.description)) for code, c in sides if c.description is not None]
            lines += [wording.meaning.format(code=code, text=text) for code, text in described]
            lines.append(wording.noul_reply.format(*(code for code, _ in sides)))
            return _joined(wording, lines)
        names = dict(zip(("true", "false"), wording.noul_names, strict=True))
        sides = [(code, Candidate(names[c.name], c.description)) for code, c in sides]
    else:
        lines = [] if about is None else [wording.question.format(about)]
    lines.append(wording.levels if question.kind == "score" else wording.options)
    for code, candidate in sides:
        lines.append(wording.option.format(code=code, text=_option(question, candidate, wording)))
    lines.append(wording.reply)
    return _joined(wording, lines)


def _option(question: QuestionRecord, candidate: Candidate, wording: Wording) -> str:
    """An option's name and description. A level is its description; its name is only its number."""
    if candidate.description is None:
        return candidate.name
    text = prose_text(candidate.description)
    return text if question.kind == "score" else wording.described.format(name=candidate.name, about=text)


def _joined(wording: Wording, lines: Sequence[str]) -> str:
    return wording.before + "\n".join(line for line in lines if line)
