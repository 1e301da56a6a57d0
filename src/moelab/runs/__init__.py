"""Run directories, and the metrics table that every source of a run's metrics is read into."""
