"""A model without weights: `backend="fake"`. For tests of everything around the engine, and for dry runs.

Probabilities come from a stable hash of a row's tokens, so they are the same in every process, whatever shares the
batch. Delays and faults are asked for in the model's name, as in `fake?latency=0.01&layout=padded`; see `Options`.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl
from zlib import crc32

import numpy as np

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Group, Layout, ModelFacts, OutOfDeviceMemory, Prefix, Row, RowScores
from sakuradite.engine.template import Frame
from sakuradite.errors import ConfigurationError, InsufficientResourcesError, error_from_code

MARKERS = ("<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(MARKERS)


@dataclass(frozen=True, slots=True)
class Options:
    """What a fake model does besides answering. Texts are looked for in a row's whole prompt."""

    latency: float = 0.0
    """Seconds per forward."""
    token_latency: float = 0.0
    """Seconds per computed token."""
    load: float = 0.0
    """Seconds to load."""
    load_error: str = ""
    """An error code of the contract to fail the load with."""
    layout: Layout = "packed"
    context: int = 1 << 20
    mass: float = 0.9
    """What all labels of a question get together."""
    poison: str = ""
    """A row with this text fails its forward by an exception of its own."""
    spoil: str = ""
    """A batch with this text fails as a whole."""
    nan: str = ""
    """A row with this text has scores that are not numbers."""
    oom_rows: int = 0
    """More rows than this do not fit the device."""
    crash: str = ""
    """A row with this text ends the process."""
    hang: str = ""
    """A forward with this text never returns."""


def options_of(model: str) -> Options:
    """The options in a fake model's name. Raises ConfigurationError for one that does not exist."""
    kinds: dict[str, type] = {f.name: type(f.default) for f in fields(Options)}
    values: dict[str, Any] = {}
    for name, text in parse_qsl(model.partition("?")[2], keep_blank_values=True):
        if name not in kinds:
            raise ConfigurationError(f"the fake backend has no option {name!r}; it has {', '.join(kinds)}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise ConfigurationError(f"the fake backend's option {name} is not {kinds[name].__name__}") from None
    return Options(**values)


def load(config: ModelConfig) -> tuple[FakeTokenizer, FakeBackend]:
    """The fake model of a configuration."""
    options = options_of(config.model)
    if config.device not in ("auto", "cpu"):
        raise InsufficientResourcesError(f"the fake backend runs on the CPU; {config.device} was asked for")
    time.sleep(options.load)
    if options.load_error:
        raise error_from_code(options.load_error, f"{config.model} was told to fail its load")
    return FakeTokenizer(), FakeBackend(options)


class FakeTokenizer:
    """One token per byte of UTF-8, and two markers for turns."""

    frame = Frame("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    forbidden = frozenset(range(256, VOCABULARY))
    warnings: tuple[str, ...] = ()

    def opening(self, text: str) -> list[int]:
        return self.control([text])[0]

    def control(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._marked(text, 0) for text in texts]

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def _marked(self, text: str, number: int) -> list[int]:
        if number == len(MARKERS):
            return list(text.encode())
        ids: list[int] = []
        for i, piece in enumerate(text.split(MARKERS[number])):
            ids += [256 + number] * (i > 0) + self._marked(piece, number + 1)
        return ids


class FakeBackend:
    """Scores by hash. Counts what it did, for tests: `forwards` lists the rows of each, `released` counts prefixes."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.facts = ModelFacts(
            architecture="Fake",
            device="cpu",
            dtype="float32",
            context_length=options.context,
            vocabulary_size=VOCABULARY,
            parameters=0,
            weight_bytes=0,
            layout=options.layout,
            layout_reason="nothing is computed",
        )
        self.head: tuple[int, ...] = ()
        self.forwards: list[int] = []
        self.held: set[int] = set()
        self.released = 0
        self.closed = False
        self._faults = any((options.poison, options.spoil, options.nan, options.crash, options.hang))

    def set_head(self, tokens: Sequence[int]) -> None:
        self.head = tuple(tokens)

    def score(self, groups: Sequence[Group]) -> list[list[RowScores | Exception]]:
        options = self.options
        rows = sum(len(group.rows) for group in groups)
        if options.oom_rows and rows > options.oom_rows:
            raise OutOfDeviceMemory(f"{rows} rows")
        self.forwards.append(rows)
        if options.latency or options.token_latency:
            tokens = sum(
                (len(group.prefix.tokens) - len(self.head)) * (group.prefix.cache is None)
                + sum(len(row.suffix) for row in group.rows)
                for group in groups
            )
            time.sleep(options.latency + options.token_latency * tokens)
        found: list[list[RowScores | Exception]] = []
        for group in groups:
            if group.prefix.cache is None:
                group.prefix.cache = crc32(array("I", group.prefix.tokens))
                self.held.add(id(group.prefix))
            found.append([self._row(group.prefix, row) for row in group.rows])
        return found

    def release(self, prefix: Prefix) -> None:
        if prefix.cache is not None:
            prefix.cache = None
            self.held.discard(id(prefix))
            self.released += 1

    def close(self) -> None:
        self.closed = True

    def _row(self, prefix: Prefix, row: Row) -> RowScores | Exception:
        options = self.options
        if self._faults:
            text = bytes(token for token in prefix.tokens + row.suffix if token < 256).decode(errors="replace")
            if options.crash and options.crash in text:
                os._exit(70)
            while options.hang and options.hang in text:
                time.sleep(1)
            if options.spoil and options.spoil in text:
                raise RuntimeError("a row of this batch spoils it")
            if options.poison and options.poison in text:
                return RuntimeError("this row is poisoned")
            if options.nan and options.nan in text:
                return tuple(np.full(len(read.tokens), np.nan, np.float32) for read in row.reads)
        scores = []
        for read in row.reads:
            seed = crc32(array("I", row.suffix[: read.offset + 1]), prefix.cache)
            draws = [(crc32(token.to_bytes(4, "little"), seed) % 1000) + 1 for token in read.tokens]
            scores.append(np.log(np.array(draws, np.float32) * np.float32(options.mass / sum(draws))))
        return tuple(scores)
