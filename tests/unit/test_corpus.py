"""The default corpus: deterministic, split without overlap, whole in the cache."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from moelab.errors import Refused
from moelab.titan import corpus


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOELAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        return corpus.prepare()


LINE = st.text(alphabet=st.characters(exclude_categories=["Cc", "Zl", "Zp"]), max_size=300)


@given(st.text() | st.lists(LINE, max_size=60).map("\n".join))
def test_passages_join_to_the_document_and_end_with_the_first_line_past_their_length(text: str) -> None:
    parts = list(corpus.passages(text))
    assert "".join(parts) == text
    for part in parts[:-1]:
        *before, last = part.splitlines(keepends=True)
        assert len("".join(before)) < corpus.PASSAGE_CHARACTERS <= len(part)
        assert last != last.splitlines()[0]  # with the end of the line


def test_splits_have_their_sizes_and_share_no_text(prepared: Path) -> None:
    train, held_out = (list(corpus.load(str(prepared / f"{split}.arrow"))["text"]) for split in corpus.SPLITS)
    assert len({*train, *held_out}) == len(train) + len(held_out)  # the standard library's files do share passages
    size, held_out_size = (sum(map(len, split)) for split in (train + held_out, held_out))
    assert 8e6 < size < 30e6  # 12 MB with Python 3.11
    assert 0.02 < held_out_size / size < 0.12
    names = [name for name, _ in corpus.documents()]
    assert len(names) == len(set(names))
    assert {corpus.is_held_out(name) for name in names} == {True, False}


def test_tokenizer_is_lossless_and_fits_the_vocabulary(prepared: Path) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(prepared))
    text = "def f(x):\n\treturn x ** 2  # naïve 測試 🙂\n"
    first, *ids, last = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert (first, last) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.decode(ids) == text
    assert max(first, *ids, last) < tokenizer.get_vocab_size() == corpus.VOCAB_SIZE


def test_two_processes_at_once_make_one_corpus_the_same_as_another(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(corpus.prepare, [(), ()])
    assert first == second
    assert [path.name for path in (tmp_path / "corpus").iterdir() if path.is_dir()] == [first.name]
    for name in ("train.arrow", "held_out.arrow", "tokenizer.json", "tokenizer_config.json"):
        assert (first / name).read_bytes() == (prepared / name).read_bytes(), name


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(corpus.CorpusError, match="MOELAB_CACHE"):
        corpus.prepare()


def test_a_folder_of_your_own_text_trains_with_its_own_vocabulary(tmp_path: Path) -> None:
    words = [f"{number} times {number} is {number * number}\n" for number in range(5000)]
    documents = [(f"page {number}", "".join(words[100 * number :][:100])) for number in range(50)]
    corpus.build(tmp_path / "mine", documents, vocab_size=300, passage_characters=1000)
    train, held_out = (list(corpus.load(f"{tmp_path}/mine/{split}.arrow")["text"]) for split in corpus.SPLITS)
    expected = sorted(text for name, text in documents if corpus.is_held_out(name))
    assert sorted("".join(held_out)) == sorted("".join(expected))
    assert sum(map(len, [*train, *held_out])) == sum(len(text) for _, text in documents)
    assert max(map(len, train)) < 1100
    assert corpus.folder_of(f"{tmp_path}/mine", 300) == tmp_path / "mine"
    with pytest.raises(Refused, match=r"mine has 300 tokens, and vocab_size is 299; set shape.vocab_size=300 or more"):
        corpus.folder_of(f"{tmp_path}/mine", 299)
    (tmp_path / "mine" / "train.arrow").unlink()
    with pytest.raises(Refused, match=r"mine has no train.arrow; .*corpus.build makes such a folder"):
        corpus.folder_of(f"{tmp_path}/mine", 300)


def test_text_of_which_nothing_would_be_held_out_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(corpus.CorpusError, match="too few documents: by their names one in 20 is held out"):
        corpus.build(tmp_path / "mine", [("page 0", "a\n")])
    assert not list(tmp_path.iterdir())
