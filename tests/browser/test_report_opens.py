"""The report in a real browser without a network: every figure is drawn, nothing is asked for, nothing complains."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from playwright.sync_api import Page, sync_playwright

from moelab.analysis import compare_convergence
from moelab.runs import metrics_table
from moelab.viz import Figure, Table, loss_curves, loss_difference, loss_tail, throughput_bars, write_report

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture
def page() -> Iterator[Page]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser.new_page(viewport={"width": 1280, "height": 800})
        browser.close()


def study_table() -> pd.DataFrame:
    noise = np.random.default_rng(0)
    parts = []
    for arm, tps in (("bf16_standard", 2000.0), ("mxfp8_standard", 1500.0)):
        for seed in range(4):
            step = np.arange(1, 81)
            loss = 8.1 - 2.5 * step / 80 + noise.normal(0, 0.02, 80)
            columns = {"segment": np.zeros(80, int), "step": step, "loss": loss, "tps": tps + noise.normal(0, 30, 80)}
            table = metrics_table(columns, run=f"study/{arm}/seed{seed}/1")
            parts.append(table.assign(arm=pd.array([arm] * 80, "string"), seed=pd.array([seed] * 80, "Int64")))
    return pd.concat(parts, ignore_index=True)


def test_report_opens_offline(page: Page, tmp_path: Path) -> None:
    table = study_table()
    (verdict,) = compare_convergence(table, reference="bf16_standard")
    figures = [loss_curves(table), loss_tail(table), loss_difference(table, verdict)]
    figures.append(throughput_bars(table, baseline="bf16_standard"))
    report = write_report(
        tmp_path / "report.html",
        title="A <script>alert(1)</script> study",
        verdicts=[verdict],
        figures=[Figure(caption="caption", figure=figure) for figure in figures],
        tables=[Table(title="Runs", columns=["run"], rows=[["<img src=x onerror=alert(1)>"]])],
        provenance={"Software": "none"},
    )
    complaints: list[str] = []
    requests: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 4")
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.locator(".js-plotly-plot").count() == 4
    assert "<script>alert(1)</script>" in page.locator("h1").inner_text()
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, "the page is wider than the window"
