"""HTML reports of concept and code studies."""
