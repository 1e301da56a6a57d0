"""DeepEP: the dispatcher for TorchTitan, its buffer and operators, and the all-to-all experiment."""
