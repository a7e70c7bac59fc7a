"""Labels that the tokenizer keeps apart, with tokenizers of every make."""

from __future__ import annotations

import pytest

from sakuradite.engine.fake import FakeTokenizer
from sakuradite.engine.labels import LabelBook
from sakuradite.engine.tokenizer import FastTokenizer, Tokenizer
from sakuradite.errors import ValidationError
from sakuradite.records import Kind
from tests.engine.zoo import ZOO

COUNTS = (1, 2, 3, 9, 10, 26, 27, 64, 128, 255)
ABLE = [name for name in ZOO if name != "words"]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", [*ABLE, "fake"])
def test_a_token_spans_prompt_and_label(name: str, count: int, tokenizers: dict[str, FastTokenizer]) -> None:
    """Case 1: at the rendered boundary each label adds its own tokens, and those of the prompt stay."""
    tokenizer: Tokenizer = FakeTokenizer() if name == "fake" else tokenizers[name]
    labels = LabelBook(tokenizer, name).labels("choice", count)
    assert len(labels.codes) == len(set(labels.codes)) == count
    assert len(set(labels.paths)) == count
    assert {len(path) for path in labels.paths} in ({1}, {2})
    endings = [" " + code for code in labels.codes], list(labels.codes)
    closing = tokenizer.frame.closing
    for texts in endings:
        for cue in ("Answer:", "Answer: ", "Answer:\n", ""):
            rendered = [tuple(ids) for ids in tokenizer.control([closing + cue + text for text in texts])]
            if rendered == [(*labels.closing, *path) for path in labels.paths]:
                return
    pytest.fail("the labels' tokens are not those of any rendered prompt")


@pytest.mark.parametrize("name", ABLE)
def test_labels_are_never_control_or_unknown_tokens(name: str, tokenizers: dict[str, FastTokenizer]) -> None:
    book = LabelBook(tokenizers[name], name)
    kinds: tuple[tuple[Kind, int], ...] = (("noul", 2), ("choice", 255), ("score", 10))
    for kind, count in kinds:
        for path in book.labels(kind, count).paths:
            assert tokenizers[name].forbidden.isdisjoint(path)


def test_prompt_ending_in_a_space_merges_with_a_letter(tokenizers: dict[str, FastTokenizer]) -> None:
    """Case 1 as reported: with the merge of blank and A, a cue that ends in a blank has no label A."""
    tokenizer = tokenizers["gpt2"]
    assert len(tokenizer.control(["Answer: A"])[0]) == len(tokenizer.control(["Answer:"])[0]) + 1
    labels = LabelBook(tokenizer, "gpt2").labels("choice", 2)
    assert tokenizer._rust.decode([path[0] for path in labels.paths]) == " A B"


def test_a_tokenizer_that_splits_digits_gets_labels_of_two_tokens(tokenizers: dict[str, FastTokenizer]) -> None:
    labels = LabelBook(tokenizers["qwen"], "qwen").labels("choice", 255)
    assert {len(path) for path in labels.paths} == {2}
    assert len(labels.firsts) <= 12  # each costs a row


def test_upper_and_lower_case_are_one_token(tokenizers: dict[str, FastTokenizer]) -> None:
    paths = LabelBook(tokenizers["lowercase"], "lowercase").labels("choice", 255).paths
    assert len(set(paths)) == 255


def test_more_options_than_labels_is_refused_with_the_limit(tokenizers: dict[str, FastTokenizer]) -> None:
    book = LabelBook(tokenizers["words"], "words")
    assert book.labels("choice", 3).codes == ("A", "B", "C")
    with pytest.raises(ValidationError, match="words can tell at most 3 options apart; the question has 27"):
        book.labels("choice", 27)


def test_labels_are_looked_for_once_per_model_and_count(tokenizers: dict[str, FastTokenizer]) -> None:
    book = LabelBook(tokenizers["qwen"], "qwen")
    assert book.labels("choice", 5) is book.labels("choice", 5)
    assert book.labels("noul", 2) is not book.labels("choice", 2)
