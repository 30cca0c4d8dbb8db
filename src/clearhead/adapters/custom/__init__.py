"""Adapters for models that are not from transformers."""
