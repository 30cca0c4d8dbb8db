"""Gender by depth: an axis of word pairs through the layers of a masked language model."""
