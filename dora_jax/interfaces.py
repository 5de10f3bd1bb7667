"""Small protocols through which the runtime sees the stages."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dora_jax import types

# A nested dict of arrays with the same structure wherever params appear.
Params = Any
# A live request on its way, generator/kv_transfer.Parcel: its `name` is
# (group_id, member); all else only generators read.
Parcel = Any


@runtime_checkable
class Tokenizer(Protocol):
  """Text to token ids and back."""

  vocab_size: int
  stop_ids: tuple[int, ...]

  def encode(self, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    ...

  def decode(self, token_ids: Sequence[int]) -> str:
    """The text of token ids; stop tokens and padding leave no trace."""
    ...


@runtime_checkable
class Task(Protocol):
  """Where prompts come from. What a completion earns is tasks/reward_pool's."""

  num_groups: int | None

  def prompt(self, group_id: int) -> types.Prompt:
    """The prompt of the group with this position in the order of dispatch."""
    ...

  def heldout_prompts(self) -> Sequence[types.Prompt]:
    """Prompts that are never trained on."""
    ...


@runtime_checkable
class Generator(Protocol):
  """One inference replica (a lane): one slot batch, one version at a time."""

  generator_id: int
  version: int | None

  def load(self, version: int, params: Params) -> None:
    """Serves these params from now on; refused while requests are live."""
    ...

  def unload(self) -> None:
    """Lets go of its params; refused while requests are live."""
    ...

  def score(self, tokens: Int[np.ndarray, "S"]) -> Float[np.ndarray, "T"]:
    """Log-probabilities of all tokens but the first, by what is loaded."""
    ...

  def refresh(self, version: int, params: Params) -> int:
    """Serves newer params, under which live requests go on.

    Returns:
      Tokens whose KV was computed anew.
    """
    ...

  def submit(self, requests: Sequence[types.Request]) -> None:
    """Accepts requests of the version that is loaded."""
    ...

  def step(self) -> list[types.Trajectory]:
    """Advances every live request by a chunk; returns those that finished."""
    ...

  def num_live(self) -> int:
    """Requests accepted and neither returned nor forgotten."""
    ...

  def extract(
    self, requests: Collection[tuple[int, int]], *, copies_kv: bool = True
  ) -> list[Parcel]:
    """Pauses those of the requests that are here, and packs them to move.

    Args:
      requests: (group_id, member) of each.
      copies_kv: False only for a generator that shares the KV pool.
    """
    ...

  def restore(self, parcels: Sequence[Parcel]) -> int:
    """Takes over all of these requests, or none and raises ValueError.

    Returns:
      Positions whose KV came along; nothing is prefilled again.
    """
    ...

  def forget(self, requests: Collection[tuple[int, int]]) -> None:
    """Frees what paused requests hold here: another generator has them."""
    ...

  def resume(self, requests: Collection[tuple[int, int]]) -> None:
    """Goes on with paused requests that no other generator has taken."""
    ...

  def spill(
    self, requests: Collection[tuple[int, int]]
  ) -> list[tuple[int, int]]:
    """Carries KV of requests to the host until there is room; says whose."""
    ...

  def cancel(
    self, requests: Collection[tuple[int, int]]
  ) -> list[tuple[int, int, int]]:
    """Gives up requests: (group_id, member, sampled tokens) of those here."""
    ...


@runtime_checkable
class Trainer(Protocol):
  """Turns groups into the next version's params."""

  version: int
  skipped: str | None

  def params(self) -> Params:
    """The current params, as the trainer holds them; valid until `train`."""
    ...

  def train(self, groups: Sequence[types.Group]) -> Mapping[str, float]:
    """Makes one training step, advances `version` by one, returns metrics.

    A step that changes nothing leaves `version` as it is, and says why in
    `skipped`, which is None after any other.
    """
    ...


@runtime_checkable
class Clock(Protocol):
  """Seconds since some fixed moment; a simulator's clock is virtual."""

  def now_s(self) -> float:
    """Now, in seconds."""
    ...
