"""Studies from the literature on public API: gender by depth, code syntax, the lecture, original checkpoints."""
