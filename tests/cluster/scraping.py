"""A page of metrics as numbers to compare."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "ray_sakuradite_"


class Page:
    """The series of a page in Prometheus' text format. Names are given without `ray_sakuradite_`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.types: dict[str, str] = {}
        self.labels: dict[str, set[str]] = defaultdict(set)
        self._series: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            if family.name.startswith(PREFIX):
                self.types[family.name.removeprefix(PREFIX)] = family.type
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    name = sample.name.removeprefix(PREFIX)
                    self._series[name].append((sample.labels, sample.value))
                    self.labels[name] |= set(sample.labels)

    def sum(self, name: str, **labels: str) -> float:
        """The sum of all series of a name that have these labels; 0 where there are none."""
        wanted = labels.items()
        return sum(value for found, value in self._series.get(name, []) if wanted <= found.items())

    def values(self, name: str, label: str) -> set[str]:
        """What a label has been."""
        return {found.get(label, "") for found, _ in self._series.get(name, [])}

    def vector(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """Every series of a name as Prometheus knows it, with `ray_` in front."""
        return {frozenset(labels.items()): value for labels, value in self._series.get(name.removeprefix(PREFIX), [])}

    def names(self) -> set[str]:
        """Every series' name."""
        return set(self._series)
