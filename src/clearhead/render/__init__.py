"""Showing: an explanation as coloured text in a terminal, as a figure, as one HTML page. No score is computed here."""
