"""From the metrics table to the verdict: equivalence over seeds, throughput and gains, and the report of both."""
