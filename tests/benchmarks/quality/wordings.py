"""Wordings to compare: every fixed word of a prompt, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase

from sakuradite.records import QuestionRecord


@dataclass(frozen=True, slots=True)
class Wording:
    """One way to ask. `{}` in a text stands for the caller's words; an empty text leaves its line out."""

    name: str
    head: str = "Read the text below, then answer the question about it.\n\nText:\n"
    before: str = "\n"
    """Between the state and the question."""
    ask: str = "Question: {}"
    ask_noul: str = "Question: {}"
    options: str = "Options:"
    levels: str = "Levels, from lowest to highest:"
    option: str = "{code}. {text}"
    reply: str = "Answer with the code of one option."
    reply_noul: str = "Answer {} or {}."
    means: str = "{code} means: {text}"
    noul: tuple[str, str] | None = ("Yes", "No")
    """The two labels; None asks a noul as a choice of two coded options, Yes and No."""
    noul_names: tuple[str, str] = ("Yes", "No")
    """How the options of a coded noul read."""
    noul_turned: bool = False
    """Name the No before the Yes."""
    choice_codes: str = ascii_uppercase
    score_codes: str = ascii_uppercase
    cue: str = "Answer:"
    gap: str = " "
    digit_cue: str = "Answer: "
    """Used where the codes are digits: `" 1"` is two tokens for many tokenizers, so the space goes before."""

    def codes(self, question: QuestionRecord) -> Sequence[str]:
        """The labels of a question, in the order of its candidates."""
        if question.kind == "noul":
            pair = self.noul or (self.choice_codes[0], self.choice_codes[1])
            return pair[::-1] if self.noul is None and self.noul_turned else pair
        count = len(question.candidates)
        codes = self.choice_codes if question.kind == "choice" else self.score_codes
        return codes[:count] if count <= len(codes) else ascii_uppercase[:count]

    def cue_of(self, codes: Sequence[str]) -> tuple[str, str]:
        """How the reply begins, and what stands between that and a label."""
        return (self.digit_cue, "") if codes[0].isdigit() else (self.cue, self.gap)

    def text(self, question: QuestionRecord, codes: Sequence[str]) -> str:
        """What follows the state."""
        lines = []
        about = _text(question.instructions)
        candidates = [(c.name, _text(c.description)) for c in question.candidates]
        if question.kind == "noul":
            if about is not None:
                lines.append(self.ask_noul.format(about))
            step = -1 if self.noul_turned else 1
            if self.noul is None:
                named = [(name, meaning) for name, (_, meaning) in zip(self.noul_names, candidates, strict=True)]
                lines += [self.options, *self._listed(codes[::step], named[::step]), self.reply]
            else:
                described = [(code, meaning) for code, (_, meaning) in zip(codes, candidates, strict=True) if meaning]
                lines += [self.means.format(code=code, text=meaning) for code, meaning in described[::step]]
                lines.append(self.reply_noul.format(*codes[::step]))
        else:
            if about is not None:
                lines.append(self.ask.format(about))
            lines.append(self.options if question.kind == "choice" else self.levels)
            if question.kind == "score":
                candidates = [(meaning or "", None) for _, meaning in candidates]
            lines += self._listed(codes, candidates)
            lines.append(self.reply)
        return self.before + "\n".join(line for line in lines if line)

    def _listed(self, codes: Sequence[str], candidates: Sequence[tuple[str, str | None]]) -> list[str]:
        return [
            self.option.format(code=code, text=name if about is None else f"{name}: {about}")
            for code, (name, about) in zip(codes, candidates, strict=True)
        ]


def _text(prose: tuple[str | int, ...] | None) -> str | None:
    return None if prose is None else "".join(str(part) for part in prose)


# Worked examples for the head: short, of no domain of the cases, with as many No as Yes.
YES_NO_EXAMPLES = """Read the text, then answer the question about it.

Text:
The museum opens at ten and closes at six. Entry is free on Sundays.

Question: The museum is open at eight in the evening.
Answer Yes or No.
Answer: No

Text:
The museum opens at ten and closes at six. Entry is free on Sundays.

Question: Can visitors get in without paying?
Answer Yes or No.
Answer: Yes

Text:
"""
THREE_EXAMPLES = """Read the text, then answer the question about it.

Text:
The museum opens at ten and closes at six. Entry is free on Sundays.

Question: The museum is open at eight in the evening.
Answer Yes or No.
Answer: No

Text:
We planted roses along the wall. They love the sun there.

Question: Can the plants stand sunlight?
Answer Yes or No.
Answer: Yes

Text:
We planted roses along the wall. They love the sun there.

Question: What was planted?
Options:
A. trees
B. flowers: blossoms, bushes
C. vegetables
Answer with the code of one option.
Answer: B

Text:
"""
DIGITS = "123456789"
BASE = Wording("base")

