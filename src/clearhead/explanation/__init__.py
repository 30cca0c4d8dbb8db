"""Results: explanations of one or several streams, their validation, aggregation, comparison and display."""
