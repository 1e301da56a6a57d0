"""The explorers' main views without a kernel: all figures of a grid of choices, made by the explorers themselves.

A browser takes the figures from ``static/grids/<notebook>.js``. A figure that several choices share is there once.
"""

from __future__ import annotations

import ast
import base64
import gzip
import html
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from moelab.experiment import Experiment
from moelab.notebooks import PlanParameters, ProjectParameters
from moelab.notebooks.parameters import NotebookParameters
from moelab.viz import LayoutExplorer
from moelab.viz.grouped_gemm import FITS, MODELS, ExpertExplorer
from moelab.viz.mxfp8 import QuantisationExplorer
from moelab.viz.projection import ProjectionExplorer
from moelab.viz.theme import LINE_PX
from moelab.viz.traffic import TrafficExplorer
from moelab.viz.widget import Explorer

_CASES: Mapping[str, dict[str, Any]] = {
    "671B on 256 × B200": {},
    "671B on 256 × H200": {"hardware": "h200_node"},
    "671B on 1,024 × H100": {"hardware": "h100_node", "nodes": 128},
    "16B on 64 × B200": {"model": "16B", "nodes": 8, "tp": 1, "pp": 1, "local_batch": 16},
    "16B on 16 × H100": {"model": "16B", "hardware": "h100_node", "nodes": 2, "tp": 1, "pp": 1, "local_batch": 16},
}
"""Experiments that the layout explorer begins with: how they differ from notebook 05's."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Choices of an explorer that the site has."""

    explorers: Mapping[str, Explorer]  # by what they begin with; a menu chooses among several
    choices: Mapping[str, Sequence[Any]]  # values of some controls; all others stay where they begin

    @property
    def controls(self) -> dict[str, list[str]]:
        """What each control of the page offers, in words."""
        begins = {"model and GPUs": list(self.explorers)} if len(self.explorers) > 1 else {}
        live = next(iter(self.explorers.values())).controls
        return begins | {live[name].description: [str(one) for one in values] for name, values in self.choices.items()}

    @property
    def start(self) -> list[int]:
        """Which of its values each control of the page begins with."""
        explorer = next(iter(self.explorers.values()))
        begins = [0] if len(self.explorers) > 1 else []
        return begins + [list(values).index(explorer.controls[name].value) for name, values in self.choices.items()]


def _experiment(notebook: Path, schema: type[NotebookParameters]) -> Experiment:
    """What a notebook's parameters are as authored."""
    cells = nbformat.read(notebook, as_version=4).cells
    source = next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))
    values = {line.targets[0].id: ast.literal_eval(line.value) for line in ast.parse(source).body}  # type: ignore[attr-defined]
    experiment: Experiment = schema.of(values).to_experiment()
    return experiment


def _layout_explorers(begin: Experiment) -> dict[str, Explorer]:
    return {words: LayoutExplorer(Experiment(**(begin.model_dump() | fields))) for words, fields in _CASES.items()}


GRIDS: Mapping[str, Callable[[Path], Grid]] = {
    "01_quantise_to_mxfp8": lambda _notebook: Grid(
        explorers={"": QuantisationExplorer()},
        choices={
            "distribution": ("gaussian", "student_t"),
            "block": (8, 16, 32, 64, 128, 512),
            "outlier_log2": (0, 4, 8),
        },
    ),
    "02_find_grouped_gemm_break_even": lambda _notebook: Grid(
        explorers={"": ExpertExplorer("671B", 8192, tp=2, ep=32)},
        choices={
            "model": MODELS,
            "gpu": tuple(FITS),
            "tokens": (2048, 4096, 8192, 16384),
            "ep": (8, 16, 32, 64),
        },
    ),
    "03_route_tokens": lambda _notebook: Grid(
        explorers={"": TrafficExplorer()},
        choices={
            "routing": ("round_robin", "random_balanced", "group_limited", "skewed"),
            "ep": (8, 16, 32, 64),
            "model": ("DeepSeek-V3", "Kimi-K2", "Qwen3-235B-A22B", "Qwen3-30B-A3B"),
        },
    ),
    "05_plan_layout": lambda notebook: Grid(
        explorers=_layout_explorers(_experiment(notebook, PlanParameters)),
        choices={
            "figure": ("memory", "pipeline", "mesh"),
            "pp": (1, 2, 4, 8),
            "ep": (8, 16, 32, 64),
            "activation_checkpoint": ("selective", "full"),
        },
    ),
    "08_project_to_cluster": lambda notebook: Grid(
        explorers={"": ProjectionExplorer(_experiment(notebook, ProjectParameters))},
        choices={
            "gpu": ("H100", "H200", "B200", "GB200"),
            "gpus": (128, 256, 512, 1024, 2048, 4096),
            "precision": ("bf16", "mxfp8"),
            "ep_backend": ("standard", "deepep"),
            "routing": ("round_robin", "random_balanced"),
        },
    ),
}
"""By the notebook whose explorer it is of: the grid, made from the notebook's file."""


