"""What is shared says nothing about the machine: folders, names and keys are gone, and everything else stays."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import tempfile
import timeit
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.privacy import each_text, shareable, without_places, without_secrets

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/home/ada/lab/x.py and /Users/ada/y", "~/lab/x.py and ~/y"),
        ("HF_TOKEN=hf_abc WANDB_API_KEY='k' NUM_TOKENS=4096", "HF_TOKEN=*** WANDB_API_KEY='***' NUM_TOKENS=4096"),
        ("logged in with hf_" + "a" * 30, "logged in with ***"),
        ('{"api_key": "abc", "password": "x"}', '{"api_key": "***", "password": "***"}'),
        ("https://ada:pass@host.org/x/y", "https://***@host.org/x/y"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ('{"Authorization": "Basic abc="}', '{"Authorization": "Basic ***"}'),
        ('"WANDB_API_KEY": "K", "token": "K"', '"WANDB_API_KEY": "***", "token": "***"'),
        ("{'WANDB_API_KEY': 'K'}", "{'WANDB_API_KEY': '***'}"),
        ("WANDB_API_KEY: K", "WANDB_API_KEY: ***"),
        ("f(wandb_api_key=K, hf_token=1K)", "f(wandb_api_key=***, hf_token=***)"),
        ('os.environ["HF_TOKEN_READ"] = "K"', 'os.environ["HF_TOKEN_READ"] = "***"'),
        ("--api-key K --hf-token K --steps 3", "--api-key *** --hf-token *** --steps 3"),
        ("['--api-key', 'K', '--steps']", "['--api-key', '***', '--steps']"),
        ("HF_TOKEN='a b' c PASSWORD=\"a\\\"b 'c\" d", "HF_TOKEN='***' c PASSWORD=\"***\" d"),
        ("AWS_SECRET_ACCESS_KEY=K</td>", "AWS_SECRET_ACCESS_KEY=***</td>"),
        ("github_pat_" + "a" * 30 + " glpat-" + "a" * 20, "*** ***"),
        ("https://K@host.org, https://a:p@ss@host.org?token=K", "https://***@host.org, https://***@host.org?token=***"),
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
        'tokens: 4096, top-8 token, tokenizer: path, token 13, "token": 13, MAX_TOKEN=4096.',
        'bytes_per_token: int, "ranks_of_a_token": 1.9, bos_token="<s>", self.token_dispatcher = made',
        "--use-api-key --steps 3, ssh://git@github.com/x, https://example.org/?at=a@b, api_key == given",
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


NAMED = ["HF_TOKEN={}", 'wandb_api_key="{}"', "{{'password': '{}'}}", "--api-key {} --steps 3", "Bearer {}"]


@given(st.text(max_size=30), st.sampled_from(NAMED), st.text("KLMNOPQRS", min_size=3, max_size=9), st.text(max_size=30))
def test_json_stays_json(before: str, named: str, secret: str, after: str) -> None:
    """Texts of a structure are cleaned one by one; as one text, JSON keeps its quoting where a secret is in quotes."""
    content = {"health": [f"{before} {named.format(secret)} {after}", 4096, None], "api_key": {"bdata": "a", "n": 1}}
    shown = each_text(without_places, content)
    assert json.loads(json.dumps(shown)) == {**content, "health": [shown["health"][0], 4096, None]}
    assert secret not in shown["health"][0].removeprefix(before).removesuffix(after)
    assert isinstance(json.loads(without_places(json.dumps({"text": content["health"][0]}))), dict)


def test_keys_stay_on_a_host_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "health")
    assert each_text(without_places, {"health": ("on health", 1)}) == {"health": ["on HOST", 1]}


@pytest.mark.parametrize(
    "file",
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))],
    ids=lambda p: p.stem,
)
def test_what_we_say_of_tokens_is_no_secret(file: Path) -> None:
    text = file.read_text().replace("WANDB_API_KEY=0123abcd", "")  # what notebook 10 shows to be taken out
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    "unit",
    ["://a:", ":a", "TOKEN_", 'TOKEN="', "hf_token='x y ", "TOKEN=,", "hf_token=1,", "--a", "-", "api_key = ", "\\"],
)
def test_the_time_goes_with_the_length(unit: str) -> None:
    def least_s(characters: int) -> float:
        text = "://HF_TOKEN=" + unit * (characters // len(unit))
        return min(timeit.repeat(lambda: without_secrets(text), number=1, repeat=5))

    assert least_s(80_000) < 10 * least_s(20_000)
