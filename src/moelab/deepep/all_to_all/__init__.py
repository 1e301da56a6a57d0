"""What the all-to-all experiment measures, and how its bytes are counted.

Expert parallelism moves tokens four times a layer: *dispatch* to the experts' ranks, *combine* back, and both again for
the gradients (the backward of dispatch is a combine, that of combine is a dispatch). The experiment times each of the
four for every way to do it, at sizes of real models, under each routing, the ways taking turns (A B C A B C).

Two counts of bytes, both from the experts that were drawn, never from a formula:

* **logical**: every token once for each of its experts, wherever they are. All ways deliver this much.
* **physical**: what leaves a GPU for another one. A plain all-to-all sends a copy for each expert, DeepEP one for each
  *rank* of a token's experts. Copies to the own rank do not travel and are left out.

Payload is counted: data, and scales where the data is FP8. Expert ids, scores and counts travel too: some 1 % of the
data at hidden 7168. Of several ranks the busiest counts, and of its two directions the fuller one.
"""

from moelab.deepep.all_to_all.count import row_bytes, traffic
from moelab.deepep.all_to_all.plan import OPERATIONS, ROUTINGS, SIZES, SMALL, Arm, Group, Size, plan

__all__ = ["OPERATIONS", "ROUTINGS", "SIZES", "SMALL", "Arm", "Group", "Size", "plan", "row_bytes", "traffic"]
