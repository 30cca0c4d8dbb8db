"""View data for the HTML renderer."""
