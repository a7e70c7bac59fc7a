"""Measure wordings on a checkpoint, and print the table of what was measured.

    python -m tests.benchmarks.quality score CHECKPOINT --name 1.5B --out results [--wording NAME ...] [--shipped]
    python -m tests.benchmarks.quality table results

A wording's name with `@turned` after it is scored with the options in reverse; where the results hold both, the table
has their mean, too. Without names all wordings are scored. `--shipped` scores the engine itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import batched, groupby
from pathlib import Path

from tests.benchmarks.quality.report import table
from tests.benchmarks.quality.scoring import Model, Run, Scored, read_cases, score
from tests.benchmarks.quality.shipped import shipped
from tests.benchmarks.quality.wordings import WORDINGS

STATES_AT_ONCE = 8  # between two additions to the results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("score")
    measure.add_argument("checkpoint", type=Path)
    measure.add_argument("--wording", nargs="+", metavar="NAME", help="else all")
    measure.add_argument("--name", required=True)
    measure.add_argument("--out", type=Path, required=True)
    measure.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    measure.add_argument("--shipped", action="store_true")
    show = commands.add_parser("table")
    show.add_argument("results", type=Path)
    show.add_argument("--base", default="draft", help="the run that others are compared with")
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table(read_cases(), _results(arguments.results), arguments.base))
    else:
        _measure(arguments)


def _measure(arguments: argparse.Namespace) -> None:
    """Score what has no results yet, adding to the files as states are done: a run that was cut off goes on."""
    cases = read_cases()
    folder: Path = arguments.out / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.shipped:
        _add(folder / "engine.jsonl", asyncio.run(shipped(arguments.checkpoint, arguments.dtype, cases)))
        return
    named = {name: _run(name) for name in arguments.wording or WORDINGS}
    model = Model(arguments.checkpoint, arguments.dtype)
    done = {name: len(_rows(folder / f"{name}.jsonl")) for name in named}
    alike = {name: (run.wording.head, done[name]) for name, run in named.items()}  # what can share a forward
    for _, same in groupby(sorted(named, key=alike.__getitem__), key=alike.__getitem__):
        names = list(same)
        groups = [list(group) for _, group in groupby(cases[done[names[0]] :], key=lambda case: case.state)]
        start = time.perf_counter()
        for count, part in enumerate(batched(groups, STATES_AT_ONCE), 1):
            scored = score(model, [named[name] for name in names], [case for group in part for case in group])
            for name, run in zip(names, scored, strict=True):
                _add(folder / f"{name}.jsonl", run)
            spent = f"{time.perf_counter() - start:.0f} s"
            print(f"{', '.join(names)}: {count * STATES_AT_ONCE} of {len(groups)} states, {spent}", flush=True)


def _add(file: Path, run: list[Scored]) -> None:
    with file.open("a") as out:
        out.writelines(json.dumps([s.probabilities, s.mass, s.tokens]) + "\n" for s in run)


def _rows(file: Path) -> list[Scored]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [Scored(tuple(p), mass, tokens) for p, mass, tokens in map(json.loads, lines)]


def _run(name: str) -> Run:
    wording, _, turned = name.partition("@")
    return Run(WORDINGS[wording], turned == "turned")


def _results(folder: Path) -> dict[str, dict[str, list[Scored]]]:
    """Runs by model and wording, with the mean over both orders of the options where both are there."""
    results: dict[str, dict[str, list[Scored]]] = {}
    count = len(read_cases())
    for file in sorted(folder.glob("*/*.jsonl")):
        if len(rows := _rows(file)) == count:
            results.setdefault(file.parent.name, {})[file.stem] = rows
    for runs in results.values():
        for name in [name for name in runs if f"{name}@turned" in runs]:
            pairs = zip(runs[name], runs[f"{name}@turned"], strict=True)
            runs[f"{name}, both orders"] = [_mean(a, b) for a, b in pairs]
    return results


def _mean(a: Scored, b: Scored) -> Scored:
    p = tuple((x + y) / 2 for x, y in zip(a.probabilities, b.probabilities, strict=True))
    return Scored(p, (a.mass + b.mass) / 2, a.tokens + b.tokens)


if __name__ == "__main__":
    main()
