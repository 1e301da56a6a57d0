"""The three micro-experiments that notebooks 01, 02 and 04 run on this machine.

``numerics.py`` measures what a number format loses, ``grouped_gemm.py`` the time of the experts' products, and
``exchange.py`` that of moving tokens to the experts and back.
"""
