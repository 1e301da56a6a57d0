"""The time of a step, part by part."""
