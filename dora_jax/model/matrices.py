"""The matrices of a layer: which of their axes a product sums over."""

from collections.abc import Mapping

# Weight of a block -> number of axes that the product sums over. They are the
# first ones after that of the layers; the rest are those of the output.
NUM_SUMMED: Mapping[str, int] = {
  "query": 1,
  "key": 1,
  "value": 1,
  "output": 3,
  "gate": 1,
  "up": 1,
  "down": 1,
}

# Those that multiply the same activations, and sum over one axis.
ALIKE = (("query", "key", "value"), ("gate", "up"))
