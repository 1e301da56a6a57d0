"""Everything about a study in one object: its runs, what they say, and the figures and the report that show it.

The notebooks and ``moelab report`` both go through :func:`judge_study`, so they cannot disagree. ``judge.py`` finds a
study's runs, ``judgement.py`` is what they say, ``tables.py`` has the figures, tables and the report that show it, and
``origin.py`` tells what was run, where and with what.
"""

from moelab.study_report.judge import NothingToJudge, judge_study
from moelab.study_report.judgement import ARM_FIELDS, StudyJudgement
from moelab.study_report.origin import provenance
from moelab.study_report.tables import conversion_table, runs_table, study_figures, write_study_report

__all__ = [
    "ARM_FIELDS",
    "NothingToJudge",
    "StudyJudgement",
    "conversion_table",
    "judge_study",
    "provenance",
    "runs_table",
    "study_figures",
    "write_study_report",
]
