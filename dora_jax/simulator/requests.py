"""A request on its way through virtual generators."""

import dataclasses

Name = tuple[int, int]


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class Live:
  """A request that has been submitted and has not finished.

  Attributes:
    name: (group_id, member).
    version: that samples its first token.
    length: tokens to sample in all.
    turn_ends: sampled tokens after which the environment answers, in order.
    pauses_s: how long each answer takes, in the same order.
    sampled: tokens so far; while it has a slot, as of when it entered.
    context: positions whose KV it needs; likewise.
    unfilled: of these, those that are to be prefilled when it enters a slot.
    spilled: of these, those whose KV comes back from the host then.
    is_mixed: whether more than one version has sampled it.
    entered: the generator's token clock when it entered its slot.
    entry: which entry that was, by which plans for others are told apart.
  """

  name: Name
  version: int
  length: int
  turn_ends: list[int]
  pauses_s: list[float]
  sampled: int = 0
  context: int
  unfilled: int
  spilled: int = 0
  is_mixed: bool = False
  entered: float = 0.0
  entry: int = -1

  def next_stop(self) -> int:
    """Sampled tokens at which it leaves its slot: a turn's end, or the last."""
    return self.turn_ends[0] if self.turn_ends else self.length
