"""T5's vocabulary, read when it is first used: 32,000 SentencePiece pieces, then 100 sentinels.

It is read from the path or http address in the environment variable SYNTHESIZER_JAX_VOCAB (on the command line also
the macro VOCABULARY), otherwise from T5's public location, of which a copy is kept in the user's cache folder. Any
SentencePiece model will do that has padding as 0 and the end of a sequence as 1.
"""

import contextlib
import functools
import os
import pathlib
import shutil
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
            self._model = _load(self.sentencepiece_model_file, self._extra_ids)
        return self._model

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


@functools.lru_cache(maxsize=None)  # gin copies vocabularies, and a copy reads anew
def _load(where: str, extra_ids: int):
    with tempfile.TemporaryDirectory(prefix="sentencepiece-") as folder:
        path = _local(where, pathlib.Path(folder))
        try:
            context = seqio.SentencePieceVocabulary(str(path), extra_ids=extra_ids)._model_context()
        except tf.errors.OpError as error:
            raise OSError(f"vocabulary: cannot read {where}: {error.message}; {HOW}") from error
        except (DecodeError, RuntimeError) as error:
            copy = f" (read as {path})" if path == _kept() else ""
            raise ValueError(f"vocabulary: {where}{copy} is not a SentencePiece model ({error}); {HOW}") from error
        special = {"padding": context.tokenizer.pad_id(), "end of sequence": context.tokenizer.eos_id()}
        if tuple(special.values()) != (0, 1):
            raise ValueError(f"vocabulary: expected padding 0 and end of sequence 1, {where} has {special}; {HOW}")
        if where == PUBLIC:
            _keep(path)
        return context


def _local(where: str, folder: pathlib.Path) -> pathlib.Path:
    """A file with the same content; of a remote one, which is read within SECONDS or not at all, a copy in the folder."""
    if where == PUBLIC and _kept().is_file():
        return _kept()
    if "://" in where:
        copy = folder / "copy.model"
        copy.write_bytes(_within_seconds(where, functools.partial(_fetch, where)))
        return copy
    if not pathlib.Path(where).is_file():
        raise FileNotFoundError(f"vocabulary: no such file: {where}; {HOW}")
    return pathlib.Path(where)


def _kept() -> pathlib.Path:
    """Where the copy of T5's own is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache, "synthesizer_jax", "t5_sentencepiece.model")


def _keep(path: pathlib.Path) -> None:
    """Only what was found to be a model: what a proxy says in its place would be read for ever. Whole or not at all."""
    if path == _kept():
        return
    with contextlib.suppress(OSError):  # no folder to keep it in
        _kept().parent.mkdir(parents=True, exist_ok=True)
        partial = _kept().with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        shutil.copyfile(path, partial)
        os.replace(partial, _kept())


def _fetch(path: str) -> bytes:
    address = PUBLIC_BY_HTTP if path == PUBLIC else path
    if address.startswith(("http://", "https://")):
        with urllib.request.urlopen(address, timeout=SECONDS) as response:
            return response.read()
    with tf.io.gfile.GFile(address, "rb") as file:
        return file.read()


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
