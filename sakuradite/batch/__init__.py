"""Bulk work: decide on every row of a file, over many replicas, resumable. `run` is the way in.

from sakuradite.batch import run
summary = run("tickets.parquet", "answers.parquet", questions, "Qwen/Qwen3-0.6B")
"""

from sakuradite.batch.job import Progress, Report, Summary, run

__all__ = ["Progress", "Report", "Summary", "run"]
