"""Typed decisions with probabilities from open-weight language models."""
