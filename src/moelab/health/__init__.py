"""Is this node, and every node of a job, fit for a run? Each check yields findings; none of them changes anything.

``node`` is what a node says of itself and of its GPUs, ``links`` what carries the bytes; ``deepep`` is what DeepEP
needs, and ``smoke`` runs it once. ``preflight`` is all that is looked at before a study is submitted, with the nodes
held against each other. ``measure`` times GPUs and links of many nodes, and ``slow`` names those that are slow.
"""
