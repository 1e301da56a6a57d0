"""What a step costs before it is run.

``project.py`` predicts a step in one call, with what training costs; ``uncertainty.py`` says how far to trust it.
``job.py`` has a step with nothing left to resolve and what its software does, ``step.py`` puts its time together from
``gemm.py`` (products, casts, attention), ``exchange.py`` (all-to-alls and collectives) and ``memory_bound.py`` (the
rest of a layer, and the optimizer); :mod:`moelab.layout.schedule` plays the pipeline. Every constant is in
``calibration.py``; ``gemm_fit.py`` has the intervals of what follows from those of products and casts.
``published.py`` has the published two-by-two with its missing arm, ``measured.py`` the measurements of the package and
the constants of a node, ``validation.py`` the table of all errors, which ``benchmarks/validation`` makes.

``routing.py`` says where experts live, how tokens choose them and how many ranks and nodes a token reaches;
``traffic.py`` which bytes that puts on NVLink and on the network, as a formula and counted. Nothing here imports torch.
"""
