"""The formats: small files of each, whole and damaged."""

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from scipy.sparse import csc_matrix

from fenchel_lab.data import (
    BrokenDataError,
    MissingDataError,
    cifar10,
    easy_vqa,
    eraser,
    german_nouns,
    glove,
    imdb,
    mil,
    mnist,
    multi30k,
    ner,
    sigmorphon2018,
    sst,
    ucr,
    ud_ewt,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCHEL_DATA", raising=False)
    monkeypatch.setenv("FENCHEL_CACHE", str(tmp_path / "cache"))


def place(folder: Path, name: str, content: bytes | str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def row(*columns: str) -> str:
    return "\t".join(columns) + "\n"


TREE = (
    "# text = They don't.\n"
    + row("1", "They", "they", "PRON", "_", "_", "2", "nsubj", "_", "_")
    + row("2-3", "don't", "_", "_", "_", "_", "_", "_", "_", "_")
    + row("2", "do", "do", "AUX", "_", "_", "0", "root", "_", "_")
    + row("3", "n't", "not", "PART", "_", "_", "2", "advmod", "_", "_")
    + row("3.1", "go", "go", "VERB", "_", "_", "_", "_", "_", "_")
    + "\n"
)


def test_a_treebank_reads_words_tags_heads_and_relations(tmp_path: Path) -> None:
    place(tmp_path, "ud_ewt/en_ewt-ud-dev.conllu", TREE + TREE.replace("\n", "\r\n"))
    first, second = ud_ewt.load("dev", tmp_path)
    assert first == second
    assert first.words == ("They", "do", "n't")
    assert first.tags == ("PRON", "AUX", "PART")
    assert first.heads == (2, 0, 2)
    assert first.relations == ("nsubj", "root", "advmod")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (("\tnsubj\t_", "\tnsubj"), "9 columns, not 10"),
        (("\t0\troot", "\t9\troot"), "not those of a tree"),
        (("\t0\troot", "\tx\troot"), "invalid literal"),
    ],
)
def test_a_damaged_treebank_is_told(damage: tuple[str, str], words: str, tmp_path: Path) -> None:
    place(tmp_path, "ud_ewt/en_ewt-ud-dev.conllu", TREE.replace(*damage))
    with pytest.raises(BrokenDataError, match=rf"en_ewt-ud-dev\.conllu is damaged.*{words}"):
        ud_ewt.load("dev", tmp_path)


def zipped(**members: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), text)
    return buffer.getvalue()


def test_entities_and_chunks_are_read_from_their_archives(tmp_path: Path) -> None:
    text = "-DOCSTART- -DOCSTART- O\nSão NC B-LOC\nPaulo VMI I-LOC\n\n, Fc O\n\n\n"
    place(tmp_path, "ner/conll2002.zip", zipped(conll2002__ned_testb=text))
    place(tmp_path, "ner/conll2000.zip", zipped(conll2000__train_txt="The DT B-NP\ndog NN I-NP\n"))
    assert ner.load("dutch", "test", tmp_path) == [
        ner.Sentence(("São", "Paulo"), ("B-LOC", "I-LOC")),
        ner.Sentence((",",), ("O",)),
    ]
    assert ner.load_chunks("train", tmp_path) == [ner.Sentence(("The", "dog"), ("B-NP", "I-NP"))]


def test_damaged_entities_are_told(tmp_path: Path) -> None:
    for content, words in (
        (b"not an archive", "not a zip"),
        (zipped(conll2002__ned_train="a b\n"), "There is no item"),
        (zipped(conll2002__ned_testb="São B-LOC\n"), "not a word, a part of speech and a tag: 'São B-LOC'"),
        (zipped(conll2002__ned_testb="São NC LOC\n"), "not a word, a part of speech and a tag"),
    ):
        place(tmp_path, "ner/conll2002.zip", content)
        with pytest.raises(BrokenDataError, match=words):
            ner.load("dutch", "test", tmp_path)


SERIES = "#about\n@problemName x\n@classLabel true up down\n@data\n1,2,3:4,5,6:up\n7,8:9,10:down\n\n"


def test_series_have_steps_channels_and_classes(tmp_path: Path) -> None:
    place(tmp_path, "ucr/GunPoint_TRAIN.ts", SERIES)
    series = ucr.load("GunPoint", "train", tmp_path)
    assert series.labels == ["up", "down"]
    np.testing.assert_array_equal(series.values[0], [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(series.values[1], [[7, 9], [8, 10]])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (("@data\n", ""), "there is no @data"),
        (("4,5,6", "4,5"), "different lengths"),
        (("down\n\n", "left\n\n"), "not among those declared"),
        (("8", "eight"), "could not convert"),
        (("7,8:9,10:down", "down"), "no channels"),
    ],
)
def test_damaged_series_are_told(damage: tuple[str, str], words: str, tmp_path: Path) -> None:
    place(tmp_path, "ucr/GunPoint_TRAIN.ts", SERIES.replace(*damage))
    with pytest.raises(BrokenDataError, match=words):
        ucr.load("GunPoint", "train", tmp_path)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


