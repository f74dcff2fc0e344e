"""Text as windows of word numbers, and the vocabulary that they are numbers of."""

import json

import numpy as np
import pytest

from splitjax.data import Vocabulary, load_text
from splitjax.errors import DataError

TRAIN = "the cat sat\n\nthe dog <unk> the cat\r\na b\n"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.txt").write_bytes(TRAIN.encode())
    (folder / "test.txt").write_text("a bird sat\nthe end\n")
    return folder


def test_words_go_by_frequency_then_by_first_appearance(folder):
    vocabulary = load_text(folder, seq_len=3).vocabulary
    assert vocabulary.words == ("<unk>", "<eos>", "the", "cat", "sat", "dog", "a", "b")
    assert load_text(folder, seq_len=3, vocab_size=4).vocabulary.words == ("<unk>", "<eos>", "the", "cat")


def test_windows_share_one_word_and_predict_each_word_once(folder):
    dataset = load_text(folder, seq_len=4)
    numbers = dataset.vocabulary.encode(TRAIN)
    assert dataset.vocabulary.decode(numbers) == "the cat sat\n\nthe dog <unk> the cat\na b\n"
    windows = dataset.train["tokens"]
    assert windows.shape == (3, 5) and windows.dtype == np.int32
    np.testing.assert_array_equal(windows[:, :-1].ravel(), numbers[:12])
    np.testing.assert_array_equal(windows[:, 1:].ravel(), numbers[1:13])
    assert np.shares_memory(windows[0], windows[1])
    assert dataset.num_classes == 8 and dataset.transform is None and dataset.augmentation is None
    (batch,) = dataset.train_batches(3, seed=1)
    assert batch.keys() == {"tokens"} and sorted(batch["tokens"][:, 0].tolist()) == sorted(windows[:, 0].tolist())
    (padded,) = dataset.test_batches(2)
    assert padded["mask"].tolist() == [1, 0]


def test_words_that_training_lacks_are_unknown(folder):
    dataset = load_text(folder, seq_len=4)
    assert dataset.vocabulary.decode(dataset.test["tokens"][0]) == "a <unk> sat\nthe"


def test_a_single_file_is_split_at_its_last_tenth(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"word{number} x y z\n" for number in range(25)))
    dataset = load_text(tmp_path / "one.txt", seq_len=2)
    assert "word22" in dataset.vocabulary.words and "word23" not in dataset.vocabulary.words
    assert dataset.vocabulary.decode(dataset.test["tokens"][0]) == "<unk> x y"
    assert dataset.name == "one" and (dataset.num_train, dataset.num_test) == (57, 4)


@pytest.mark.parametrize(
    ("names", "test"),
    [
        (("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"), "wiki.test.tokens"),
        (("train.txt", "valid.txt"), "valid.txt"),
        (("wiki.train.raw", "wiki.validation.raw", "readme.md"), "wiki.validation.raw"),
    ],
)
def test_the_names_of_the_corpora_are_found(tmp_path, names, test):
    for name in names:
        (tmp_path / name).write_text("a b c d e f\n" if name != test else "f e d c b a\n")
    dataset = load_text(tmp_path, seq_len=2)
    assert dataset.vocabulary.decode(dataset.test["tokens"][0]) == "f e d"


def test_characters(folder):
    dataset = load_text(folder, seq_len=5, level="char")
    assert (
        dataset.vocabulary.words[:2] == ("<unk>", " ")
        and "\n" in dataset.vocabulary.words
        and "<eos>" not in dataset.vocabulary.words
    )
    assert (
        "".join(dataset.vocabulary.decode(window[:-1]) for window in dataset.train["tokens"])
        == TRAIN.replace("\r\n", "\n")[:35]
    )


def test_a_vocabulary_is_saved_whole_and_read_back(folder, tmp_path):
    vocabulary = load_text(folder, seq_len=3).vocabulary
    vocabulary.save(tmp_path / "vocabulary.json")
    again = Vocabulary.load(tmp_path / "vocabulary.json")
    assert again == vocabulary and again.digest == vocabulary.digest and len(vocabulary.digest) == 64
    again_loaded, loaded = load_text(folder, seq_len=3, vocabulary=again), load_text(folder, seq_len=3)
    np.testing.assert_array_equal(again_loaded.train["tokens"], loaded.train["tokens"])
    assert vocabulary.digest == "d0d0bc5f9acc4fb224b418c47fc3602d2b06f206ba24096052f4b45d89a477bb"
    assert Vocabulary(vocabulary.words[::-1]).digest != vocabulary.digest != Vocabulary(vocabulary.words, "char").digest
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["vocabulary.json"]


def test_an_earlier_vocabulary_is_used(folder):
    mine = Vocabulary(("the", "<unk>"))
    tokens = load_text(folder, seq_len=3, vocabulary=mine).train["tokens"]
    assert tokens[0].tolist() == [0, 1, 1, 1]


def test_a_damaged_vocabulary_is_an_error(folder, tmp_path):
    file = tmp_path / "vocabulary.json"
    load_text(folder, seq_len=3).vocabulary.save(file)
    text = file.read_text()
    file.write_text(text.replace("dog", "dug"))
    with pytest.raises(DataError, match="do not fit its digest") as caught:
        Vocabulary.load(file)
    assert caught.value.place == str(file)
    file.write_text(text[:-5])
    with pytest.raises(DataError, match="cannot be read"):
        Vocabulary.load(file)
    file.write_text(json.dumps({"words": []}))
    with pytest.raises(DataError, match="not a vocabulary"):
        Vocabulary.load(file)
    with pytest.raises(DataError, match="cannot be read"):
        Vocabulary.load(tmp_path / "none")


@pytest.mark.parametrize("words", [("a",), ("<unk>", "a", "a"), ("<unk>", 3)])
def test_words_are_distinct_texts(words):
    with pytest.raises(DataError, match="distinct words"):
        Vocabulary(words)


def test_a_number_out_of_range_is_an_error(folder):
    with pytest.raises(DataError, match="words 0 to 7"):
        load_text(folder, seq_len=3).vocabulary.decode([8])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seq_len": 0}, "seq_len must be"),
        ({"seq_len": 20}, "14 words is too short for one window of 21"),
        ({"seq_len": 8}, "7 words is too short"),
        ({"vocab_size": 1}, "at least one word"),
        ({"level": "line"}, "no such level"),
    ],
)
def test_wrong_options_are_errors(folder, options, match):
    with pytest.raises(DataError, match=match):
        load_text(folder, **{"seq_len": 3, **options})


@pytest.mark.parametrize(("contents", "match"), [(b"caf\xe9 x\n", "not UTF-8"), (b"ab\xc3\xa9\0", "holds the byte 0")])
def test_what_is_no_text_names_the_byte(folder, contents, match):
    (folder / "test.txt").write_bytes(contents)
    with pytest.raises(DataError, match=match) as caught:
        load_text(folder, seq_len=3)
    assert caught.value.place == f"{folder / 'test.txt'}, byte offset {3 if b'caf' in contents else 4}"


def test_missing_and_ambiguous_files_are_errors(folder, tmp_path):
    (folder / "wiki.train.tokens").write_text("x")
    with pytest.raises(DataError, match="several files for the split 'train'"):
        load_text(folder)
    for name in ("train.txt", "wiki.train.tokens"):
        (folder / name).unlink()
    with pytest.raises(DataError, match=r"no text for the split 'train'[\s\S]*test.txt"):
        load_text(folder)
    with pytest.raises(DataError, match="cannot be read"):
        load_text(tmp_path / "none.txt")
