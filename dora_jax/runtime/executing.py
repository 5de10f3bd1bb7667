"""Turns the coordinator's commands into orders to the parts of a run.

Keeps what the coordinator knows only by id: prompts, trajectories, rewards.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np

from dora_jax import interfaces, types
from dora_jax.coordinator import events as ev
from dora_jax.runtime import generating, orders, part, scoring, training
from dora_jax.weights import store as store_lib

EVALUATION = "evaluation"
ROLLOUT = "rollout"

# (group_id, member) -> most tokens to sample, the stop token included.
CompletionLimit = Callable[[int, int], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """The threads of a run.

  Attributes:
    trainer: makes steps.
    rewards: scores completions.
    generators: generator_id -> the part that drives its mesh.
    names: generator_id -> its name, by which it holds versions.
    mesh_ids: generator_id -> its mesh.
    num_slots: generator_id -> its slots, for those that the coordinator uses.
    kv_capacity: mesh -> tokens whose KV it holds.
    evaluation_id: the generator that the evaluation uses.
  """

  trainer: training.TrainerPart
  rewards: scoring.RewardPart
  generators: Mapping[int, generating.GeneratorPart]
  names: Mapping[int, str]
  mesh_ids: Mapping[int, int]
  num_slots: Mapping[int, int]
  kv_capacity: Mapping[int, int]
  evaluation_id: int

  def all(self) -> list[part.Part]:
    """Each part once."""
    return [
      self.trainer,
      self.rewards,
      *dict.fromkeys(self.generators.values()),
    ]

  def generators_of(self, name: str) -> list[int]:
    """The generators that the part of this name drives; [] for any other."""
    return [g for g, each in self.generators.items() if each.part == name]

  def joined(self) -> list[ev.GeneratorJoined]:
    """What the coordinator hears of the generators at the beginning."""
    return [
      ev.GeneratorJoined(
        generator_id=generator_id,
        num_slots=num_slots,
        mesh_id=self.mesh_ids[generator_id],
        kv_capacity=self.kv_capacity[self.mesh_ids[generator_id]],
      )
      for generator_id, num_slots in self.num_slots.items()
    ]


@dataclasses.dataclass(kw_only=True)
class GroupData:
  """What the coordinator knows only by id.

  Attributes:
    prompt: of the group.
    trajectories: member -> its finished trajectory.
    rewards: member -> its reward, once it is known.
    components: member -> what else the reward function returned.
  """

  prompt: types.Prompt
  trajectories: dict[int, types.Trajectory] = dataclasses.field(
    default_factory=dict
  )
  rewards: dict[int, float] = dataclasses.field(default_factory=dict)
  components: dict[int, Mapping[str, float]] = dataclasses.field(
    default_factory=dict
  )

  def group(self, group_id: int) -> types.Group:
    """The finished group, in order of its members."""
    members = sorted(self.trajectories)
    # Those that the reward function returned for each of the members.
    names = set.intersection(*(set(self.components[m]) for m in members))
    return types.Group(
      group_id=group_id,
      prompt=self.prompt,
      trajectories=tuple(self.trajectories[m] for m in members),
      rewards=np.array([self.rewards[m] for m in members], np.float32),
      components={
        name: np.array([self.components[m][name] for m in members], np.float32)
        for name in sorted(names)
      },
    )


class Executor:
  """Carries commands out; used by the runtime's thread."""

  def __init__(
    self,
    *,
    task: interfaces.Task,
    tokenizer: interfaces.Tokenizer,
    parts: Parts,
    store: store_lib.WeightStore,
    sampling: types.Sampling,
    stopping: types.Stopping,
    completion_limit: CompletionLimit,
  ):
    """Wires.

    Args:
      task: prompts by group id.
      tokenizer: decodes completions for the rewards.
      parts: who gets the orders.
      store: of versions.
      sampling: in training.
      stopping: in training.
      completion_limit: most tokens of each completion.
    """
    self._task = task
    self._tokenizer = tokenizer
    self._parts = parts
    self._store = store
    self._sampling = sampling
    self._stopping = stopping
    self._completion_limit = completion_limit
    self._groups: dict[int, GroupData] = {}
    # Those of the last Train, and those that it took again.
    self._batch: dict[int, GroupData] = {}
    self._reused: dict[int, GroupData] = {}
    # That a later step may train on once more.
    self._trained: dict[int, GroupData] = {}
    # (source, target) -> the requests of the move that is under way.
    self._moves: dict[tuple[int, int], tuple[orders.Name, ...]] = {}
    # Those of them whose requests are packed and sent on.
    self._sent_on: dict[tuple[int, int], tuple[orders.Name, ...]] = {}
    self._lost: set[int] = set()
    self._lost_versions: set[int] = set()

  @property
  def moves(self) -> Mapping[tuple[int, int], Collection[orders.Name]]:
    """(source, target) -> the requests of each move that is under way."""
    return self._moves

  def lose(
    self, generators: Collection[int], versions: Collection[int]
  ) -> None:
    """Sends these generators nothing more; the versions are in no store."""
    self._lost.update(generators)
    self._lost_versions.update(versions)

  def end_lost_moves(self) -> list[ev.Moved]:
    """Ends the moves that a generator should still have answered, and is lost.

    A move from a lost generator whose requests are on their way arrives.
    """
    ended = []
    for source_id, target_id in list(self._moves):
      sent_on = self._sent_on.get((source_id, target_id))
      if sent_on is None and source_id in self._lost:
        ended.append(self._end_move(source_id, target_id, (), 0))
      elif sent_on is not None and target_id in self._lost:
        ended.append(self._go_on(source_id, target_id, sent_on))
    return ended

  def carry_out(self, command: ev.Command) -> list[types.Group] | None:
    """Gives the orders that a command needs; of a Train, returns new groups."""
    match command:
      case ev.Load():
        self._load(command)
      case ev.Submit():
        self._submit(command)
      case ev.Move():
        self._moves[command.source_id, command.target_id] = command.requests
        self._send(
          orders.ExtractOrder(
            generator_id=command.source_id,
            target_id=command.target_id,
            requests=command.requests,
          )
        )
      case ev.Cancel():
        self._send(
          orders.CancelOrder(
            generator_id=command.generator_id, requests=command.requests
          )
        )
      case ev.Score():
        data = self._groups[command.group_id]
        self.send_score(ROLLOUT, data.prompt, data.trajectories[command.member])
      case ev.Train():
        self._batch = {g: self._groups.pop(g) for g in command.group_ids}
        self._reused = {g: self._trained[g] for g in command.reused_ids}
        self._trained |= self._batch
        self._trained = {g: self._trained[g] for g in command.kept_ids}
        batch = [data.group(g) for g, data in self._batch.items()]
        reused = [data.group(g) for g, data in self._reused.items()]
        self._parts.trainer.send(batch + reused)
        return batch
      case ev.Restart():
        data = self._groups[command.group_id]
        data.trajectories.clear()
        data.rewards.clear()
        data.components.clear()
      case ev.Drop():
        del self._groups[command.group_id]
      case ev.Release():
        if command.version not in self._lost_versions:
          self._store.release(command.version, holder="coordinator")
      case ev.Stop():
        pass  # What is unfinished may still be saved.
    return None

  @property
  def groups(self) -> Mapping[int, GroupData]:
    """Groups that have started and are not in a batch, by id."""
    return self._groups

  def return_batch(self) -> None:
    """Takes back the groups of a step that was not made."""
    self._groups |= self._batch
    self._trained |= self._reused
    self._batch, self._reused = {}, {}

  @property
  def trained(self) -> Mapping[int, GroupData]:
    """Groups that steps have trained on and a later one may take again."""
    return self._trained

  def take_over(
    self, groups: Mapping[int, GroupData], trained: Mapping[int, GroupData]
  ) -> None:
    """Goes on with the groups of a run that this one resumes.

    Args:
      groups: that no step has trained on.
      trained: that a later step may take again.
    """
    self._groups, self._trained = dict(groups), dict(trained)

  def keep_trajectory(self, trajectory: types.Trajectory) -> None:
    """Keeps a finished trajectory, unless its group was given up."""
    data = self._groups.get(trajectory.group_id)
    if data is not None:
      data.trajectories[trajectory.member] = trajectory

  def keep_reward(
    self,
    group_id: int,
    member: int,
    reward: float,
    components: Mapping[str, float],
  ) -> None:
    """Keeps a reward and its components, unless its group was given up."""
    data = self._groups.get(group_id)
    if data is not None:
      data.rewards[member] = reward
      data.components[member] = components

  def pass_on(self, message: orders.Extracted) -> ev.Moved | None:
    """Sends packed requests to their target; the end of a move of nothing."""
    if not message.parcels:
      return self._end_move(message.source_id, message.target_id, (), 0)
    names = tuple(parcel.name for parcel in message.parcels)
    if message.target_id in self._lost:
      return self._go_on(message.source_id, message.target_id, names)
    self._sent_on[message.source_id, message.target_id] = names
    self._send(
      orders.RestoreOrder(
        generator_id=message.target_id,
        source_id=message.source_id,
        parcels=message.parcels,
      )
    )
    return None

  def end_move(
    self, message: orders.Restored | orders.RestoreFailed
  ) -> ev.Moved:
    """Tells the source to let go of its requests, or to go on with them."""
    if isinstance(message, orders.RestoreFailed):
      return self._go_on(message.source_id, message.target_id, message.requests)
    self._send(
      orders.ForgetOrder(
        generator_id=message.source_id, requests=message.requests
      )
    )
    return self._end_move(
      message.source_id,
      message.target_id,
      message.requests,
      message.num_kv_tokens,
    )

  def send_score(
    self, purpose: str, prompt: types.Prompt, trajectory: types.Trajectory
  ) -> None:
    """Asks for the reward of a completion."""
    completion = self._tokenizer.decode(trajectory.completion.tolist())
    self._parts.rewards.send(
      scoring.ScoreOrder(
        job=(purpose, trajectory.group_id, trajectory.member),
        prompt=prompt,
        completion=completion,
      )
    )

  def _go_on(
    self, source_id: int, target_id: int, requests: tuple[orders.Name, ...]
  ) -> ev.Moved:
    """Has the source go on with packed requests: the target has none."""
    self._send(orders.ResumeOrder(generator_id=source_id, requests=requests))
    return self._end_move(source_id, target_id, (), 0)

  def _end_move(
    self,
    source_id: int,
    target_id: int,
    moved: tuple[orders.Name, ...],
    num_kv_tokens: int,
  ) -> ev.Moved:
    ordered = self._moves.pop((source_id, target_id))
    self._sent_on.pop((source_id, target_id), None)
    return ev.Moved(
      source_id=source_id,
      target_id=target_id,
      moved=moved,
      left=tuple(name for name in ordered if name not in moved),
      num_kv_tokens=num_kv_tokens,
    )

  def _send(self, order: orders.Order) -> None:
    if order.generator_id not in self._lost:
      self._parts.generators[order.generator_id].send(order)

  def _load(self, command: ev.Load) -> None:
    if command.generator_id in self._lost:
      return  # The coordinator is about to hear of it.
    self._store.reserve(
      command.version,
      holder=self._parts.names[command.generator_id],
      mesh_id=self._parts.mesh_ids[command.generator_id],
    )
    self._send(
      orders.LoadOrder(
        generator_id=command.generator_id,
        version=command.version,
        carries_live=command.carries_live,
      )
    )

  def _submit(self, command: ev.Submit) -> None:
    if command.group_id not in self._groups:
      prompt = self._task.prompt(command.group_id)
      self._groups[command.group_id] = GroupData(prompt=prompt)
    prompt = self._groups[command.group_id].prompt
    self._send(
      orders.SubmitOrder(
        generator_id=command.generator_id,
        requests=[
          types.Request(
            group_id=command.group_id,
            member=member,
            version=command.version,
            prompt=prompt.tokens,
            max_new_tokens=self._completion_limit(command.group_id, member),
            sampling=self._sampling,
            stopping=self._stopping,
          )
          for member in command.members
        ],
      )
    )
