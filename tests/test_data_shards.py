"""Streams: every example once whatever the source is made of, the same rows on any number of hosts, one state of all."""

import collections
import json

import numpy as np
import pytest
import seqio
import tensorflow as tf

from synthesizer_jax import data
from synthesizer_jax.data.streams import stream_dataset
from synthesizer_jax.tasks import features, quickstart, sources

LENGTHS = {"inputs": 12, "targets": 7}
COUNT = 41  # examples; a prime, so that no number of shards divides it
FEATURE = seqio.Feature(vocabulary=seqio.PassThroughVocabulary(200, eos_id=1), add_eos=True)
FEATURES = dict.fromkeys(LENGTHS, FEATURE)


def example(number):
    """Its number + 2, 1 to 9 times."""
    return {"inputs": tf.repeat(number + 2, number % 9 + 1), "targets": tf.repeat(number + 2, number % 5 + 1)}


def shuffling(split, shuffle_files, seed=None):
    """A source that orders its examples anew in each epoch."""
    numbers = tf.data.Dataset.range(COUNT, output_type=tf.int32)
    return numbers.shuffle(COUNT, seed=seed).map(example) if shuffle_files else numbers.map(example)


def few(split, shuffle_files, seed=None):
    return tf.data.Dataset.range(3, output_type=tf.int32).map(example)


def even(dataset):
    return dataset.filter(lambda x: x["inputs"][0] % 2 == 0)


def read(path):
    return tf.data.TextLineDataset(path).map(lambda line: example(tf.strings.to_number(line, tf.int32)))


def made(split):
    return [{"number": number} for number in range(COUNT)]


def words(split):
    return [
        {"inputs": f"number {i} " + "word " * (i % 7), "targets": f"answer {i} " + "x " * (i % 5)} for i in range(50)
    ]


def add(name, source, *preprocessors):
    steps = [*preprocessors, seqio.preprocessors.append_eos_after_trim]
    seqio.TaskRegistry.add(name, source=source, preprocessors=steps, output_features=FEATURES)


add("shards_function", seqio.FunctionDataSource(shuffling, ("train",)))
add("shards_few", seqio.FunctionDataSource(few, ("train",), {"train": 3}))
add("shards_few_uncounted", seqio.FunctionDataSource(few, ("train",)))
add("shards_even", seqio.FunctionDataSource(shuffling, ("train",)), even)
add(
    "shards_even_many",
    seqio.FunctionDataSource(shuffling, ("train",), {"train": 10**6}),  # so it says
    even,
    seqio.CacheDatasetPlaceholder(),
)
add(
    "shards_made",
    sources.Examples(made, ("train",)),
    lambda dataset: dataset.map(lambda x: example(tf.cast(x["number"], tf.int32))),
)
seqio.TaskRegistry.add(
    "shards_words",
    source=sources.Examples(words, ("train",)),
    preprocessors=[*features.TOKENIZED],
    output_features=dict.fromkeys(LENGTHS, seqio.Feature(quickstart.VOCABULARY, add_eos=True)),
)
seqio.MixtureRegistry.add("shards_mixture", [("shards_function", 1), ("shards_made", 3)])
seqio.MixtureRegistry.add("shards_outer", [("shards_mixture", 3), ("shards_even", 1)])
seqio.MixtureRegistry.add("shards_mixture_with_even", [("shards_function", 1), ("shards_even_many", 1)])


@pytest.fixture(scope="module", autouse=True)
def tasks_of_files(tmp_path_factory):
    """Three files of unequal size; and a cache of three files."""
    folder = tmp_path_factory.mktemp("files")
    parts = [range(0, 20), range(20, 23), range(23, COUNT)]
    for index, part in enumerate(parts):
        (folder / f"text-{index}").write_text("".join(f"{number}\n" for number in part))
    add("shards_files", seqio.FileDataSource(read, {"train": str(folder / "text-*")}))
    cache = folder / "cache" / "shards_cached"
    cache.mkdir(parents=True)
    for index, part in enumerate(parts):
        with tf.io.TFRecordWriter(str(cache / f"train.tfrecord-{index:05}-of-00003")) as file:
            for number in part:
                features = {
                    name: tf.train.Feature(int64_list=tf.train.Int64List(value=ids.numpy()))
                    for name, ids in example(tf.constant(number)).items()
                }
                file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    described = {name: {"shape": [None], "dtype": "int32"} for name in LENGTHS}
    info = {"num_shards": 3, "features": described, "seqio_version": seqio.__version__}
    (cache / "info.train.json").write_text(json.dumps(info))
    (cache / "stats.train.json").write_text(json.dumps({"examples": COUNT}))
    (cache / "COMPLETED").touch()
    add("shards_cached", seqio.FunctionDataSource(few, ("train",)), seqio.CacheDatasetPlaceholder())
    before = seqio.get_global_cache_dirs()
    seqio.add_global_cache_dirs([str(folder / "cache")])
    yield
    seqio.set_global_cache_dirs(before)


