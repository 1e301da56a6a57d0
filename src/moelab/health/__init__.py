"""Are this node, and all nodes of a job, fit for a run? Each check yields findings and changes nothing.

``node`` reports on a node and its GPUs, ``links`` on what carries the bytes, ``deepep`` on what DeepEP needs, and
``smoke`` runs DeepEP once. ``preflight`` is everything that is checked before a study is submitted, and compares the
nodes with each other. ``measure`` times the GPUs and links of many nodes, and ``slow`` names the slow ones.
"""
