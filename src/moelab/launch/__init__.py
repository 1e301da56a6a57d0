"""Starting and watching runs: torchrun on this machine."""
