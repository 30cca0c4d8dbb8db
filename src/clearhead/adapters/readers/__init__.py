"""Readers: how text, images, regions and image tokens become model inputs and units."""
