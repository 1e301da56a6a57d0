"""From the metrics table to numbers: throughput and gain, convergence equivalence, published figures."""

from moelab.analysis.arms import arm_label
from moelab.analysis.convergence import FinalLosses, compare_convergence, final_losses
from moelab.analysis.equivalence import Interval, t_interval
from moelab.analysis.throughput import ArmThroughput, Gain, arm_throughput, gain
from moelab.analysis.verdict import Answer, Verdict, judge

__all__ = [
    "Answer",
    "ArmThroughput",
    "FinalLosses",
    "Gain",
    "Interval",
    "Verdict",
    "arm_label",
    "arm_throughput",
    "compare_convergence",
    "final_losses",
    "gain",
    "judge",
    "t_interval",
]
