"""The `cache` command: what is cached is what would be made on the fly, and training reads it."""

import functools
import sys

import numpy as np
import pytest
import seqio

from synthesizer_jax import caching, data
from synthesizer_jax.__main__ import main
from synthesizer_jax.models.batch import ENCODER_DECODER
from synthesizer_jax.tasks import features, quickstart, sources

LENGTHS = {"inputs": 16, "targets": 4}
ROWS = {
    split: [{"inputs": f"object {i} of {split}", "targets": "true"} for i in range(n)]
    for split, n in (("train", 23), ("validation", 5))
}
OUTPUT = {name: seqio.Feature(quickstart.VOCABULARY, add_eos=True) for name in LENGTHS}
made = []  # splits that the source was asked for


def examples(split):
    made.append(split)
    return ROWS[split]


def register(name, source, preprocessors=features.TOKENIZED):
    seqio.TaskRegistry.add(name, source=source, preprocessors=list(preprocessors), output_features=OUTPUT)


def absent(path):
    raise AssertionError("never read")


register("caching_test", sources.Examples(examples, tuple(ROWS)))
register("caching_test_other", sources.Examples(ROWS.get, tuple(ROWS)))
register("caching_test_no_place", sources.Examples(ROWS.get, tuple(ROWS)), [seqio.preprocessors.tokenize])
register("caching_test_missing", sources.Files({"train": ["no.txt"]}, absent, "ask me"))
seqio.MixtureRegistry.add("caching_test_mixture", ["caching_test", "caching_test_other"], default_rate=1)


class HalfThere(sources.Examples):
    """Its validation split is missing."""

    def missing(self, split):
        return "ask me" if split == "validation" else None


register("caching_test_half", HalfThere(ROWS.get, tuple(ROWS)))


@pytest.fixture(autouse=True)
def no_cache_is_left():
    before = list(seqio.get_global_cache_dirs())
    yield
    seqio.set_global_cache_dirs(before)
    for name in seqio.TaskRegistry.names():
        if name.startswith("caching_test"):
            seqio.TaskRegistry.get(name)._cache_dir = None


def rows(name, split, cached):
    """The examples of a split, whatever their order."""
    options = {"split": split, "use_cached": cached, "shuffle": False, "num_epochs": 1}
    dataset = data.task_dataset(name, LENGTHS, **options)
    return sorted(tuple(map(tuple, (x["inputs"], x["targets"]))) for x in dataset.as_numpy_iterator())


def test_the_cache_has_the_examples_of_the_task_and_is_used(tmp_path, capsys):
    folder = tmp_path / "cache"
    assert not data.use_cache("caching_test")
    assert main(["cache", "caching_test", f"--output_cache_dir={folder}", "--num_shards=3"]) == 0
    shown = capsys.readouterr().out
    assert f"caching_test  train 23  validation 5  {folder / 'caching_test'}" in shown
    assert f"--seqio_additional_cache_dirs={folder}" in shown
    assert len(list((folder / "caching_test").glob("train.tfrecord-*"))) == 3
    seqio.add_global_cache_dirs([str(folder)])
    assert data.use_cache("caching_test")
    for split, of_split in ROWS.items():
        assert len(rows("caching_test", split, True)) == len(of_split)
        assert rows("caching_test", split, True) == rows("caching_test", split, False)


def test_training_reads_the_cache_and_goes_on_from_a_state(tmp_path):
    caching.cache(["caching_test"], str(tmp_path), num_shards=2)
    seqio.add_global_cache_dirs([str(tmp_path)])
    make = functools.partial(data.TrainBatches, "caching_test", LENGTHS, 4, keys=ENCODER_DECODER, pack=False)
    made.clear()
    batches = make()
    first = [next(batches) for _ in range(3)]
    state = batches.state()
    after = [next(batches) for _ in range(9)]
    assert not made  # nothing came from the source
    other = make()
    other.restore(state)
    for expected in after:
        found = next(other)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert not np.array_equal(first[0]["encoder_input_tokens"], first[1]["encoder_input_tokens"])


def test_a_mixture_is_cached_task_by_task(tmp_path):
    results = caching.cache(["caching_test_mixture"], str(tmp_path), num_shards=1)
    assert [cached.name for cached in results] == ["caching_test", "caching_test_other"]
    seqio.add_global_cache_dirs([str(tmp_path)])
    assert data.use_cache("caching_test_mixture")