def numbers_of(dataset):
    return [int(x["inputs"][0]) - 2 for x in dataset.as_numpy_iterator()]


def streams(name, shards, *, use_cached=False, shuffle=True, num_epochs=1, seed=5):
    task = data.get_mixture_or_task(name)
    options = {"use_cached": use_cached, "shuffle": shuffle, "num_epochs": num_epochs, "seed": seed}
    return [stream_dataset(task, LENGTHS, s, shards, split="train", **options) for s in range(shards)]


def take(batches, count):
    return [next(batches) for _ in range(count)]


def equal(left, right):
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
        for a, b in zip(left, right, strict=True)
    )


def joined(hosts):
    return [{key: np.concatenate([part[key] for part in step]) for key in step[0]} for step in zip(*hosts, strict=True)]


# Examples


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("name", ["shards_function", "shards_made", "shards_files", "shards_cached"])
def test_all_streams_together_have_every_example_once_in_an_epoch(name, shards, shuffle):
    """Also where the source shuffles before it is divided, and where files are fewer than shards."""
    parts = [numbers_of(s) for s in streams(name, shards, use_cached=name == "shards_cached", shuffle=shuffle)]
    assert sorted(number for part in parts for number in part) == list(range(COUNT))
    by_file = name in ("shards_files", "shards_cached") and shards in (2, 3)
    assert max(map(len, parts)) - min(map(len, parts)) <= (38 if by_file else 1)


@pytest.mark.parametrize("name", ["shards_function", "shards_made", "shards_files"])
def test_each_epoch_has_every_example_once_and_an_order_of_its_own(name):
    parts = [numbers_of(s) for s in streams(name, 4, num_epochs=3)]
    assert sorted(number for part in parts for number in part) == sorted([*range(COUNT)] * 3)
    assert all(part != sorted(part) for part in parts)


def test_streams_mix_at_the_mixtures_rates_each_in_its_own_order():
    """Of shards_outer: 1/4 even; of the rest 1/4 function, 3/4 made, whose numbers say nothing; so count the even task.

    In three streams: the second of two has no even number at all, and would look for one for ever (see check_streams).
    """
    drawn = [numbers_of(s.take(200)) for s in streams("shards_mixture", 4, num_epochs=None)]
    assert len({tuple(part) for part in drawn}) == 4
    outer = [numbers_of(s.take(600)) for s in streams("shards_outer", 3, num_epochs=None)]
    for stream, part in enumerate(outer):
        # 5 standard deviations of a binomial's mean (an epoch's order varies less)
        expected = 0.25 + 0.75 * np.mean([number % 2 == 0 for number in range(stream, COUNT, 3)])
        found = np.mean([number % 2 == 0 for number in part])
        assert abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 600)


def test_streams_draw_at_random_on_their_own():
    def marked(dataset):
        @seqio.map_over_dataset(num_seeds=1)
        def draw(x, seed):
            return x | {"targets": tf.random.stateless_uniform([6], seed, 2, 200, tf.int32)}

        return draw(dataset)

    add("shards_random", seqio.FunctionDataSource(shuffling, ("train",)), marked)
    drawn = [tuple(x["targets"]) for s in streams("shards_random", 4) for x in s.as_numpy_iterator()]
    assert len(set(drawn)) == COUNT


# Batches on hosts


