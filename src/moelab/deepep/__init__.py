"""DeepEP: the dispatcher for TorchTitan, its check of the environment, and the all-to-all experiment."""
