"""From a seqio task or mixture to batches of numpy arrays, with a state from which a new process goes on exactly.

Keys are seqio's, and models/batch.py has those of each kind of model: encoder_input_tokens, decoder_input_tokens,
decoder_target_tokens, decoder_loss_weights and, where examples are packed, {encoder,decoder}_segment_ids (1, 2, ...; 0 is
padding) and {encoder,decoder}_positions (within the example), int32 [rows, length]; labels and loss_weights, int32 [rows].

What a task has: for an encoder-decoder the features "inputs" and "targets", token ids both; for a language model
"targets" alone; for a classifier "inputs", and "targets" that is one class id, int32 [1], whose vocabulary has as many
entries as there are classes (tasks/labels.py, or seqio.PassThroughVocabulary), without an end-of-sequence id.

**Hosts and shards.** A batch is made by `shards` streams, each with its part of the examples and its rows of the batch;
each host runs the streams that make its rows (streams.py). So batches, losses and states depend on `shards`, not on the
number of hosts, and a run continues on another number of them. With one shard, the default, every host reads everything.

Importing this module takes seconds (TensorFlow, seqio); the core does not.
"""

from synthesizer_jax.data.batches import Batch as Batch
from synthesizer_jax.data.batches import TrainBatches as TrainBatches
from synthesizer_jax.data.batches import check_settings as check_settings
from synthesizer_jax.data.batches import eval_batches as eval_batches
from synthesizer_jax.data.batches import settings as settings
from synthesizer_jax.data.converters import LabelFeatureConverter as LabelFeatureConverter
from synthesizer_jax.data.converters import feature_converter as feature_converter
from synthesizer_jax.data.converters import model_dataset as model_dataset
from synthesizer_jax.data.examples import number_of_examples as number_of_examples
from synthesizer_jax.data.examples import task_dataset as task_dataset
from synthesizer_jax.data.lengths import Cut as Cut
from synthesizer_jax.data.lengths import cut_examples as cut_examples
from synthesizer_jax.data.packages import check_packages as check_packages
from synthesizer_jax.data.packages import keep_off_accelerators as keep_off_accelerators
from synthesizer_jax.data.providers import TARGETS as TARGETS
from synthesizer_jax.data.providers import VOCABULARIES as VOCABULARIES
from synthesizer_jax.data.providers import Provider as Provider
from synthesizer_jax.data.providers import check_cache as check_cache
from synthesizer_jax.data.providers import check_features as check_features
from synthesizer_jax.data.providers import check_lengths as check_lengths
from synthesizer_jax.data.providers import check_model as check_model
from synthesizer_jax.data.providers import check_packing as check_packing
from synthesizer_jax.data.providers import check_shards as check_shards
from synthesizer_jax.data.providers import check_split as check_split
from synthesizer_jax.data.providers import check_vocabulary as check_vocabulary
from synthesizer_jax.data.providers import decoded as decoded
from synthesizer_jax.data.providers import describe_split as describe_split
from synthesizer_jax.data.providers import get_mixture_or_task as get_mixture_or_task
from synthesizer_jax.data.providers import how_to_get as how_to_get
from synthesizer_jax.data.providers import is_cached as is_cached
from synthesizer_jax.data.providers import load_vocabularies as load_vocabularies
from synthesizer_jax.data.providers import output_vocabulary as output_vocabulary
from synthesizer_jax.data.providers import use_cache as use_cache
from synthesizer_jax.data.providers import vocabulary_fingerprints as vocabulary_fingerprints
from synthesizer_jax.data.state import merge_states as merge_states

check_packages()
keep_off_accelerators()
