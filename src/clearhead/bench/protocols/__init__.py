"""Benchmark protocols: each measures explanations in one way."""
