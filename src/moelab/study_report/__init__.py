"""Everything about a study, or about runs side by side, in one object, and the page that shows it.

The notebooks and ``moelab report`` both come through :func:`judge_paths` or :func:`judge_study`, so they cannot
disagree. ``sides.py`` finds what is judged and what is not, ``report.py`` is what it says, ``page.py`` shows it.
"""

from moelab.study_report.page import (
    loss_figure,
    provenance,
    report_figures,
    report_tables,
    settings_table,
    throughput_figure,
    verdicts_figure,
    write_study_report,
)
from moelab.study_report.report import NothingToJudge, Report, judge_paths, judge_study

__all__ = [
    "NothingToJudge",
    "Report",
    "judge_paths",
    "judge_study",
    "loss_figure",
    "provenance",
    "report_figures",
    "report_tables",
    "settings_table",
    "throughput_figure",
    "verdicts_figure",
    "write_study_report",
]
