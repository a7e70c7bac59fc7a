"""Bulk work, measured: scaling over replicas, and kills at random points."""
