"""The engine: batches of inputs and targets, the passes that methods require, and the assembly of explanations."""