@pytest.mark.parametrize(
    "name, pack, shards, hosts",
    [
        ("shards_mixture", True, 2, 2),
        ("shards_files", True, 4, 2),
        ("shards_function", False, 4, 4),
        ("shards_files", True, 1, 3),
        ("shards_function", True, 2, 4),
        ("shards_made", False, 3, 2),
    ],
)
def test_the_rows_do_not_depend_on_the_hosts(name, pack, shards, hosts):
    """Also where hosts are no divisor of the shards."""
    options = {"shards": shards, "pack": pack, "seed": 3}
    whole = take(data.TrainBatches(name, LENGTHS, 24, **options), 5)
    parts = [data.TrainBatches(name, LENGTHS, 24, shard=(host, hosts), **options) for host in range(hosts)]
    assert equal(joined([take(part, 5) for part in parts]), whole)
    if shards % hosts == 0:
        assert all(len(part._iterators) == shards // hosts for part in parts)


def test_batches_depend_on_the_shards():
    first, second = (take(data.TrainBatches("shards_function", LENGTHS, 8, shards=shards), 5) for shards in (2, 4))
    assert not equal(first, second)


def test_an_epoch_in_shards_leaves_out_the_rest_of_each():
    """41 examples are 11, 10, 10, 10: after 10 batches of 4 x 1 rows the second stream ends."""
    rows = list(data.TrainBatches("shards_function", LENGTHS, 4, shards=4, num_epochs=1, pack=False))
    seen = collections.Counter(int(ids[0]) for batch in rows for ids in batch["encoder_input_tokens"])
    assert len(rows) == 10 and set(seen.values()) == {1}


# Their state


@pytest.mark.parametrize("before, after", [(1, 2), (4, 1), (2, 3)])
def test_a_run_goes_on_with_another_number_of_hosts(before, after):
    def hosts(count):
        return [data.TrainBatches("shards_function", LENGTHS, 24, shards=4, shard=(h, count)) for h in range(count)]

    first = hosts(before)
    for host in first:
        take(host, 7)
    states = [host.state() for host in first]
    rest = joined([take(host, 9) for host in first])
    assert {host.divided for host in first} == {before > 1}
    second = hosts(after)
    for host in second:
        host.restore(data.merge_states(states))
    assert equal(joined([take(host, 9) for host in second]), rest)


@pytest.mark.parametrize("name, shards", [("shards_words", 2), ("shards_words", 1), ("shards_mixture", 2)])
def test_a_run_goes_on_through_later_epochs(name, shards):
    """A state holds how often each shuffle began anew, also where a map has read ahead to the end of an epoch."""
    states, expected = {}, []
    options = {"pack": True, "shards": shards, "seed": 0}
    lengths = {"inputs": 64, "targets": 32}
    with data.TrainBatches(name, lengths, 8, **options) as batches:
        for number in range(36):  # several epochs, of 50 words
            states |= {number: batches.state()} if number in (1, 7) else {}
            expected.append(next(batches))
    with data.TrainBatches(name, lengths, 8, **options) as batches:
        for taken, state in states.items():
            batches.restore(state)
            for number in range(taken, 36):
                found = next(batches)
                assert all(np.array_equal(found[key], expected[number][key]) for key in found), (taken, number)


def test_a_hosts_state_alone_is_refused_elsewhere():
    first, second = (data.TrainBatches("shards_made", LENGTHS, 8, shards=4, shard=(h, 2)) for h in range(2))
    with pytest.raises(ValueError, match=r"that of the streams \[0, 1\] alone, \[2, 3\] are missing; .*merge_states"):
        second.restore(first.state())
    next(second)
    with pytest.raises(ValueError, match="states: expected those of the same batches on all hosts"):
        data.merge_states([first.state(), data.TrainBatches("shards_made", LENGTHS, 8).state()])


def test_a_state_is_refused_with_another_number_of_shards():
    state = data.TrainBatches("shards_made", LENGTHS, 8, shards=4).state()
    with pytest.raises(ValueError, match="shards 4 then, 2 now"):
        data.TrainBatches("shards_made", LENGTHS, 8, shards=2).restore(state)


# Wrong arguments


@pytest.mark.parametrize(
    "name, change, text",
    [
        ("shards_made", {"shards": 0}, "shards: expected an integer of at least 1, got 0"),
        ("shards_made", {"shards": 3}, "shards: 8 rows of a batch cannot be divided among 3 shards; .* divisor such as 2"),
        ("shards_made", {"shards": 16}, "shards: 8 rows of a batch cannot be divided among 16 shards; .* such as 8"),
        ("shards_few", {"shards": 4}, "shards: 'train' of 'shards_few' has 3 examples, fewer than 4 shards; .* most 3"),
        ("shards_few_uncounted", {"shards": 4}, "shards: 'train' of 'shards_few_uncounted' has no example in shard 3 of 4"),
        ("shards_even", {"shards": 2}, "shards: 'train' of 'shards_even' has no example in shard 1 of 2; expected fewer"),
        ("shards_made", {"shards": 2, "shard": (0, 2), "num_epochs": 1}, "num_epochs: 2 shards on 2 hosts would end at"),
    ],
)  # fmt: skip
def test_what_wrong_shards_say(name, change, text):
    with pytest.raises(ValueError, match=text):
        data.TrainBatches(name, LENGTHS, 8, shuffle=False, **change)


def test_a_stream_that_runs_out_is_no_end_of_the_data():
    batches = data.TrainBatches("shards_mixture_with_even", LENGTHS, 8, shards=2, shuffle=False)
    with pytest.raises(
        ValueError, match="shards: a task in 'train' of 'shards_mixture_with_even' has no example in one"
    ):
        take(batches, 50)