IMAGES, LABELS = np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([7, 1], dtype=np.uint8)


def test_digits_are_read_with_their_labels(tmp_path: Path) -> None:
    place(tmp_path, "mnist/t10k-images-idx3-ubyte", idx(IMAGES))
    place(tmp_path, "mnist/t10k-labels-idx1-ubyte", idx(LABELS))
    digits = mnist.load("test", tmp_path)
    np.testing.assert_array_equal(digits.images, IMAGES)
    np.testing.assert_array_equal(digits.labels, LABELS)


def test_damaged_digits_are_told(tmp_path: Path) -> None:
    place(tmp_path, "mnist/t10k-labels-idx1-ubyte", idx(LABELS))
    for content, words in (
        (b"", "begins with nothing"),
        (b"\x1f\x8b\x08\0", "not an idx file"),
        (idx(IMAGES)[:10], "inside its header"),
        (idx(IMAGES)[:-1], r"23 bytes for an array of shape \(2, 3, 4\)"),
    ):
        place(tmp_path, "mnist/t10k-images-idx3-ubyte", content)
        with pytest.raises(BrokenDataError, match=words):
            mnist.load("test", tmp_path)
    place(tmp_path, "mnist/t10k-images-idx3-ubyte", idx(IMAGES[:1]))
    with pytest.raises(ValueError, match="do not belong together"):
        mnist.load("test", tmp_path)


def cifar_archive(path: Path, batches: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in batches.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_colour_images_are_the_same_from_the_archive_and_repacked(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    records = b"".join(
        bytes([label]) + image.transpose(2, 0, 1).tobytes() for label, image in zip(LABELS, images, strict=True)
    )
    packed = io.BytesIO()
    np.savez(packed, X=images, y=LABELS)
    place(tmp_path / "a", "cifar10/cifar10_test_first3000.npz", packed.getvalue())
    cifar_archive(tmp_path / "b" / "cifar10" / "cifar-10-binary.tar.gz", {"test_batch": records})
    for folder in (tmp_path / "a", tmp_path / "b"):
        loaded = cifar10.load("test", folder)
        np.testing.assert_array_equal(loaded.images, images)
        np.testing.assert_array_equal(loaded.labels, LABELS)
    with pytest.raises(MissingDataError, match="fenchel data fetch cifar10"):
        cifar10.load("train", tmp_path / "a")
    with pytest.raises(BrokenDataError, match="data_batch_1"):
        cifar10.load("train", tmp_path / "b")
    cifar_archive(tmp_path / "c" / "cifar10" / "cifar-10-binary.tar.gz", {"test_batch": records[:-1]})
    with pytest.raises(BrokenDataError, match="no whole number of images"):
        cifar10.load("test", tmp_path / "c")


def bags(**changed: object) -> bytes:
    buffer = io.BytesIO()
    content = {
        "features": csc_matrix(np.arange(8.0).reshape(4, 2)),
        "bag_ids": np.array([[1, 2, 1, 3]]),
        "labels": csc_matrix(np.array([[-1.0, -1.0, 1.0, -1.0]])),
    }
    savemat(buffer, {**content, **changed})
    return buffer.getvalue()


def test_bags_gather_their_instances_and_one_positive_makes_them_so(tmp_path: Path) -> None:
    place(tmp_path, "mil/fox_100x100.mat", bags())
    loaded = mil.load("fox", tmp_path)
    assert [bag.tolist() for bag in loaded.instances] == [[[0, 1], [4, 5]], [[2, 3]], [[6, 7]]]
    assert loaded.labels.tolist() == [True, False, False]


def test_damaged_bags_are_told(tmp_path: Path) -> None:
    for content, words in (
        (b"not MATLAB" * 30, "not a MATLAB file"),
        (bags()[:200], "not a MATLAB file|has no"),
        (bags(bag_ids=np.array([[1, 2]])), "4 instances, 2 bag_ids and 4 labels"),
    ):
        place(tmp_path, "mil/fox_100x100.mat", content)
        with pytest.raises(BrokenDataError, match=words):
            mil.load("fox", tmp_path)


def test_word_vectors_are_the_same_from_text_and_repacked(tmp_path: Path) -> None:
    vectors = np.arange(100, dtype=np.float16).reshape(2, 50)
    packed = io.BytesIO()
    np.savez(packed, words=np.array(["the", "dog"]), vecs=vectors)
    place(tmp_path / "a", "glove/glove6B_50d_top50k.npz", packed.getvalue())
    lines = (" ".join([word, *map(str, numbers)]) for word, numbers in zip(("the", "dog"), vectors, strict=True))
    place(tmp_path / "b", "glove/glove.6B.50d.txt", "\n".join(lines) + "\n")
    for folder in (tmp_path / "a", tmp_path / "b"):
        np.testing.assert_array_equal(glove.load(folder)["dog"], vectors[1])
    place(tmp_path / "b", "glove/glove.6B.50d.txt", "the 1 2 3\n")
    with pytest.raises(BrokenDataError, match="not a word and 50 numbers"):
        glove.load(tmp_path / "b")
    with pytest.raises(MissingDataError, match=r"glove\.6B\.zip"):
        glove.load(tmp_path / "c")


def test_sentences_have_words_and_a_class(tmp_path: Path) -> None:
    place(tmp_path, "sst/stsa.fine.dev", "4 a béart film .\n0 no .\n")
    assert sst.load("dev", "fine", tmp_path) == [sst.Review(("a", "béart", "film", "."), 4), sst.Review(("no", "."), 0)]
    for line in ("5 great .", "great .", "3"):
        place(tmp_path, "sst/stsa.fine.dev", f"1 a film .\n{line}\n")
        with pytest.raises(BrokenDataError, match="not a class below 5 and words"):
            sst.load("dev", "fine", tmp_path)


def test_marked_reviews_have_words_an_opinion_and_places(tmp_path: Path) -> None:
    line = '{"text": "a plot .\\nso dull", "label": "NEG", "rationale": [3, 4], "id": "x"}\n'
    place(tmp_path, "eraser_movies/val.jsonl", line + "\n" + line.replace("NEG", "POS").replace("[3, 4]", "[]"))
    words = ("a", "plot", ".", "so", "dull")
    assert eraser.load("dev", tmp_path) == [eraser.Annotated(words, 0, (3, 4)), eraser.Annotated(words, 1, ())]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a", "label": "NEG"}', "line 1 has no rationale"),
        ('{"text": "a", "label": "BAD", "rationale": []}', "line 1 has no label among"),
        ('{"text": "a b", "label": "POS", "rationale": [2]}', "marks a word that is not among its 2"),
        ("text", "Expecting value"),
    ],
)
def test_damaged_marks_are_told(line: str, words: str, tmp_path: Path) -> None:
    place(tmp_path, "eraser_movies/test.jsonl", line)
    with pytest.raises(BrokenDataError, match=rf"test\.jsonl is damaged.*{words}"):
        eraser.load("test", tmp_path)


