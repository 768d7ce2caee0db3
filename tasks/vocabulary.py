"""T5's vocabulary, read when it is first used: 32,000 SentencePiece pieces, then 100 sentinels.

It is read from the path in the environment variable SYNTHESIZER_JAX_VOCAB (on the command line also the macro
VOCABULARY), otherwise from T5's public location, of which a copy is kept in the user's cache folder. Any SentencePiece
model will do that has padding as 0 and the end of a sequence as 1.
"""

import os
import pathlib
import tempfile
import threading
import urllib.request
from collections.abc import Callable

import seqio
import tensorflow as tf
from google.protobuf.message import DecodeError

ENVIRONMENT = "SYNTHESIZER_JAX_VOCAB"
PUBLIC = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"
PUBLIC_BY_HTTP = PUBLIC.replace("gs://", "https://storage.googleapis.com/")  # needs no credentials, nor looks for them
SENTINELS = 100
SECONDS = 4.0  # for a file of 0.8 MB; behind a proxy or a firewall a connection would hang for minutes
HOW = (
    f"give the path of a copy of T5's sentencepiece.model in the environment variable {ENVIRONMENT}, or to a command as "
    f"--gin.VOCABULARY='\"path/to/sentencepiece.model\"' (tasks, cache: --vocabulary=FILE); T5's own is {PUBLIC_BY_HTTP}"
)


class T5Vocabulary(seqio.SentencePieceVocabulary):
    """A SentencePiece vocabulary whose file is found when it is first used.

    Equal to every SentencePiece vocabulary of the same pieces and sentinels, wherever that was read from.

    Args:
      path: of the SentencePiece model; None: what the environment says, otherwise T5's public location.
      extra_ids: sentinels, the last ids in falling order.

    Raises: OSError, at the first use and within seconds, where the file can't be read; ValueError where it is no
      SentencePiece model or has other special ids.
    """

    def __init__(self, path: str | None = None, extra_ids: int = SENTINELS):
        super().__init__(path, extra_ids=extra_ids)

    @property
    def sentencepiece_model_file(self) -> str:
        return self._sentencepiece_model_file or os.environ.get(ENVIRONMENT) or PUBLIC

    def _model_context(self):
        if self._model is None:
            self._model = self._load()
        return self._model

    def _load(self):
        where = self.sentencepiece_model_file
        read = seqio.SentencePieceVocabulary(local_copy(where), extra_ids=self._extra_ids)
        try:
            context = read._model_context()
        except (DecodeError, RuntimeError) as error:
            raise ValueError(f"vocabulary: {where} is not a SentencePiece model ({error}); {HOW}") from error
        special = {"padding": context.tokenizer.pad_id(), "end of sequence": context.tokenizer.eos_id()}
        if tuple(special.values()) != (0, 1):
            raise ValueError(f"vocabulary: expected padding 0 and end of sequence 1, {where} has {special}; {HOW}")
        return context

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, seqio.SentencePieceVocabulary):
            return False
        if isinstance(other, T5Vocabulary) and self._source == other._source:
            return True  # without reading it
        return self.sp_model == other.sp_model

    @property
    def _source(self):
        return self._sentencepiece_model_file, self._extra_ids

    def __hash__(self) -> int:
        return hash(SENTINELS)  # equal vocabularies may differ in all that is known without reading them


def local_copy(path: str) -> str:
    """A path in the local file system with the same content; remote files are read within SECONDS or not at all."""
    if "://" not in path:
        if not pathlib.Path(path).is_file():
            raise FileNotFoundError(f"vocabulary: no such file: {path}; {HOW}")
        return path
    if path != PUBLIC:
        return _written(_within_seconds(path, lambda: tf.io.gfile.GFile(path, "rb").read()))
    kept = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "synthesizer_jax"
    copy = kept / "t5_sentencepiece.model"
    if not copy.is_file():
        downloaded = _written(_within_seconds(path, _download))
        try:
            kept.mkdir(parents=True, exist_ok=True)
            os.replace(downloaded, copy)
        except OSError:
            return downloaded  # no folder to keep it in, or one on another disk
    return str(copy)


def _download() -> bytes:
    with urllib.request.urlopen(PUBLIC_BY_HTTP, timeout=SECONDS) as response:
        return response.read()


def _written(content: bytes) -> str:
    """A new file with this content."""
    descriptor, path = tempfile.mkstemp(prefix="sentencepiece-", suffix=".model")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path


def _within_seconds(path: str, read: Callable[[], bytes]) -> bytes:
    """In a thread, as neither the look-up of a name nor TensorFlow's file systems can be given a limit."""
    outcome: list[bytes | Exception] = []

    def run():
        try:
            outcome.append(read())
        except Exception as error:  # told below, whatever the file system raises
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    failure = outcome[0] if outcome else f"no answer within {SECONDS:g} seconds"
    if isinstance(failure, bytes):
        return failure
    raise OSError(f"vocabulary: cannot read {path}: {failure}; {HOW}") from (outcome[0] if outcome else None)