WORDINGS = {
    w.name: w
    for w in (
        BASE,
        # where the fixed words stand, and how many there are
        replace(BASE, name="no-head", head=""),
        replace(BASE, name="text-only", head="Text:\n"),
        replace(
            BASE,
            name="reply-in-head",
            head="Read the text, then answer the question about it with one code.\n\nText:\n",
            reply="",
        ),
        replace(
            BASE, name="task-after", head="", before="\n\nRead the text above, then answer the question about it.\n"
        ),
        replace(
            BASE,
            name="long-head",
            head="You will read a text and a question about it. Judge only by what the text says. "
            "Answer with the code of the one answer that fits best.\n\nText:\n",
        ),
        replace(BASE, name="two-examples", head=YES_NO_EXAMPLES),
        replace(BASE, name="three-examples", head=THREE_EXAMPLES),
        # what the reply begins with
        replace(BASE, name="no-cue", cue="", gap="", digit_cue=""),
        replace(BASE, name="answer-is", cue="The answer is", digit_cue="The answer is "),
        replace(BASE, name="bracket", cue="Answer: (", gap="", digit_cue="Answer: (", option="({code}) {text}"),
        # labels of options
        replace(BASE, name="digits", choice_codes=DIGITS, score_codes=DIGITS),
        replace(BASE, name="digits-from-0", choice_codes="0" + DIGITS, score_codes="0" + DIGITS),
        # labels of a noul
        replace(BASE, name="noul-options", noul=None),
        replace(BASE, name="noul-true-false", noul=("True", "False")),
        replace(BASE, name="noul-statement", ask_noul="Is this true of the text? {}"),
        replace(
            BASE,
            name="noul-according",
            ask_noul="According to the text: {}",
            reply_noul="Is that right? Answer {} or {}.",
        ),
        replace(BASE, name="noul-turned", noul_turned=True),
        replace(BASE, name="noul-options-turned", noul=None, noul_turned=True),
        replace(BASE, name="noul-options-true", noul=None, noul_names=("Yes, this is true", "No, this is not true")),
        replace(BASE, name="noul-if", reply_noul="Answer {} if this is true of the text, {} if it is not."),
        replace(BASE, name="noul-only-if", reply_noul="Answer {} only if the text says so, otherwise {}."),
        replace(
            BASE,
            name="noul-statement-tf",
            ask_noul="Statement: {}",
            noul=("True", "False"),
            reply_noul="Is this true or false? Answer {} or {}.",
        ),
        replace(
            BASE,
            name="noul-is-it-true",
            ask_noul="Statement or question: {}",
            reply_noul="Going by the text, is it true? Answer {} or {}.",
        ),
        replace(BASE, name="noul-correct", ask_noul="Claim: {}", noul=None, noul_names=("correct", "incorrect")),
        replace(
            BASE, name="noul-turned-only-if", noul_turned=True, reply_noul="Answer {}, or {} only if the text says so."
        ),
        replace(
            BASE,
            name="noul-unless",
            noul_turned=True,
            reply_noul="Answer {} unless the text clearly shows that it is {}.",
        ),
        replace(
            BASE, name="noul-support", ask_noul="Claim: {}", reply_noul="Does the text support this? Answer {} or {}."
        ),
        replace(
            BASE,
            name="noul-support-turned",
            noul_turned=True,
            ask_noul="Claim: {}",
            reply_noul="Does the text support this? Answer {} or {}.",
        ),
        replace(
            BASE,
            name="noul-tf-turned",
            noul_turned=True,
            ask_noul="Statement: {}",
            noul=("True", "False"),
            reply_noul="Answer {} or {}.",
        ),
        replace(
            BASE,
            name="noul-if-supports",
            reply_noul="Answer {} if the text supports this, {} if the text contradicts it or does not say.",
        ),
        replace(BASE, name="noul-quoted", ask_noul='According to the text, is this true?\n"{}"'),
        replace(
            BASE, name="noul-quoted-turned", noul_turned=True, ask_noul='According to the text, is this true?\n"{}"'
        ),
        replace(BASE, name="noul-cue-text", cue="According to the text, the answer is"),
        replace(
            BASE, name="only-if-no-cue", cue="", gap="", reply_noul="Answer {} only if the text says so, otherwise {}."
        ),
        replace(
            BASE,
            name="if-supports-no-cue",
            cue="",
            gap="",
            reply_noul="Answer {} if the text supports this, {} if the text contradicts it or does not say.",
        ),
        replace(
            BASE,
            name="tf-no-cue",
            cue="",
            gap="",
            ask_noul="Statement: {}",
            noul=("True", "False"),
            reply_noul="Is this true or false? Answer {} or {}.",
        ),
        replace(BASE, name="turned-no-cue", cue="", gap="", noul_turned=True),
        replace(BASE, name="quoted-no-cue", cue="", gap="", ask_noul='According to the text, is this true?\n"{}"'),
        replace(BASE, name="options-digits", noul=None, choice_codes=DIGITS),
        replace(
            BASE,
            name="correct-digits",
            ask_noul="Claim: {}",
            noul=None,
            choice_codes=DIGITS,
            noul_names=("correct", "incorrect"),
        ),
        replace(
            BASE,
            name="correct-no-cue",
            cue="",
            gap="",
            ask_noul="Claim: {}",
            noul=None,
            noul_names=("correct", "incorrect"),
        ),
        replace(BASE, name="clearly", reply_noul="Answer {} only if the text clearly says so. Otherwise answer {}."),
        replace(
            BASE,
            name="clearly-no-cue",
            cue="",
            gap="",
            reply_noul="Answer {} only if the text clearly says so. Otherwise answer {}.",
        ),
        replace(
            BASE,
            name="options-says",
            noul=None,
            noul_names=("yes, the text says so", "no, the text says otherwise or does not say"),
        ),
        replace(BASE, name="noul-lower", noul=("yes", "no")),
        # words around the options
        replace(BASE, name="letter-reply", reply="Answer with the letter of the best option."),
        replace(BASE, name="no-reply", reply="", reply_noul="{} or {}?"),
        replace(
            BASE,
            name="fits-best",
            reply="Which one fits the text best? Answer with its code only.",
            reply_noul="Answer only {} or {}.",
        ),
    )
}
