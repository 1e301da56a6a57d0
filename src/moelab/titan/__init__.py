"""The bridge to TorchTitan: ``python -m torchtitan.train --module moelab.titan --config NAME``."""
