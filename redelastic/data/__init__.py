"""The same global batch, and every sample once, on any number of ranks: the data order as a function of the step.

No Redis and no agent is involved: it works under torchrun, `redelastic run`, or in one process.
"""

from .batches import ElasticBatches, MicroBatch
from .orders import LengthGrouped, ShardRange, Shards
from .permutation import Permutation

__all__ = ["ElasticBatches", "MicroBatch", "LengthGrouped", "Shards", "ShardRange", "Permutation"]
