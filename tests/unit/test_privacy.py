"""What is shared says nothing about the machine: folders, names and keys are gone, and everything else stays."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.privacy import shareable, without_places


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/home/ada/lab/x.py and /Users/ada/y", "~/lab/x.py and ~/y"),
        ("HF_TOKEN=hf_abc WANDB_API_KEY='k' NUM_TOKENS=4096", "HF_TOKEN=*** WANDB_API_KEY='***' NUM_TOKENS=4096"),
        ("logged in with hf_" + "a" * 30, "logged in with ***"),
        ('{"api_key": "abc", "password": "x"}', '{"api_key": "***", "password": "***"}'),
        ("https://ada:pass@host.org/x/y", "https://***@host.org/x/y"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("--rdzv-endpoint=gpu-17:29500 MASTER_ADDR=10.0.0.4", "--rdzv-endpoint=HOST:29500 MASTER_ADDR=HOST"),
        ("--rdzv-endpoint=localhost:0", "--rdzv-endpoint=localhost:0"),
    ],
)
def test_places_of_any_machine(before: str, after: str) -> None:
    assert without_places(before) == after


def test_places_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "people" / "ada"
    (home / "lab").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "lab")
    monkeypatch.setattr(sys, "prefix", str(home / "lab" / ".venv"))
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-17.cluster.org")
    text = f"{home}/lab/.venv/bin/python {home}/lab/runs {home}/x {tempfile.gettempdir()}/y ada@gpu-17 adamant"
    assert without_places(text) == "$VENV/bin/python ./runs ~/x $TMPDIR/y USER@HOST adamant"


@pytest.mark.parametrize(
    "text",
    [
        "<b>1,000 tokens/s</b><br></span>",
        "x = parameters.token; a/b/c, 3 / 4 / 5, see https://example.org/a/b/c",
        "token=parameters.token, num_tokens=8",
        "root mean square of runs/s/bf16_standard/seed0",
        "data:image/png;base64,iVBORw0KGgo/AAA+/9j/4AAQ==",
    ],
)
def test_everything_else_stays(text: str) -> None:
    assert without_places(text) == text
    if not text.startswith("data:"):
        assert shareable(text) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[Errno 28] No space left on device: '/scratch/ada/runs/metrics.parquet'", "…/metrics.parquet'"),
        ("'/home/ada smith/my runs/experiment.yaml'", "'…/experiment.yaml'"),
        ("in /scratch/ada", "in …"),
        ("PATH=/opt/ada/bin:/usr/bin", "PATH=…:…"),
        ("<b>/scratch/ada/train.log</b>", "<b>…/train.log</b>"),
    ],
)
def test_a_plain_text_keeps_the_name_of_a_file_alone(before: str, after: str) -> None:
    assert shareable(before).endswith(after)
    assert "ada" not in shareable(before)


WORD = st.text("abcdefghij_-0123456789", min_size=1, max_size=8)


@given(st.lists(WORD, min_size=2, max_size=5), st.sampled_from(["see {}", "'{}'", "({})", "--dir={}", "{}: failed"]))
def test_no_folder_of_an_absolute_path_remains(folders: list[str], sentence: str) -> None:
    shown = shareable(sentence.format("/" + "/".join(folders) + "/train.log"))
    assert shown == sentence.format("…/train.log")


@given(st.text(max_size=60))
def test_json_stays_json(text: str) -> None:
    """A notebook is JSON: what is replaced must leave its quoting alone."""
    assert isinstance(json.loads(without_places(json.dumps({"text": text}))), dict)
