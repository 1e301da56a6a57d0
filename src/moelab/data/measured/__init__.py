"""Measurements, as the scripts in ``benchmarks/`` wrote them."""