def reviews(texts: list[str], kind: str = "imdb") -> str:
    rows = (f'"{text}",{number % 2},{kind}\r\n' for number, text in enumerate(texts))
    return "text,label,source\r\n" + "".join(rows)


def test_every_review_is_in_one_split_once_whatever_stands_around_it(tmp_path: Path) -> None:
    texts = [f"Film number {number}<br /><br />isn't bad." for number in range(200)]
    place(tmp_path / "a", "imdb_rt/combined_movie_reviews.csv", reviews([*texts, *texts[:7], " ", texts[3].upper()]))
    place(tmp_path / "b", "imdb_rt/combined_movie_reviews.csv", reviews(texts[100:]))
    splits = {split: imdb.load(split, folder=tmp_path / "a") for split in ("train", "dev", "test")}
    words = [review.words for split in splits.values() for review in split]
    assert len(words) == len(set(words)) == 200
    assert {len(each) for each in words} == {7}
    assert all(abs(len(splits[split]) - share) < 25 for split, share in (("train", 140), ("dev", 20), ("test", 40)))
    assert {review.words for review in imdb.load("test", folder=tmp_path / "b")} <= {r.words for r in splits["test"]}
    assert imdb.load("test", "rotten_tomatoes", tmp_path / "a") == []


def test_damaged_reviews_are_told(tmp_path: Path) -> None:
    for number, (content, words) in enumerate(
        (
            ("text,label\ngood,1\n", "not text, label and source"),
            ("text,label,source\ngood,2,imdb\n", "the label '2'"),
            ("text,label,source\ngood,1,yelp\n", "the source 'yelp'"),
        )
    ):
        place(tmp_path / str(number), "imdb_rt/combined_movie_reviews.csv", content)
        with pytest.raises(BrokenDataError, match=words):
            imdb.load("train", folder=tmp_path / str(number))


def shapes(**changed: object) -> bytes:
    content: dict[str, object] = {
        "images": np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8),
        "questions": np.array(["what shape?", "is it red?"]),
        "answers": np.array(["circle", "no"]),
        "image_id": np.array([1, 0]),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **{**content, **changed})
    return buffer.getvalue()


