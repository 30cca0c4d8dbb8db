"""Explanations of one or several streams: data structures, validation, aggregation, comparison and display."""
