"""Syntax in code models: attention and attribution by syntax class."""