def script(name: str, grid: Grid) -> str:
    """A grid as the JavaScript that a page loads: words and numbers of figures by choice, and the packed figures."""
    numbers: dict[str, int] = {}
    states = {}
    for words, explorer in grid.explorers.items():
        for choice in itertools.product(*grid.choices.values()):
            for control, value in zip(grid.choices, choice, strict=True):
                explorer.controls[control].value = value
            key = [list(grid.explorers).index(words)] if len(grid.explorers) > 1 else []
            key += [list(values).index(value) for values, value in zip(grid.choices.values(), choice, strict=True)]
            # Why a choice cannot be stands below the control that moved last; a page says it above the figures.
            reason = "".join(place.value for place in explorer.reasons.values())
            state: dict[str, Any] = {"words": reason or explorer.words.value}
            if explorer.figure:
                drawn = packed(as_page_figure(json.loads(explorer.figure.to_json())))
                state["figure"] = numbers.setdefault(drawn, len(numbers))
            states[",".join(map(str, key))] = state
    content = {"states": states, "figures": list(numbers)}
    return f"moelabGrids[{json.dumps(name)}] = {json.dumps(content, ensure_ascii=False)};\n"


def packed(figure: Mapping[str, Any]) -> str:
    """A figure as gzipped JSON in base64; equal figures are equal text."""
    text = json.dumps(figure, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def page(name: str, grid: Grid) -> str:
    """The place of an explorer on a page: controls that the keyboard reaches, and room for words and figures."""
    fields = []
    for (label, options), start in zip(grid.controls.items(), grid.start, strict=True):
        words = html.escape(label)
        if all(re.fullmatch(r"[\d.]+", option) for option in options):
            control = (
                f'<input type="range" name="{words}" min="0" max="{len(options) - 1}" value="{start}" '
                f'data-labels="{"|".join(options)}"><output>{options[start]}</output>'
            )
        else:
            menu = (
                f'<option value="{place}"{" selected" if place == start else ""}>{html.escape(option)}</option>'
                for place, option in enumerate(options)
            )
            control = f'<select name="{words}">{"".join(menu)}</select>'
        fields.append(f"<label>{words} {control}</label>")
    explorer = next(iter(grid.explorers.values()))
    return (
        f'<div class="moelab-explorer" data-grid="{name}"><p>Drawn when this site was built, for these controls alone. '
        f"Live, with all {len(explorer.controls)}: <code>make lab</code>, then "
        f"<code>notebooks/{name}.ipynb</code>.</p>"
        f'<form class="controls">{"".join(fields)}</form><div class="words"></div>{figure_place(" hidden")}</div>'
    )


def figure_place(attributes: str = "", content: str = "") -> str:
    """Room for a figure that ``figures.js`` draws."""
    return (
        f'<figure class="moelab-figure"{attributes}><figcaption></figcaption><div class="plot"></div>{content}</figure>'
    )


def as_page_figure(figure: Mapping[str, Any]) -> dict[str, Any]:
    """A figure with its title as HTML of its own, which a narrow page wraps; plotly would cut it off.

    Args:
        figure: plotly's JSON of a figure of :func:`moelab.viz.theme.new_figure`.

    Returns:
        ``caption, data, layout``; the layout is lower by the lines that the title had.
    """
    layout = dict(figure["layout"])
    parts = re.findall(r"<b>.*?</b>|<span.*?</span>", layout.pop("title")["text"])
    lines_px = LINE_PX * sum(part.count("<br>") + 1 for part in parts)
    caption = "".join(f"<div>{part.replace('<br>', ' ')}</div>" for part in parts)
    layout["margin"] = {**layout["margin"], "t": layout["margin"]["t"] - lines_px}
    layout["height"] -= lines_px
    return {"caption": caption, "data": figure["data"], "layout": layout}
