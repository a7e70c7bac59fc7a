"""How often the answers are right: labelled cases (`cases.jsonl`), and a runner that compares wordings on checkpoints.

The cases were written by hand before anything was measured with them, and stay as they are: to tune a case to a model
would make the table worthless. Each line is one state with a few questions whose answers a careful reader agrees on.
"""