def shapes_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, np.load(io.BytesIO(shapes())) as file:
        archive.writestr("easy_vqa/data/test/questions.json", '[["what shape?", "circle", 1], ["is it red?", "no", 0]]')
        for number, image in enumerate(file["images"]):
            png = io.BytesIO()
            Image.fromarray(image).save(png, "png")
            archive.writestr(f"easy_vqa/data/test/images/{number}.png", png.getvalue())
    return buffer.getvalue()


def test_questions_are_the_same_from_the_archive_and_repacked(tmp_path: Path) -> None:
    place(tmp_path / "a", "easy_vqa/test.npz", shapes())
    place(tmp_path / "b", "easy_vqa/easy_vqa-1.0-py3-none-any.whl", shapes_archive())
    repacked, archive = (easy_vqa.load("test", tmp_path / name) for name in "ab")
    np.testing.assert_array_equal(repacked.images, archive.images)
    np.testing.assert_array_equal(repacked.image, archive.image)
    assert (repacked.questions, repacked.answers) == (archive.questions, archive.answers)
    assert archive.questions == ["what shape?", "is it red?"]
    assert archive.image.tolist() == [1, 0]


def test_damaged_questions_are_told(tmp_path: Path) -> None:
    place(tmp_path / "b", "easy_vqa/easy_vqa-1.0-py3-none-any.whl", shapes_archive()[:-30])
    with pytest.raises(BrokenDataError, match="not a zip"):
        easy_vqa.load("test", tmp_path / "b")
    for content, words in (
        (shapes(image_id=np.array([2, 0])), "not among the 2"),
        (shapes(answers=np.array(["no"])), "2 questions, 1 answers, 2 images"),
        (shapes(images=np.zeros((2, 64, 64, 3))), "not bytes"),
    ):
        place(tmp_path, "easy_vqa/train.npz", content)
        with pytest.raises(BrokenDataError, match=words):
            easy_vqa.load("train", tmp_path)


def test_names_and_splits_that_do_not_exist_are_refused() -> None:
    for load, words in (
        (lambda: ud_ewt.load("all"), "train, dev, test"),
        (lambda: ner.load("german", "train"), "spanish train"),
        (lambda: ner.load_chunks("dev"), "chunks test"),
        (lambda: ucr.load("Coffee", "train"), "GunPoint"),
        (lambda: mnist.load("dev"), "train, test"),
        (lambda: cifar10.load("dev"), "train, test"),
        (lambda: mil.load("musk1"), "elephant, fox, tiger"),
        (lambda: sst.load("train", "coarse"), "binary train"),
        (lambda: eraser.load("all"), "train, dev, test"),
        (lambda: imdb.load("all"), "imdb, rotten_tomatoes, each train, dev, test"),
        (lambda: easy_vqa.load("dev"), "train, test"),
    ):
        with pytest.raises(ValueError, match=words):
            load()


def test_inflections_are_read_with_spaces_inside_and_tags_apart(tmp_path: Path) -> None:
    place(tmp_path, "sigmorphon2018/german-dev.gz", gzip.compress(b"auswandern\twandert aus\tV;IND;2\n"))
    (word,) = sigmorphon2018.load("german", "dev", tmp_path)
    assert word == sigmorphon2018.Inflection("auswandern", "wandert aus", ("V", "IND", "2"))
    with pytest.raises(ValueError, match="there is no 'latin' 'dev'"):
        sigmorphon2018.load("latin", "dev", tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(("line", "words"), [("a b\tN", "line 2: 2 columns"), ("\ta\tN", "line 2: the lemma")])
def test_damaged_inflections_are_told_with_the_line(line: str, words: str, tmp_path: Path) -> None:
    place(tmp_path, "sigmorphon2018/german-dev", f"a\tb\tN\n{line}\n")
    with pytest.raises(BrokenDataError, match=rf"german-dev is damaged.*{words}"):
        sigmorphon2018.load("german", "dev", tmp_path)


def test_captions_are_pairs_of_lines(tmp_path: Path) -> None:
    place(tmp_path, "multi30k/val.de", "Ein Hund.\n\nZwei.\n")
    place(tmp_path, "multi30k/val.en", "A dog.\n\nTwo.\n")
    assert multi30k.load("val", tmp_path) == [("Ein Hund.", "A dog."), ("", ""), ("Zwei.", "Two.")]
    place(tmp_path, "multi30k/val.en", "A dog.\n")
    with pytest.raises(BrokenDataError, match="3 German sentences and 1 English ones"):
        multi30k.load("val", tmp_path)


def test_german_nouns_have_one_gender_and_one_plural() -> None:
    nouns = german_nouns.load()
    assert len(nouns) > 10_000
    assert sigmorphon2018.Inflection("Haus", "Häuser", ("NEUT",)) in nouns
    assert len({noun.lemma for noun in nouns}) == len(nouns)
