"""T5's vocabulary: found when it is first used, kept, and an error at once where it can't be read."""

import copy
import pickle
import re
import socket
import threading
import time

import pytest
import seqio
import sentencepiece
import tensorflow as tf

from synthesizer_jax.tasks import features, quickstart_text, vocabulary
from synthesizer_jax.tasks.vocabulary import T5Vocabulary

HELP = re.escape(vocabulary.HOW)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No variable, no copy and no network but what a test gives; nothing remembered from before."""
    monkeypatch.delenv(vocabulary.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", "http://127.0.0.1:1/nothing/listens/here")
    vocabulary._load.cache_clear()


def train(folder, name="small.model", **special):
    """A model of 300 pieces; padding 0, end 1 and unknown 2 unless others are given."""
    path = folder / name
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(quickstart_text.sentences("validation")[:500]),
        model_writer=path.open("wb"),
        vocab_size=300,
        minloglevel=2,
        **({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} | special),
    )
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return train(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server():
    """Serves an HTTP answer from an address on this machine, and counts how often; closed after the test."""
    listening = socket.create_server(("127.0.0.1", 0))
    open_ones, requests = [listening], []

    def start(answer):
        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                open_ones.append(connection)
                requests.append(connection.recv(4096))
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}/sentencepiece.model"

    start.requests = requests
    yield start
    for connection in open_ones:
        connection.close()


def giving(content, status="200 OK"):
    def answer(connection):
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)

    return answer


# Found


def test_nothing_is_read_before_the_first_use(monkeypatch):
    monkeypatch.setenv(vocabulary.ENVIRONMENT, "/does/not/exist.model")
    late = T5Vocabulary()
    assert late == T5Vocabulary() and copy.deepcopy(features.TEXT_TO_TEXT) == features.TEXT_TO_TEXT
    with pytest.raises(FileNotFoundError, match="/does/not/exist.model"):
        late.encode("now")


def test_the_path_given_comes_before_the_environment_and_that_before_the_public_one(model, tmp_path, monkeypatch):
    other = train(tmp_path, model_type="bpe")
    assert T5Vocabulary().sentencepiece_model_file == vocabulary.PUBLIC
    monkeypatch.setenv(vocabulary.ENVIRONMENT, "")  # as good as none
    assert T5Vocabulary().sentencepiece_model_file == vocabulary.PUBLIC
    monkeypatch.setenv(vocabulary.ENVIRONMENT, str(model))
    assert T5Vocabulary().sp_model == T5Vocabulary(str(model)).sp_model != T5Vocabulary(str(other)).sp_model
    assert T5Vocabulary(str(other)).sentencepiece_model_file == str(other)


def test_a_remote_path_is_read_by_tensorflow(model):
    remote = f"ram://{model.name}"
    with tf.io.gfile.GFile(remote, "wb") as file:
        file.write(model.read_bytes())
    assert T5Vocabulary(remote) == T5Vocabulary(str(model))
    tf.io.gfile.remove(remote)
    assert T5Vocabulary(remote).encode("a")  # remembered


def test_an_http_address(model, server, tmp_path):
    address = server(giving(model.read_bytes()))
    assert T5Vocabulary(address) == T5Vocabulary(str(model)) and T5Vocabulary(address).vocab_size == 400
    assert len(server.requests) == 1 and not (tmp_path / "cache").exists()


def test_the_public_one_is_asked_for_once(model, server, monkeypatch, tmp_path):
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", server(giving(model.read_bytes())))
    assert T5Vocabulary() == T5Vocabulary(str(model))
    kept = tmp_path / "cache" / "synthesizer_jax"
    assert [path.name for path in kept.iterdir()] == ["t5_sentencepiece.model"] and len(server.requests) == 1
    assert (kept / "t5_sentencepiece.model").read_bytes() == model.read_bytes()
    vocabulary._load.cache_clear()  # as in another process
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", "http://127.0.0.1:1/nothing/listens/here")
    assert T5Vocabulary().vocab_size == 400 and len(server.requests) == 1


def test_without_a_folder_to_keep_it_in_it_is_read_all_the_same(model, server, monkeypatch, tmp_path):
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", server(giving(model.read_bytes())))
    (tmp_path / "cache").write_text("a file, no folder")
    assert T5Vocabulary().vocab_size == 400


def test_no_file_is_left_behind(model, server, monkeypatch, tmp_path):
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", server(giving(model.read_bytes())))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert T5Vocabulary().vocab_size == 400
    assert not list((tmp_path / "temporary").iterdir())


# Not found


def test_a_path_that_does_not_exist(tmp_path):
    for path in (tmp_path / "none.model", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"vocabulary: no such file: {re.escape(str(path))}; {HELP}"):
            T5Vocabulary(str(path)).encode("x")


def test_the_error_says_how_to_give_one():
    with pytest.raises(OSError) as error:
        T5Vocabulary().encode("x")
    for part in (vocabulary.PUBLIC, "SYNTHESIZER_JAX_VOCAB", "--gin.VOCABULARY=", "https://storage.googleapis.com"):
        assert part in str(error.value)


def test_an_address_that_never_answers_is_given_up_within_5_seconds(server, monkeypatch):
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", server(lambda connection: None))
    start = time.monotonic()
    with pytest.raises(OSError, match=f"vocabulary: cannot read gs://t5-data.*{HELP}"):
        T5Vocabulary().encode("x")
    assert 3 < time.monotonic() - start < 5 and len(server.requests) == 1


def test_an_answer_in_drops_is_given_up_too(server, monkeypatch):
    """No single read takes long, so no time limit of the connection ends it."""

    def drops(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):
            try:
                connection.sendall(b"x")
            except OSError:
                return
            time.sleep(0.05)

    monkeypatch.setattr(vocabulary, "SECONDS", 0.5)
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", server(drops))
    start = time.monotonic()
    with pytest.raises(OSError, match="no answer within 0.5 seconds"):
        T5Vocabulary().encode("x")
    assert time.monotonic() - start < 1.5


def test_a_remote_file_system_that_hangs_is_given_up(monkeypatch):
    def sleep(*arguments):
        time.sleep(30)

    monkeypatch.setattr(vocabulary, "SECONDS", 0.3)
    monkeypatch.setattr(tf.io.gfile, "GFile", sleep)
    with pytest.raises(OSError, match="cannot read gs://somewhere/x.model: no answer within 0.3 seconds"):
        T5Vocabulary("gs://somewhere/x.model").encode("x")


@pytest.mark.parametrize("path", ["ram://nothing.model", "nosuchscheme://x.model"])
def test_a_remote_path_that_does_not_exist(path):
    with pytest.raises(OSError, match=f"vocabulary: cannot read {path}: .*{HELP}") as error:
        T5Vocabulary(path).encode("x")
    assert "no answer" not in str(error.value) and error.value.__cause__ is not None


def test_a_refusal_is_told_and_forgotten(model, server, monkeypatch, tmp_path):
    answers = [giving(b"no", "403 Forbidden"), giving(model.read_bytes())]
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", server(lambda connection: answers.pop(0)(connection)))
    asked = T5Vocabulary()
    with pytest.raises(OSError, match="cannot read gs://t5-data.*403"):
        asked.encode("x")
    assert asked.vocab_size == 400


def test_a_proxys_page_in_its_place_is_not_kept(model, server, monkeypatch, tmp_path):
    answers = [giving(b"<html>Log in first</html>"), giving(model.read_bytes())]
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", server(lambda connection: answers.pop(0)(connection)))
    with pytest.raises(ValueError, match="gs://t5-data.* is not a SentencePiece model"):
        T5Vocabulary().encode("x")
    assert not (tmp_path / "cache").exists()
    assert T5Vocabulary().vocab_size == 400


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    model = tmp_path / "secret.model"
    model.touch()

    def refuse(*arguments):
        raise tf.errors.PermissionDeniedError(None, None, "permission denied")

    monkeypatch.setattr("seqio.vocabularies.tf.io.gfile.GFile", refuse)
    with pytest.raises(OSError, match=f"vocabulary: cannot read {model}: permission denied; {HELP}"):
        T5Vocabulary(str(model)).encode("x")


@pytest.mark.parametrize("content", [b"", b"text, not a model\n", b"\0" * 100, "half"])
def test_a_file_that_is_no_model(model, tmp_path, content):
    path = tmp_path / "wrong.model"
    path.write_bytes(model.read_bytes()[: model.stat().st_size // 2] if content == "half" else content)
    with pytest.raises(ValueError, match=rf"vocabulary: {path} is not a SentencePiece model \(.*\); {HELP}"):
        T5Vocabulary(str(path)).encode("x")


def test_a_broken_copy_is_named(tmp_path):
    kept = tmp_path / "cache" / "synthesizer_jax" / "t5_sentencepiece.model"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"<html>")
    with pytest.raises(ValueError, match=rf"gs://t5-data\S+ \(read as {kept}\) is not a SentencePiece model"):
        T5Vocabulary().encode("x")


@pytest.mark.parametrize(
    "special, has",
    [
        (
            {"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2},
            "'padding': -1, 'end of sequence': 2",
        ),  # the trainer's own
        ({"pad_id": 1, "eos_id": 0}, "'padding': 1, 'end of sequence': 0"),
        ({"eos_id": -1, "unk_id": 1}, "'padding': 0, 'end of sequence': -1"),
    ],
)
def test_other_special_ids(tmp_path, special, has):
    path = train(tmp_path, **special)
    with pytest.raises(ValueError, match=rf"expected padding 0 and end of sequence 1, {path} has {{{has}}}; {HELP}"):
        T5Vocabulary(str(path)).encode("x")


# Used


def test_equality(model, tmp_path):
    ours, other = T5Vocabulary(str(model)), train(tmp_path, model_type="bpe")
    same = tmp_path / "same.model"
    same.write_bytes(model.read_bytes())
    theirs = seqio.SentencePieceVocabulary(str(same), extra_ids=100)
    assert ours == T5Vocabulary(str(same)) and ours == theirs and theirs == ours
    assert hash(ours) == hash(T5Vocabulary(str(same)))
    for different in (
        T5Vocabulary(str(model), extra_ids=99),
        seqio.SentencePieceVocabulary(str(same), extra_ids=0),
        T5Vocabulary(str(other)),
        seqio.ByteVocabulary(),
        None,
    ):
        assert ours != different and different != ours


def test_it_encodes_as_seqios_own(model):
    ours, theirs = T5Vocabulary(str(model)), seqio.SentencePieceVocabulary(str(model), extra_ids=100)
    assert (ours.vocab_size, ours.pad_id, ours.eos_id, ours.unk_id) == (400, 0, 1, 2)
    for text in ("the value of <extra_id_0> object", "", "日本 é\n"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids == ours.encode_tf(text).numpy().tolist()
        assert ours.decode(ids) == theirs.decode(ids) == ours.decode_tf(tf.constant(ids)).numpy().decode()


def test_the_last_ids_are_the_sentinels_in_falling_order(model):
    small = T5Vocabulary(str(model))
    assert [small.encode(f"<extra_id_{i}>") for i in range(100)] == [[399 - i] for i in range(100)]


def test_t5s_own(shared, monkeypatch):
    path = shared / "data/vocab/t5/spiece.model"
    if not path.is_file():
        pytest.skip(f"no {path}")
    monkeypatch.setenv(vocabulary.ENVIRONMENT, str(path))
    t5 = features.VOCABULARY
    assert t5.vocab_size == 32100 and (t5.pad_id, t5.eos_id, t5.unk_id) == (0, 1, 2)
    assert [t5.encode(f"<extra_id_{i}>") for i in range(100)] == [[i] for i in range(32099, 31999, -1)]
    assert [t5.decode([32099 - i]).strip() for i in range(100)] == [f"<extra_id_{i}>" for i in range(100)]
    assert t5.encode("Hello world") == [8774, 296]  # as public tokenizers of T5 have it
    assert t5 == seqio.SentencePieceVocabulary(str(path), extra_ids=100)


@pytest.mark.parametrize("used", [False, True])
def test_copies(model, used, monkeypatch):
    """gin copies what it is given, Beam and processes pickle it."""
    original = T5Vocabulary(str(model))
    if used:
        original.encode("x")
    for other in (copy.deepcopy(original), copy.copy(original), pickle.loads(pickle.dumps(original))):
        assert type(other) is T5Vocabulary and other == original and other.encode("the") == original.encode("the")
    assert len(pickle.dumps(original)) < 1000  # without the model
    monkeypatch.setenv(vocabulary.ENVIRONMENT, str(model))
    assert pickle.loads(pickle.dumps(T5Vocabulary())).vocab_size == 400


def test_threads_that_use_it_first_at_once(model, server, monkeypatch):
    monkeypatch.setattr(vocabulary, "PUBLIC_BY_HTTP", server(giving(model.read_bytes())))
    shared_one, found, errors = T5Vocabulary(), [], []
    together = threading.Barrier(8)

    def use():
        together.wait()
        try:
            found.append(shared_one.encode("the value of the object"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and found == [T5Vocabulary(str(model)).encode("the value of the object")] * 8
