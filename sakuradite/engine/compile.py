"""From a request to rows of tokens: the shared part once per request, each question once.

All waiting requests are tokenised in one call. Nothing is ever cut off: what does not fit is refused, and text far
over the limit is refused before megabytes of it are tokenised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from sakuradite.engine.backend import Prefix, Read, Row
from sakuradite.engine.illustrated import Illustrator
from sakuradite.engine.labels import LabelBook, Labels
from sakuradite.engine.plan import Plan, PlannedQuestion
from sakuradite.engine.prompt import WORDING, Wording, prose_text, question_text
from sakuradite.engine.tokenizer import Tokenizer
from sakuradite.errors import APIError, ContextExceededError, UnsupportedModelError, ValidationError
from sakuradite.records import RequestRecord, RowFailure

LIKELY_CHARACTERS_PER_TOKEN = 8  # prose has 3 to 5; text with more per allowed token is counted on a slice first


class Compiler:
    """Compiles requests for one model. `max_input_tokens` is the limit of one question's whole prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        max_input_tokens: int,
        wording: Wording = WORDING,
        illustrator: Illustrator | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._wording = wording
        self._model = model
        self._allowed = max_input_tokens
        self.head = tuple(tokenizer.opening(tokenizer.frame.opening + wording.head))
        self.book = LabelBook(tokenizer, model, wording)
        self._illustrator = illustrator

    def compile(self, requests: Sequence[RequestRecord]) -> list[Plan | APIError]:
        """For each request its plan, or the error that refuses the whole of it."""
        texts: list[str] = []
        prepared: list[tuple[list[tuple[int, Labels]], list[RowFailure]] | Plan | APIError] = []
        for request in requests:
            try:
                prepared.append(self._illustrated(request) if request.images else self._prepare(request, texts))
            except APIError as error:
                prepared.append(error)
            except UnicodeEncodeError:
                prepared.append(ValidationError("text holds a lone surrogate, which no tokenizer can read"))
        tokens = iter(self._tokenizer.plain(texts))
        plans: list[Plan | APIError] = []
        for part in prepared:
            if isinstance(part, APIError | Plan):
                plans.append(part)
                continue
            asked, failures = part
            plan = Plan([], failures)
            self._place_all(plan, asked, tokens)
            plans.append(plan)
        return plans

    def _illustrated(self, request: RequestRecord) -> Plan:
        """The plan of a request with images. Questions that show none share their prefix as text does."""
        if self._illustrator is None:
            raise UnsupportedModelError(f"images not supported by {self._model}", param="images")
        album = self._illustrator.album(request)
        plan = Plan([], [])
        plain: list[int] = []
        for index, question in enumerate(request.questions):
            try:
                labels = self.book.labels(question.kind, len(question.candidates))
            except APIError as error:
                plan.failures.append(RowFailure(index, error.record()))
                continue
            turn = self._illustrator.turn(request.state, question, labels)
            texts = [part for part in turn if isinstance(part, str)]
            if len(texts) == len(turn):
                plain.append(index)
                continue
            for text in texts:
                text.encode()
            if about := sum(map(self._far_over, texts)):
                plan.failures.append(self._exceeded(index, f"about {about}", "its text alone"))
                continue
            tokens, shown = self._illustrator.prompt(turn, album)
            rows = self._illustrator.rows((*tokens, *labels.closing), labels)
            total, images = len(tokens) + len(labels.closing), len(shown.expansions)
            if (longest := len(rows[0].suffix)) > self._allowed:
                what = f"its whole prompt, {images} image{'s' * (images > 1)} included"
                plan.failures.append(self._exceeded(index, str(longest), what))
                continue
            prefix = Prefix((), extras={"images": shown.images})
            plan.questions.append(PlannedQuestion(index, prefix, rows, labels, total))
        waiting: list[str] = []
        asked, failures = self._prepare(request, waiting, plain) if plain else ([], [])
        plan.failures += failures
        self._place_all(plan, asked, iter(self._tokenizer.plain(waiting)))
        return plan

    def _prepare(
        self, request: RequestRecord, texts: list[str], among: Collection[int] | None = None
    ) -> tuple[list[tuple[int, Labels]], list[RowFailure]]:
        """The texts to tokenise, put onto `texts`: the state, then each question that can be asked, with its labels.

        `among`: the indices of the questions to look at, None for all.
        """
        questions = [(i, q) for i, q in enumerate(request.questions) if among is None or i in among]
        state = prose_text(request.state)
        state.encode()
        if about := self._far_over(state):
            return [], [self._exceeded(i, f"about {about}", "the state alone") for i, _ in questions]
        failures: list[RowFailure] = []
        asked: list[tuple[int, Labels]] = []
        found: list[str] = []
        for index, question in questions:
            try:
                labels = self.book.labels(question.kind, len(question.candidates))
            except APIError as error:
                failures.append(RowFailure(index, error.record()))
                continue
            text = question_text(question, labels.codes, self._wording)
            text.encode()
            if about := self._far_over(text):
                failures.append(self._exceeded(index, f"about {about}", "its own text alone"))
            else:
                asked.append((index, labels))
                found.append(text)
        if asked:
            texts.append(state)
            texts += found
        return asked, failures

    def _place_all(self, plan: Plan, asked: Sequence[tuple[int, Labels]], tokens: Iterator[list[int]]) -> None:
        """Put questions into the plan, given the tokens of the state and of each of them."""
        if asked:
            prefix = Prefix(self.head + tuple(next(tokens)))
            for index, labels in asked:
                self._place(plan, index, labels, prefix, next(tokens))

    def _place(self, plan: Plan, index: int, labels: Labels, prefix: Prefix, question: list[int]) -> None:
        """Put a question's rows into the plan, or its failure."""
        suffix = (*question, *labels.closing)
        longest = len(labels.paths[0])
        total = len(prefix.tokens) + len(suffix)
        if total + longest - 1 > self._allowed:
            plan.failures.append(self._exceeded(index, str(total + longest - 1), "its whole prompt"))
            return
        if longest == 1:
            row = Row(suffix, (Read(len(suffix) - 1, labels.firsts),))
            plan.questions.append(PlannedQuestion(index, prefix, (row,), labels, total))
            return
        # Labels of two tokens: everything up to the last token is shared by a row for each first token. The first of
        # these rows also reads the first tokens themselves.
        own = Prefix(prefix.tokens + suffix[:-1])
        rows = []
        for branch, first in enumerate(labels.firsts):
            seconds = Read(1, tuple(path[1] for path in labels.paths if path[0] == first))
            reads = (seconds,) if branch else (Read(0, labels.firsts), seconds)
            rows.append(Row((suffix[-1], first), reads))
        plan.questions.append(PlannedQuestion(index, own, tuple(rows), labels, total))

    def _far_over(self, text: str) -> int:
        """About how many tokens a text has that is over the limit by itself, or 0 when it may fit.

        Counts growing slices from the start, so the work is bounded by the limit and not by the text.
        """
        size = LIKELY_CHARACTERS_PER_TOKEN * self._allowed
        while size < len(text):
            count = len(self._tokenizer.plain([text[:size]])[0])
            if count > self._allowed + 16:  # the cut itself can add a few tokens
                return count * len(text) // size
            size *= 4
        return 0

    def _exceeded(self, index: int, needed: str, what: str) -> RowFailure:
        error = ContextExceededError(
            f"question {index} needs {needed} tokens ({what}); {self._model} allows {self._allowed} per question. "
            "Shorten the text, or load the model with a larger max_input_tokens if its context has room",
            param=f"questions.{index}",
        )
        return RowFailure(index, error.record())
