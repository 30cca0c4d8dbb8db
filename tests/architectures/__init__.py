"""Every class of the installed transformers that can be built tiny, tried: the table in docs/architectures.md."""
