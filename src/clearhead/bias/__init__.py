"""What information flows where: an axis such as gender, layer by layer."""
