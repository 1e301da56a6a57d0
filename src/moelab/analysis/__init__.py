"""From the metrics table to numbers: throughput and gain, convergence equivalence, published figures."""
