"""Reports in a real browser, offline: every figure is drawn, nothing is asked for, complained about or run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from lab_page import complaints_and_requests
from playwright.sync_api import Browser, Page
from run_support import STEPS, curve, make_run, make_study

from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.experiment import Experiment
from moelab.judge.report import judge_paths, judge_study
from moelab.runs.status import State
from moelab.viz.report import write_study_report
from moelab.viz.table import MOST_ROWS, as_table


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    yield opened
    opened.close()


def opened(page: Page, report: Path, figures: int) -> None:
    """Open a report and wait for its figures; whatever is asked for, said or shown on the way is a failure."""
    complaints, requests = complaints_and_requests(page)
    page.goto(report.as_uri())
    for number in range(figures):
        page.locator(".js-plotly-plot").nth(number).locator(".main-svg").first.wait_for(state="attached")
    assert complaints == []
    assert {url.partition(":")[0] for url in requests} <= {"file", "data", "blob"}
    assert page.locator(".js-plotly-plot").count() == figures
    for width, height in ((1280, 800), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, "the page is wider than the window"


def test_report_opens_offline(page: Page, tmp_path: Path) -> None:
    study = make_study(tmp_path)
    for seed in range(4, MOST_ROWS - 3):  # with the eight of the study one run more than are shown
        make_run(tmp_path, Experiment(name="s", steps=STEPS, seed=seed), curve(5.0 + seed / 100), tps=900.0 + seed)
    report = write_study_report(judge_study(study), study / "report.html")
    opened(page, report, 3)
    runs = page.locator("#tables tbody").first.locator("tr")
    assert [runs.count(), runs.locator("visible=true").count()] == [MOST_ROWS + 1, MOST_ROWS]
    page.get_by_role("button", name="tokens/s").first.click(click_count=2, delay=10)
    assert "1,000" in runs.first.inner_text()
    page.get_by_role("button", name=f"all {MOST_ROWS + 1} rows").click()
    assert "500" in runs.last.inner_text()
    assert runs.last.is_visible()


HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


def test_a_hostile_name_is_text_in_a_comparison(page: Page, tmp_path: Path) -> None:
    """A run name, a reason and a configuration of somebody else's: in titles, legends, axes, cells and notes."""
    steps = range(1, 31)
    export = tmp_path / "wandb" / "history.csv"
    export.parent.mkdir()
    columns = {"Step": steps, f"{HOSTILE} - loss_metrics/global_avg_loss": [8 - step / 10 for step in steps]}
    pd.DataFrame({**columns, f"{HOSTILE} - throughput(tps)": 100.0}).to_csv(export, index=False)
    (export.parent / "config.yaml").write_text(f'precision: "{HOSTILE}"\n')
    for seed, state in ((0, State.COMPLETED), (1, State.FAILED)):
        experiment = Experiment(name="s", steps=30, seed=seed)
        make_run(tmp_path / "runs", experiment, [8.0 - step / 10 for step in steps], state=state, reason=HOSTILE)
    compared = judge_paths([export, tmp_path / "runs" / "s", EXAMPLE_LOGS[0]])
    report = write_study_report(compared, tmp_path / "report.html")
    opened(page, report, 2)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    shown = HOSTILE[:40]
    assert shown in page.locator(".legendtext").first.text_content()
    assert page.locator("td, th").filter(has_text=shown).count() > 3
    for section, count in (("#settings", 1), ("#tables", 2)):  # a setting and two reasons, whole
        assert page.locator(f"{section} td").filter(has_text=HOSTILE).count() == count
    assert HOSTILE in page.locator(".notes").inner_text()


def test_a_notebook_s_table_is_sorted_by_a_click(page: Page) -> None:
    shown = pd.DataFrame({"arm": ["<i>b</i>", "a", "c"], "tokens/s": [980.0, 12_345.0, 1_500.0]})
    page.set_content(as_table(shown, "three arms")._repr_html_())
    assert page.locator("i, details").count() == 0

    def column(heading: str, number: int) -> list[str]:
        page.get_by_text(heading, exact=True).click()
        return page.locator(f"tbody td:nth-child({number})").all_text_contents()

    assert column("tokens/s", 2) == ["980", "1,500", "12,345"]
    assert column("tokens/s", 2) == ["12,345", "1,500", "980"]
    assert column("arm", 1) == ["<i>b</i>", "a", "c"]
    page.set_content(as_table(pd.concat([shown] * MOST_ROWS))._repr_html_())
    assert not page.locator("table").is_visible()
    page.locator("summary").click()
    assert page.locator("table").is_visible()
