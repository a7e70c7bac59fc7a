"""The model without weights: stable, and as faulty as it is told to be."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sakuradite.engine.backend import Group, OutOfDeviceMemory, Prefix, Read, Row
from sakuradite.engine.fake import FakeBackend, FakeTokenizer, Options, options_of
from sakuradite.errors import ConfigurationError

ROW = Row(tuple(b"Is it?"), (Read(5, (65, 66, 67)),))
SCORE = """
from sakuradite.engine.backend import *
from sakuradite.engine.fake import *
row = Row(tuple(b"Is it?"), (Read(5, (65, 66, 67)),))
print(FakeBackend(Options()).score([Group(Prefix(tuple(b"state")), [row])])[0][0][0].tolist())
"""


def scores(options: Options, *texts: str) -> list[object]:
    rows = [Row(tuple(text.encode()), (Read(len(text) - 1, (65, 66)),)) for text in texts]
    return list(FakeBackend(options).score([Group(Prefix(tuple(b"state")), rows)])[0])


def test_probabilities_are_the_same_in_every_process() -> None:
    here = FakeBackend(Options()).score([Group(Prefix(tuple(b"state")), [ROW])])[0][0]
    assert not isinstance(here, Exception)
    there = subprocess.run([sys.executable, "-c", SCORE], capture_output=True, text=True, check=True, timeout=60)
    assert there.stdout.strip() == str(here[0].tolist())
    assert np.exp(here[0].astype(np.float64)).sum() == pytest.approx(0.9, abs=1e-6)


def test_tokens_are_bytes_and_two_markers() -> None:
    tokenizer = FakeTokenizer()
    assert tokenizer.control(["a<|im_end|>\n"]) == [[97, 257, 10]]
    assert tokenizer.plain(["a<|im_end|>"]) == [list(b"a<|im_end|>")]
    assert tokenizer.opening("<|im_start|>é") == [256, 0xC3, 0xA9]


def test_options_of_a_name() -> None:
    assert options_of("fake") == Options()
    assert options_of("fake?latency=0.5&oom_rows=3&layout=padded&poison=a%20b") == Options(
        latency=0.5, oom_rows=3, layout="padded", poison="a b"
    )
    for wrong in ("fake?speed=1", "fake?latency=fast"):
        with pytest.raises(ConfigurationError, match="the fake backend"):
            options_of(wrong)


def test_faults() -> None:
    fine, bad = scores(Options(poison="BAD"), "good", "BAD")
    assert isinstance(fine, tuple)
    assert isinstance(bad, RuntimeError)
    (nan,) = scores(Options(nan="BAD"), "BAD")
    assert isinstance(nan, tuple)
    assert np.isnan(nan[0]).all()
    with pytest.raises(RuntimeError, match="spoils"):
        scores(Options(spoil="BAD"), "good", "BAD")
    with pytest.raises(OutOfDeviceMemory):
        scores(Options(oom_rows=1), "a", "b")


def test_a_crash_ends_the_process() -> None:
    script = SCORE.replace("Options()", "Options(crash='Is it')")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 70


def test_a_prefix_is_held_until_it_is_released() -> None:
    backend = FakeBackend(Options())
    prefix = Prefix(tuple(b"state"))
    backend.score([Group(prefix, [ROW])])
    assert backend.held == {id(prefix)}
    backend.release(prefix)
    assert not backend.held
    assert prefix.cache is None
