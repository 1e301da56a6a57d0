"""What is shared says nothing about the machine: folders, names and keys are gone, and everything else stays."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from secret_shapes import BASE64, COMMIT, HEX, PEM, SHAPES, some

from moelab.privacy import each_text, is_secret_name, shareable, visible, without_places, without_secrets

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/home/ada/lab/x.py and /Users/ada/y", "~/lab/x.py and ~/y"),
        ("HF_TOKEN=hf_abc WANDB_API_KEY='k' NUM_TOKENS=4096", "HF_TOKEN=*** WANDB_API_KEY='***' NUM_TOKENS=4096"),
        ('{"Authorization": "Basic abc="}', '{"Authorization": "Basic ***"}'),
        ('"WANDB_API_KEY": "K", "token": "K"', '"WANDB_API_KEY": "***", "token": "***"'),
        ("f(wandb_api_key=K, hf_token=1K)", "f(wandb_api_key=***, hf_token=***)"),
        ('os.environ["HF_TOKEN_READ"] = "K"', 'os.environ["HF_TOKEN_READ"] = "***"'),
        ("--api-key K --hf-token K --steps 3", "--api-key *** --hf-token *** --steps 3"),
        ("['--api-key', 'K', '--steps']", "['--api-key', '***', '--steps']"),
        ("HF_TOKEN='a b' c PASSWORD=\"a\\\"b 'c\" d", "HF_TOKEN='***' c PASSWORD=\"***\" d"),
        ("AWS_SECRET_ACCESS_KEY=K</td>", "AWS_SECRET_ACCESS_KEY=***</td>"),
        ("https://K@host.org, https://a:p@ss@host.org?token=K", "https://***@host.org, https://***@host.org?token=***"),
        ("--rdzv-endpoint=gpu-17:29500 MASTER_ADDR=10.0.0.4", "--rdzv-endpoint=HOST:29500 MASTER_ADDR=HOST"),
        ("--rdzv-endpoint=localhost:0", "--rdzv-endpoint=localhost:0"),
        ("g++ -I/home/ada/v/include -L/Users/ada/lib", "g++ -I~/v/include -L~/lib"),
        ("/var/tmp/torchinductor_ada/xy/c.cpp", "/var/tmp/torchinductor_USER/xy/c.cpp"),
        ("data:image/png;base64,iVBORw0KGgo/AAA+/9j/4AAQ==", "data:image/png;base64,iVBORw0KGgo/AAA+/9j/4AAQ=="),
    ],
)
def test_places_of_any_machine_and_no_more_than_a_key(before: str, after: str) -> None:
    assert without_places(before) == after


def test_places_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "people" / "ada"
    (home / "lab").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "lab")
    monkeypatch.setattr(sys, "prefix", str(home / "lab" / ".venv"))
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-17.cluster.org")
    text = f"{home}/lab/.venv/bin/python {home}/lab/runs {home}/x {tempfile.gettempdir()}/y {ROOT}/z ada@gpu-17 adamant"
    assert without_places(text) == "$VENV/bin/python ./runs ~/x $TMPDIR/y $MOELAB/z USER@HOST adamant"
    monkeypatch.setattr(socket, "gethostname", lambda: "health")  # a host may be called as a key is
    monkeypatch.setattr(getpass, "getuser", lambda: "ml")  # and a user as a word
    assert each_text(without_places, {"health": ("ml on health", 1)}) == {"health": ["ml on HOST", 1]}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("No space left: '/scratch/ada/runs/metrics.parquet'", "No space left: '…/metrics.parquet'"),
        ("'/home/ada smith/my runs/experiment.yaml'", "'…/experiment.yaml'"),
        ("env 'HF_HOME=/scratch/ada smith/hub' python", "env 'HF_HOME=…' python"),
        ("in /scratch/ada", "in …"),
        ("PATH=/opt/ada/bin:/usr/bin", "PATH=…:…"),
        ("<b>/scratch/ada/train.log</b>", "<b>…/train.log</b>"),
        ("g++ -I/scratch/ada/include", "g++ -I…"),
        ("/scratch/ada/train.log: no ncclInit@libnccl.so", "…/train.log: no ncclInit@libnccl.so"),
        ("cannot open //scratch/ada/train.log", "cannot open …/train.log"),
        ("mailto:ada@example.org, ada@login01.x.edu: denied.", "mailto:USER@HOST, USER@HOST: denied."),
    ],
)
def test_a_plain_text_keeps_the_name_of_a_file_alone(before: str, after: str) -> None:
    assert shareable(before) == after


WORD = st.text("abcdefghij_-0123456789", min_size=1, max_size=8)


@given(st.lists(WORD, min_size=2, max_size=5), st.sampled_from(["see {}", "'{}'", "({})", "--dir={}", "{}: failed"]))
def test_no_folder_of_an_absolute_path_remains(folders: list[str], sentence: str) -> None:
    shown = shareable(sentence.format("/" + "/".join(folders) + "/train.log"))
    assert shown == sentence.format("…/train.log")


NAMED = ["HF_TOKEN={}", 'wandb_api_key="{}"', "{{'password': '{}'}}", "--api-key {} --steps 3", "Bearer {}"]


@given(st.text(max_size=30), st.sampled_from(NAMED), st.text("KLMNOPQRS", min_size=3, max_size=9), st.text(max_size=30))
def test_json_stays_json(before: str, named: str, secret: str, after: str) -> None:
    """Texts of a structure are cleaned one by one; as one text, JSON keeps its quoting where a secret is in quotes."""
    content = {"health": [f"{before} {named.format(secret)} {after}", 4096, None], "api_key": {"bdata": COMMIT, "n": 1}}
    shown = each_text(without_places, content)
    assert json.loads(json.dumps(shown)) == {**content, "health": [shown["health"][0], 4096, None]}
    assert secret not in shown["health"][0].removeprefix(before).removesuffix(after)
    assert isinstance(json.loads(without_places(json.dumps({"text": content["health"][0]}))), dict)


@pytest.mark.parametrize("clean", [without_secrets, without_places, shareable])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_of_a_secret_is_taken_out(shape: str, clean: Callable[[str], str]) -> None:
    secret, text = SHAPES[shape]
    for whole in (text, "Error: " + json.dumps(text), f"rank 3: {text} (see train.log)"):
        shown = clean(whole.replace("{}", secret).replace("{{", "{").replace("}}", "}"))
        assert secret not in shown
        assert "***" in shown or not text.isprintable()
        assert clean(shown) == shown


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
@pytest.mark.parametrize("between", ["\n", "\\n", " ", "\r\n"])
def test_a_private_key_is_taken_out_however_its_lines_are_joined(kind: str, between: str) -> None:
    whole = between.join([f"-----BEGIN {kind}PRIVATE KEY-----", *PEM, f"-----END {kind}PRIVATE KEY-----"])
    assert without_secrets(f"a {whole} b") == "a *** b"
    assert without_secrets(f"a {whole[:100]}") == "a ***"


STAY = f"""\
commit {COMMIT}
moelab 0.1.0, commit {COMMIT} in 2 runs, commit {COMMIT[::-1]} in 1 run against {COMMIT}
git+https://github.com/pytorch/ao@{COMMIT}
https://github.com/a/b/blob/{COMMIT}/c.py
{COMMIT}-dirty
wandb: synced at commit {COMMIT}
v0.1-3-g{COMMIT}
models--x/snapshots/{COMMIT}/config.json
{COMMIT} refs/heads/main
sha1:{COMMIT}
{some(64, HEX)}
{some(32, HEX)}
123e4567-e89b-12d3-a456-426614174000
{"0" * 40}
sha512-{BASE64}
s/bf16_standard/seed0/20260914T031022Z-a1b2c3
bf16_standard-0a1b2c3d
torch 2.14.0+git0a1b2c3
KeyError: 'model.layers.0'
key=layers.0.w1
--user ada -u 3
signature=inspect.signature(f)
sig=9
401 Unauthorized for url https://huggingface.co/api/whoami
invalid password
hf_hub_download sk-learn
Basic configuration
"auth": "none"
the bearer of this
MAX_KEY=3
pass 3 of 4
NCCL_IB_HCA=mlx5
<b>1,000 tokens/s</b><br></span>
x = parameters.token; a/b/c, 3 / 4 / 5, see https://example.org/a/b/c
token=parameters.token, num_tokens=8
tokens: 4096, top-8 token, tokenizer: path, token 13, "token": 13, MAX_TOKEN=4096.
bytes_per_token: int, "ranks_of_a_token": 1.9, bos_token="<s>", self.token_dispatcher = made
--use-api-key --steps 3, ssh://git@github.com/x, https://example.org/?at=a@b, api_key == given
root mean square of runs/s/bf16_standard/seed0
100%faster, https://example.org/a%20b?next=%2Fhome%3Fstep%3D3, /a%2Fb
mkdir -p runs, ssh -p 22 gpu-1, mysql: unknown host
x@self.weight, x@y.z(), a//b // c, git@github.com:x/y.git, torch@2.14.0, train@t.py"""


