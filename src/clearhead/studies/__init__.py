"""Studies from the literature: gender bias, code syntax, the lecture, original checkpoints, BiLSTM."""
