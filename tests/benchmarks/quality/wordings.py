"""Wordings to compare, each one or two words away from the first draft."""

from __future__ import annotations

from dataclasses import replace
from string import ascii_uppercase

from sakuradite.engine.prompt import WORDING, Cue, Wording

DIGITS = "123456789"
LETTER_CUE = Cue("Answer:", " ")
DIGIT_CUE = Cue("Answer: ", "")  # `" 1"` is two tokens for many tokenizers, so the space goes before the label

DRAFT = Wording(
    head="Read the text below, then answer the question about it.\n\nText:\n",
    before="\n",
    question="Question: {}",
    statement="Question: {}",
    options="Options:",
    levels="Levels, from lowest to highest:",
    option="{code}. {text}",
    reply="Answer with the code of one option.",
    meaning="{code} means: {text}",
    noul_reply="Answer {} or {}.",
    noul_names=None,
    noul_words=(("Yes", "No"),),
    noul_turned=False,
    choice_codes=ascii_uppercase,
    score_codes=ascii_uppercase,
    cues=(LETTER_CUE, DIGIT_CUE),
)

# Worked examples for the head: short, of no domain of the cases, with as many No as Yes.
EXAMPLES = """Read the text, then answer the question about it.

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
CLEARLY = "Answer {} only if the text clearly says so. Otherwise answer {}."
SUPPORTS = "Answer {} if the text supports this, {} if the text contradicts it or does not say."
EXPLICITLY = "Answer {} only if the text clearly and explicitly says so. In every other case answer {}."
OTHERWISE = "Answer {} only if the text clearly says so. If it says otherwise or does not say, answer {}."
LONG_HEAD = (
    "You will read a text and a question about it. Judge only by what the text says. "
    "Answer with the code of the one answer that fits best.\n\nText:\n"
)

VARIANTS: dict[str, dict[str, object]] = {
    "draft": {},
    # the fixed words before the state
    "no head": {"head": ""},
    "short head": {"head": "Text:\n"},
    "long head": {"head": LONG_HEAD},
    "examples in the head": {"head": EXAMPLES},
    "task after the state": {"head": "", "before": "\n\nRead the text above, then answer the question about it.\n"},
    "blank line after the state": {"before": "\n\n"},
    # how the reply begins
    "no prefill": {"cues": (Cue("", ""),)},
    "prefill: The answer is": {"cues": (Cue("The answer is", " "),)},
    "prefill: Answer: (": {"cues": (Cue("Answer: (", ""),), "option": "({code}) {text}"},
    # the labels of options and levels
    "digits": {"choice_codes": DIGITS, "score_codes": DIGITS},
    "digits from 0": {"choice_codes": "0" + DIGITS, "score_codes": "0" + DIGITS},
    # the words around options
    "letter of the best option": {"reply": "Answer with the letter of the best option."},
    # nouls: their labels
    "noul: options A Yes, B No": {"noul_names": ("Yes", "No")},
    "noul: options correct, incorrect": {"noul_names": ("correct", "incorrect"), "statement": "Claim: {}"},
    "noul: True, False": {"noul_words": (("True", "False"),), "statement": "Statement: {}"},
    "noul: correct, incorrect": {
        "noul_words": (("correct", "incorrect"),),
        "statement": "Claim: {}",
        "noul_reply": "Is the claim {} or {}?",
    },
    "noul: No or Yes": {"noul_turned": True},
    # nouls: what is asked
    "noul: Is this true": {"statement": "According to the text, is this true?\n{}"},
    "noul: supported claim": {"statement": "Claim: {}", "noul_reply": "Does the text support this? Answer {} or {}."},
    "noul: only if": {"noul_reply": "Answer {} only if the text says so, otherwise {}."},
    "noul: clearly": {"noul_reply": CLEARLY},
    "noul: clearly, no prefill": {"noul_reply": CLEARLY, "cues": (Cue("", ""),)},
    "noul: clearly, newline": {"noul_reply": CLEARLY, "cues": (Cue("Answer:\n", ""),)},
    "noul: clearly, statement": {"noul_reply": CLEARLY, "statement": "Statement: {}"},
    "noul: clearly, check": {"noul_reply": "Check this against the text. " + CLEARLY},
    "noul: clearly, claim": {"noul_reply": CLEARLY, "statement": "Claim or question: {}"},
    "noul: explicitly": {"noul_reply": EXPLICITLY},
    "noul: clearly, if otherwise": {"noul_reply": OTHERWISE},
    "noul: clearly true": {"noul_reply": "Going by the text alone, is this clearly true? Answer {} or {}."},
    "noul: No unless": {
        "noul_turned": True,
        "noul_reply": "Answer {} unless the text clearly says so. Only then answer {}.",
    },
    "noul: if supported": {"noul_reply": SUPPORTS},
    "noul: if supported, no prefill": {"noul_reply": SUPPORTS, "cues": (Cue("", ""),)},
}

WORDINGS: dict[str, Wording] = {name: replace(DRAFT, **changes) for name, changes in VARIANTS.items()}  # type: ignore[arg-type]
WORDINGS["shipped"] = WORDING