@pytest.mark.parametrize("text", STAY.splitlines())
def test_what_only_looks_like_a_secret_or_a_place_stays(text: str) -> None:
    assert [clean(text) for clean in (without_secrets, without_places, shareable)] == [text] * 3


TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]


@pytest.mark.parametrize("file", TEXTS, ids=lambda path: path.stem)
def test_what_we_say_of_tokens_is_no_secret(file: Path) -> None:
    text = file.read_text().replace("WANDB_API_KEY=0123abcd", "")  # what notebook 10 shows to be taken out
    assert without_secrets(text) == text


UNITS = [
    *("://a:", ":a", "TOKEN_", 'TOKEN="', "hf_token='x y ", "TOKEN=,", "hf_token=1,", "--a", "-", "api_key = ", "\\"),
    *("-----BEGIN RSA PRIVATE KEY-----", "eyJ", "eyJ.", "docker login ", " -u a", "xoxb-1-", "\x1b["),
    *("a@b.", "a@", "Authorization: a b=", "mysql -p", "authorization':'"),
]


@pytest.mark.parametrize("unit", UNITS)
def test_the_time_goes_with_the_length(unit: str) -> None:
    def least_s(characters: int) -> float:
        text = "://HF_TOKEN=" + unit * (characters // len(unit))
        return min(timeit.repeat(lambda: without_secrets(text), timer=time.process_time, number=1, repeat=5))

    assert least_s(80_000) < 10 * least_s(20_000)


def test_a_variable_of_a_secret_name_and_a_commit_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "PGPASSWORD", "SLURM_JWT", "WANDB_API_KEY", "GITHUB_PAT", "AWS_ACCESS_KEY_ID"):
        assert all(map(is_secret_name, (name, name.lower()))), name
    for name in ("PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "NCCL_IB_HCA", "SSH_AUTH_SOCK", "KEYBOARD"):
        assert not is_secret_name(name), name
    monkeypatch.setenv("TRACKER_API_KEY", "correct horse")
    monkeypatch.setenv("OTHER_TOKEN", "true")  # too short to be searched for
    assert without_secrets("cannot log in with correct horse: true") == "cannot log in with ***: true"
    assert without_secrets(f"wandb: after the commit, key {COMMIT}") == "wandb: after the commit, key ***"
    assert each_text(without_secrets, {"git_commit": COMMIT, "run": COMMIT}) == {"git_commit": COMMIT, "run": "***"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07and\x1b[2J", "red and"),
        ("a\u202eb\u200bc\x00d\x08", "a\\u202ebc\\x00d\\x08"),
        ("over\rwritten\r\n\tby", "over\\rwritten\n\tby"),
        ("\udc80", "\\udc80"),
        ("naïve – 中文 👍", "naïve – 中文 👍"),
    ],
)
def test_signs_that_cannot_be_seen_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == without_secrets(text) == shown
