"""Text files as language-model data: lines and documents, packed files, joined and cut, from a user's own module."""

import collections
import functools
import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
import seqio
import tensorflow as tf

from synthesizer_jax import data
from synthesizer_jax.models.batch import DECODER_ONLY
from synthesizer_jax.tasks import lm_text, quickstart, sources

TEXT = "\ufeffÄ first line \r\nsecond\r\n\r\n \r\nthird ☃\n\nfourth"
LINES = ["Ä first line", "second", "third ☃", "fourth"]
DOCUMENTS = ["Ä first line\nsecond", "third ☃", "fourth"]


def read(source, split="train", **options):
    return [row["text"].decode() for row in source.get_dataset(split, shuffle=False, **options).as_numpy_iterator()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of data with some files in it."""
    monkeypatch.setenv("SYNTHESIZER_JAX_DATA", str(tmp_path))
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write(b"fifth\nsixth\n\nseventh\n")
    return tmp_path


# The source


def test_lines_without_their_ends_and_without_empty_ones(folder):
    source = sources.Lines({"train": ["a.txt"]}, "anywhere")
    assert read(source) == LINES
    assert source.description == "files a.txt"


def test_documents_end_at_empty_lines_and_at_the_file(folder):
    source = sources.Lines({"train": ["a.txt", "b.txt.gz"]}, "anywhere", documents=True)
    assert read(source) == [*DOCUMENTS, "fifth\nsixth", "seventh"]


def test_files_come_one_after_the_other_by_name_pattern_or_path(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "c.txt"
    elsewhere.write_text("".join(f"{number}\n" for number in range(40)))
    source = sources.Lines({"train": [str(elsewhere), "?.txt*"]}, "anywhere")
    assert read(source) == [*map(str, range(40)), *LINES, "fifth", "sixth", "seventh"]
    shards = [seqio.ShardInfo(index, 3) for index in range(3)]
    assert [text for shard in shards for text in read(source, shard_info=shard)] == read(source)
    assert len(source.list_shards("train")) == 3


def test_a_missing_file_is_said_with_its_name(folder, monkeypatch):
    source = sources.Lines({"train": ["a.txt"], "validation": ["no-*.txt", "a.txt"], "test": ["/no/file"]}, "ask me")
    assert source.missing("train") is None
    with pytest.raises(FileNotFoundError, match=r"^no no-\*.txt in .* \(--data_dir, SYNTHESIZER_JAX_DATA\); ask me$"):
        source.get_dataset("validation")
    with pytest.raises(FileNotFoundError, match="^no /no/file; ask me$"):
        source.get_dataset("test")
    monkeypatch.delenv("SYNTHESIZER_JAX_DATA")
    with pytest.raises(FileNotFoundError, match=r"SYNTHESIZER_JAX_DATA\) is not given: .* has no-\*.txt, a.txt; ask me"):
        source.get_dataset("validation")
    assert sources.Lines({"train": [str(folder / "a.txt")]}, "ask me").missing("train") is None


def test_text_in_another_encoding_is_refused(folder):
    (folder / "a.txt").write_bytes("good\nschön\n".encode("latin-1"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not UTF-8:.*a.txt.*sch"):
        read(sources.Lines({"train": ["a.txt"]}, "anywhere"))


def test_a_large_file_is_read_as_it_is_needed(folder):
    """Its first lines, before it is seen that there is something wrong 20 MB further on."""
    with open(folder / "large.txt", "wb") as file:
        file.write((b"word " * 200 + b"\n") * 20_000 + b"\xff\n")
    rows = sources.Lines({"train": ["large.txt"]}, "anywhere").get_dataset("train", shuffle=False)
    assert sum(1 for _ in rows.take(100).as_numpy_iterator()) == 100
    with pytest.raises(tf.errors.InvalidArgumentError, match="not UTF-8"):
        list(rows.skip(19_990).as_numpy_iterator())


# Joined and cut

FEATURES = {"targets": seqio.Feature(quickstart.VOCABULARY, add_eos=True)}


def joined(texts, length):
    rows = tf.data.Dataset.from_tensor_slices({"targets": texts})
    tokens = seqio.preprocessors.tokenize(rows, FEATURES)
    return [
        row["targets"].tolist()
        for row in lm_text.join_and_cut(tokens, {"targets": length}, FEATURES).as_numpy_iterator()
    ]


def test_texts_are_joined_with_their_ends_and_cut():
    texts = ["the value", "", "of the object is returned", "string"]
    whole = [i for text in texts for i in [*quickstart.VOCABULARY.encode(text), 1]]
    for length in (1, 4, 7, 1000):
        assert joined(texts, length) == [whole[start : start + length] for start in range(0, len(whole), length)]


def test_no_token_of_a_long_text_is_lost():
    """t5's full_lm would keep 65,536 tokens of it."""
    text = " ".join(["the value of it"] * 20_000)
    pieces = joined([text], 512)
    assert [i for piece in pieces for i in piece] == [*quickstart.VOCABULARY.encode(text), 1]
    assert sum(map(len, pieces)) > 80_000 and {len(piece) for piece in pieces[:-1]} == {512}


# Tasks

MODULE = """
from synthesizer_jax.tasks import lm_text
lm_text.add("my_text", train="a.txt", validation=["{folder}/b.txt.gz"], documents=True)
"""


def test_a_users_module_registers_tasks_of_own_files(shared, folder):
    """Relative paths start at the folder that the program was started in."""
    (folder / "my_tasks.py").write_text(MODULE.format(folder=folder))
    program = (
        "import json, my_tasks, os, seqio\n"
        "os.chdir('/')\n"
        "task = seqio.TaskRegistry.get('my_text')\n"
        "rows = [r['targets'].tolist() for s in ('train', 'validation')\n"
        "        for r in task.get_dataset({'targets': 512}, s, shuffle=False).as_numpy_iterator()]\n"
        "other = seqio.TaskRegistry.get('my_text_span_corruption')\n"
        "lengths = {'inputs': 12, 'targets': 12}\n"
        "spans = [[r[f].tolist() for f in lengths] for r in\n"
        "         other.get_dataset(lengths, 'train', shuffle=False, seed=0).as_numpy_iterator()]\n"
        "print(json.dumps([task.splits, rows, spans]))"
    )
    environment = {
        "SYNTHESIZER_JAX_VOCAB": str(shared / "data/vocab/t5/spiece.model"),
        "SYNTHESIZER_JAX_DATA": "/no/folder",
        "PYTHONPATH": str(folder),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PATH": "",
    }
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    splits, rows, spans = json.loads(done.stdout.splitlines()[-1])
    vocabulary = seqio.SentencePieceVocabulary(environment["SYNTHESIZER_JAX_VOCAB"], extra_ids=100)
    assert splits == ["train", "validation"]
    for row, texts in zip(rows, (DOCUMENTS, ["fifth\nsixth", "seventh"]), strict=True):
        assert row == [i for text in texts for i in [*vocabulary.encode(text), 1]]
    hidden = [i for inputs, targets in spans for i in [*inputs, *targets] if 1 < i < 32000]
    tokens = [i for text in DOCUMENTS for i in vocabulary.encode(text)]
    assert collections.Counter(hidden) == collections.Counter(tokens)
    assert all(inputs[-1] == targets[-1] == 1 and 32099 in inputs for inputs, targets in spans)


def test_a_task_without_files_or_with_a_name_that_is_taken_is_refused(folder):
    with pytest.raises(ValueError, match="'lm_text_test': expected files, got none; give them as train=\"a.txt\""):
        lm_text.add("lm_text_test")
    with pytest.raises(ValueError, match="wikitext2"):
        lm_text.add("wikitext2", train="a.txt")


def test_the_same_batches_from_a_state_in_mid_file(shared, folder, monkeypatch):
    """A state of an iterator tells where in the file it stands."""
    monkeypatch.setenv("SYNTHESIZER_JAX_VOCAB", str(shared / "data/vocab/t5/spiece.model"))
    (folder / "long.txt").write_text("".join(f"line {number} of many\n" for number in range(5000)))
    lm_text.add("lm_text_test_long", train=str(folder / "long.txt"))
    try:
        make = functools.partial(data.TrainBatches, "lm_text_test_long", {"targets": 32}, 4, keys=DECODER_ONLY)
        with make() as batches, make() as resumed:
            for _ in range(5):
                next(batches)
            resumed.restore(batches.state())
            for _ in range(200):
                one, two = next(batches), next(resumed)
                assert all(np.array_equal(one[name], two[name]) for name in one)
    finally:
        for name in ("lm_text_test_long", "lm_text_test_long_span_corruption"):
            seqio.TaskRegistry.remove(name)


def test_speeches_of_shakespeare(shared, tmp_path):
    path = tmp_path / "input.txt"
    path.write_text("".join(f"A:\nWord {number}.\n\n" for number in range(100)))
    speeches = lm_text.read_speeches(path)
    assert speeches[7] == {"text": "A:\nWord 7."} and len(speeches) == 100
    assert [len(lm_text.part(split, speeches)) for split in ("train", "validation", "test")] == [90, 5, 5]
    parts = [lm_text.part(split, speeches) for split in ("train", "validation", "test")]
    assert [speech for part in parts for speech in part] == speeches
    real = lm_text.read_speeches(shared / "data/tinyshakespeare/input.txt")
    text = (shared / "data/tinyshakespeare/input.txt").read_text()
    assert "".join("".join(s["text"].split()) for s in real) == "".join(text.split())


def test_every_paragraph_of_wikitext(shared, monkeypatch):
    monkeypatch.setenv("SYNTHESIZER_JAX_DATA", str(shared / "data"))
    source = seqio.TaskRegistry.get("wikitext2").source
    for split, name in (("validation", "valid"), ("test", "test")):
        lines = (shared / f"data/wikitext-2-raw/wiki.{name}.raw").read_text().split("\n")
        assert read(source, split) == [line.strip() for line in lines if line.strip()]
    assert "no wikitext-2-raw/wiki.train.raw in" in source.missing("train")
