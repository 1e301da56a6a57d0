"""Where the time of a step went: a trace of it, read, classified and held against the prediction."""
