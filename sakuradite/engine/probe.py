"""What a model is asked when it is loaded, and what a user is told about it then."""

from __future__ import annotations

import logging

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Backend
from sakuradite.engine.batching import Queue, Work
from sakuradite.engine.compile import Compiler
from sakuradite.engine.readout import outcome
from sakuradite.engine.scoring import Scorer
from sakuradite.errors import APIError, ModelLoadFailedError
from sakuradite.operations import ModelCapabilities
from sakuradite.records import Candidate, QuestionRecord, RequestRecord, RowAnswer

logger = logging.getLogger(__name__)

LOW_LABEL_MASS = 0.01  # below this the model hardly considers answering with a label, and answers mean little
PROBE = RequestRecord(
    "probe",
    ("The parcel arrived on Monday, two days late, and the box was damaged.",),
    (
        QuestionRecord("noul", ("The parcel was late.",), (Candidate("true"), Candidate("false"))),
        QuestionRecord("choice", ("What happened?",), tuple(Candidate(n) for n in ("on time", "late", "lost"))),
        QuestionRecord(
            "score",
            ("How bad was it?",),
            tuple(Candidate(str(i), (t,)) for i, t in enumerate(("fine", "bad", "awful"))),
        ),
    ),
)


def probe(compiler: Compiler, queue: Queue, scorer: Scorer, backend: Backend) -> float:
    """The least label mass among the answers to a small request: the first work that a model does.

    Raises ModelLoadFailedError when an answer fails.
    """
    (plan,) = compiler.compile([PROBE])
    if isinstance(plan, APIError):
        raise plan
    answers = []
    queue.add(Work(), plan.questions)
    while batch := queue.take(0.0):
        answers += [outcome(task.question) for task in scorer.score(batch)]
    for question in plan.questions:
        backend.release(question.prefix)
    for answer in (*plan.failures, *answers):
        if not isinstance(answer, RowAnswer):
            raise ModelLoadFailedError(f"the probe at load failed: {answer.error.message}")
    return min(answer.label_mass for answer in answers if isinstance(answer, RowAnswer))


def capabilities(
    config: ModelConfig,
    backend: Backend,
    allowed: int,
    mass: float,
    warnings: tuple[str, ...],
    modalities: tuple[str, ...] = ("text",),
) -> ModelCapabilities:
    """What a loaded model can do; its warnings are also logged."""
    facts = backend.facts
    notes = [*facts.warnings, *warnings]
    if mass < LOW_LABEL_MASS:
        notes.append(
            f"the model gave its labels only {mass:.2%} of the probability in a probe: it hardly answers in this form, "
            "so do not rely on its probabilities"
        )
    if allowed > config.max_batch_tokens:
        notes.append(
            f"a question may have {allowed} tokens (max_input_tokens) and a batch has {config.max_batch_tokens} "
            "(max_batch_tokens): longer questions run alone"
        )
    for note in notes:
        logger.warning("%s: %s", config.model, note)
    return ModelCapabilities(
        architecture=facts.architecture,
        backend=config.backend if config.backend != "auto" else type(backend).__module__.split(".")[2],
        device=facts.device,
        dtype=facts.dtype,
        context_length=facts.context_length,
        max_input_tokens=allowed,
        max_questions=config.max_questions,
        modalities=modalities,
        parameters=facts.parameters,
        weight_bytes=facts.weight_bytes,
        prefix_reuse=f"{facts.layout}: {facts.layout_reason}",
        label_mass=mass,
        warnings=tuple(notes),
    )
