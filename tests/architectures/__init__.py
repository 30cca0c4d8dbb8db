"""Coverage of architectures: explain a tiny model of every class of transformers, for docs/architectures.md."""
