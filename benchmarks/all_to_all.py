"""Dispatch and combine of a standard all-to-all and of DeepEP at the sizes of real models, on this machine.

    torchrun --nproc-per-node 2 benchmarks/all_to_all.py --output FILE.json
    torchrun --nproc-per-node 2 benchmarks/all_to_all.py --device cpu --output /tmp/all_to_all.json    # some seconds

Every operation is timed forward and backward, under each routing, the arms taking turns. The file is written after
each group of arms; a second call with the same file goes on with what is missing. DeepEP
compiles some 70 kernels on the way with ``nvcc``, a second or two each, and keeps them for the next call.
"""

from moelab.deepep.benchmark import main

if __name__ == "__main__":
    main()
