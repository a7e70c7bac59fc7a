"""Measure wordings on a checkpoint, and print the table of what was measured.

    python -m tests.benchmarks.quality score CHECKPOINT --name 1.5B --out results [WORDING ...] [--shipped]
    python -m tests.benchmarks.quality table results

A wording's name with `@turned` after it is scored with the options in reverse; where the results hold both, the table
has their mean, too. Without names all wordings are scored. `--shipped` scores the engine itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import groupby
from pathlib import Path

from tests.benchmarks.quality.report import table
from tests.benchmarks.quality.scoring import Model, Run, Scored, read_cases, score
from tests.benchmarks.quality.shipped import shipped
from tests.benchmarks.quality.wordings import WORDINGS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("score")
    measure.add_argument("checkpoint", type=Path)
    measure.add_argument("wording", nargs="*")
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
    cases = read_cases()
    folder = arguments.out / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    def keep(name: str, run: list[Scored]) -> None:
        rows = [[s.probabilities, s.mass, s.tokens] for s in run]
        (folder / f"{name}.json").write_text(json.dumps(rows))
        print(f"{arguments.name} {name}: {time.perf_counter() - start:.0f} s", flush=True)

    if arguments.shipped:
        keep("engine", asyncio.run(shipped(arguments.checkpoint, arguments.dtype, cases)))
        return
    named = {name: _run(name) for name in arguments.wording or WORDINGS}
    model = Model(arguments.checkpoint, arguments.dtype)
    for _, group in groupby(sorted(named, key=lambda n: named[n].wording.head), lambda n: named[n].wording.head):
        names = list(group)
        for name, run in zip(names, score(model, [named[name] for name in names], cases), strict=True):
            keep(name, run)


def _run(name: str) -> Run:
    wording, _, turned = name.partition("@")
    return Run(WORDINGS[wording], turned == "turned")


def _results(folder: Path) -> dict[str, dict[str, list[Scored]]]:
    """Runs by model and wording, with the mean over both orders of the options where both are there."""
    results: dict[str, dict[str, list[Scored]]] = {}
    for file in sorted(folder.glob("*/*.json")):
        rows = json.loads(file.read_text())
        results.setdefault(file.parent.name, {})[file.stem] = [
            Scored(tuple(p), mass, tokens) for p, mass, tokens in rows
        ]
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
