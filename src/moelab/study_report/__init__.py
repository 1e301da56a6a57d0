"""Everything about a study in one object: its runs, what they say, and the figures and the report that show it.

The notebooks and ``moelab report`` both come through :func:`judge_paths` or :func:`judge_study`, so they cannot
disagree. ``judge.py`` finds a study's runs, ``judgement.py`` is what they say and ``tables.py`` shows it; ``sides.py``,
``comparison.py`` and ``comparison_tables.py`` do the same for any runs side by side. ``origin.py`` tells what was run,
where and with what, and ``report_on.py`` chooses between the two and writes the report.
"""

from moelab.study_report.comparison import Comparison
from moelab.study_report.judge import NothingToJudge, judge_study
from moelab.study_report.judgement import StudyJudgement
from moelab.study_report.origin import provenance
from moelab.study_report.report_on import judge_paths, report_figures, write_study_report

__all__ = [
    "Comparison",
    "NothingToJudge",
    "StudyJudgement",
    "judge_paths",
    "judge_study",
    "provenance",
    "report_figures",
    "write_study_report",
]
