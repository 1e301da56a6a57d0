"""DeepEP: the dispatcher for TorchTitan, its buffer and operators, and its stand-in on plain collectives."""
