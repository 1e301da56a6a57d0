"""Is this node, and every node of a job, fit for a run? Each check yields findings; none of them changes anything.

``gpu`` and ``links`` look at a node's GPUs and at what carries the bytes, ``deepep`` at what DeepEP needs, and
``smoke`` runs it once. ``node`` is what a node says of itself; ``preflight`` is all that is looked at before a study is
submitted, with the nodes held against each other. ``measure`` times GPUs and links of many nodes, and ``slow`` names
those that are slow.
"""