def test_what_is_there_stays_unless_asked_and_what_is_half_there_is_made_again(tmp_path):
    make = functools.partial(caching.cache, ["caching_test"], str(tmp_path), num_shards=1)
    assert make()[0].made
    folder = tmp_path / "caching_test"
    made = (folder / "info.train.json").stat().st_mtime_ns
    assert not make()[0].made and (folder / "info.train.json").stat().st_mtime_ns == made
    assert make(overwrite=True)[0].made and (folder / "info.train.json").stat().st_mtime_ns > made
    rest = folder / "train.tfrecord-00007-of-00009"
    rest.write_text("")
    (folder / "COMPLETED").unlink()  # as after a kill
    assert make()[0].made and not rest.exists()
    assert make()[0].examples == {"train": 23, "validation": 5}


def test_a_split_is_added_to_what_is_there(tmp_path):
    make = functools.partial(caching.cache, ["caching_test"], str(tmp_path), num_shards=1)
    assert make(splits=["validation"])[0].examples == {"validation": 5}
    seqio.add_global_cache_dirs([str(tmp_path)])
    assert data.use_cache("caching_test", None, "validation") and not data.use_cache("caching_test", None, "train")
    with pytest.raises(ValueError, match="no cache of caching_test with the split 'train'"):
        data.use_cache("caching_test", True, "train")
    folder = tmp_path / "caching_test"
    before = (folder / "info.validation.json").stat().st_mtime_ns
    assert make()[0].examples == {"train": 23, "validation": 5}
    assert (folder / "info.validation.json").stat().st_mtime_ns == before
    make(splits=["train"], overwrite=True)  # the other split stays
    assert rows("caching_test", "validation", True) == rows("caching_test", "validation", False)
    assert rows("caching_test", "train", True) == rows("caching_test", "train", False)


def test_a_cache_of_another_vocabulary_is_refused(tmp_path, monkeypatch):
    caching.cache(["caching_test"], str(tmp_path), num_shards=1)
    seqio.add_global_cache_dirs([str(tmp_path)])
    other = seqio.SentencePieceVocabulary(quickstart.VOCABULARY.sentencepiece_model_file, extra_ids=3)
    task = seqio.TaskRegistry.get("caching_test")
    monkeypatch.setattr(task, "_output_features", dict.fromkeys(LENGTHS, seqio.Feature(other, add_eos=True)))
    with pytest.raises(ValueError, match="was made with another vocabulary of inputs and targets"):
        data.TrainBatches("caching_test", LENGTHS, 4, pack=False)
    with pytest.raises(ValueError, match="was made with another vocabulary"):
        caching.cache(["caching_test"], str(tmp_path))
    assert not data.use_cache("caching_test", False)


def test_splits_without_data_are_left_out_and_said(tmp_path, capsys):
    assert main(["cache", "caching_test_half", f"--output_cache_dir={tmp_path}", "--num_shards=1"]) == 0
    shown = capsys.readouterr().out
    assert "caching_test_half  train 23  " in shown and "validation left out: ask me" in shown
    with pytest.raises(FileNotFoundError, match="ask me"):
        caching.cache(["caching_test_half"], str(tmp_path), splits=["validation"])


@pytest.mark.parametrize(
    "argv, text",
    [
        (["caching_test", "--split=test"], "no split 'test'; it has train, validation"),
        (["caching_tset"], "did you mean caching_test"),
        (["caching_test_no_place"], "no seqio.CacheDatasetPlaceholder"),
        (["caching_test_missing"], "--data_dir (SYNTHESIZER_JAX_DATA) is not given"),
        (["caching_test", "--num_shards=0"], "num_shards: expected at least 1, got 0"),
    ],
)
def test_faults_are_found_before_anything_is_made(argv, text, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SYNTHESIZER_JAX_DATA", raising=False)
    assert main(["cache", "caching_test_other", *argv, f"--output_cache_dir={tmp_path}"]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_beam_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    assert main(["cache", "caching_test", f"--output_cache_dir={tmp_path}"]) == 2
    assert "pip install 'synthesizer_jax[cache]'" in capsys.readouterr().err
