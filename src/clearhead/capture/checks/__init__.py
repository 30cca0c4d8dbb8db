"""Checks of a model before its captured attention is trusted: self-test, detached gradients, token mixing."""
