"""The report of whatever is at some paths: one study judged, or several runs side by side.

The command line and notebook 10 both come here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from moelab.errors import BadInput
from moelab.runs import directory
from moelab.study_report.comparison import Comparison
from moelab.study_report.comparison_tables import comparison_figures, comparison_provenance, comparison_tables
from moelab.study_report.judge import judge_study
from moelab.study_report.judgement import StudyJudgement
from moelab.study_report.origin import provenance
from moelab.study_report.sides import VALID, sides_of
from moelab.study_report.tables import conversion_table, left_out_table, runs_table, study_figures


def judge_paths(
    paths: Sequence[Path],
    *,
    reference: str = "bf16_standard",
    final_fraction: float = 0.1,
    margin_nats: float | None = None,
    margin_cap_nats: float | None = None,
    dropped_seeds: Collection[int] = (),
) -> StudyJudgement | Comparison:
    """Judge one study, or compare whatever is at several paths, or at one that holds no run of ours.

    Args:
        paths: studies, run directories, or logs from elsewhere; the first is what the others are held against.
        reference: arm of a study that its others are held against.
        final_fraction: part of the steps that the final loss is a mean of.
        margin_nats: equivalence margin, or None to take it from the reference's own seed-to-seed spread.
        margin_cap_nats: what that margin may be at most, or None for 1 % of the reference's mean loss.
        dropped_seeds: left out in every arm, and shown.

    Raises:
        BadInput: if there is no path, or one cannot be read; it is named.
        NothingToJudge: if no run of a study alone finished.
    """
    if not paths:
        raise BadInput(f"give at least one path: {VALID}")
    if not 0.0 < final_fraction <= 1.0:
        raise BadInput(f"final_fraction is {final_fraction}: give a part of the steps above 0 and up to 1, such as 0.1")
    options: dict[str, Any] = {
        "final_fraction": final_fraction,
        "margin_nats": margin_nats,
        "margin_cap_nats": margin_cap_nats,
        "dropped_seeds": tuple(sorted(dropped_seeds)),
    }
    if len(paths) == 1 and paths[0].is_dir() and any(directory.find(paths[0])):
        return judge_study(paths[0], reference=reference, **options)
    sides, left_out = sides_of(paths, reference=reference)
    return Comparison(sides=sides, paths=tuple(paths), left_out=left_out, **options)


def report_figures(judged: StudyJudgement | Comparison) -> Sequence[Any]:
    """The figures of a report with their captions."""
    return comparison_figures(judged) if isinstance(judged, Comparison) else study_figures(judged)


def write_study_report(judged: StudyJudgement | Comparison, path: Path, *, with_paths: bool = False) -> Path:
    """Write a study, or runs side by side, as one self-contained HTML file.

    Args:
        judged: of :func:`judge_paths` or :func:`~moelab.study_report.judge_study`.
        path: file to write.
        with_paths: leave folders, host and user names in it.
    """
    from moelab.viz import write_report

    if isinstance(judged, Comparison):
        title, tables = judged.title, comparison_tables(judged)
        verdicts, origin = judged.verdicts, comparison_provenance(judged, with_paths=with_paths)
    else:
        title, tables = f"Study {judged.name}", [runs_table(judged), left_out_table(judged), conversion_table(judged)]
        verdicts, origin = [*judged.verdicts, *judged.held_out], provenance(judged, with_paths=with_paths)
    return write_report(
        path,
        title=title,
        verdicts=verdicts,
        figures=report_figures(judged),
        tables=tables,
        provenance=origin,
        notes=judged.notes,
        with_paths=with_paths,
    )
