"""Users' files and data sets: input sources, resumable runs over a data set, atomic writes."""
