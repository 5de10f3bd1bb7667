"""Orders in which a world's events can come, and what can befall it."""

from dora_jax.coordinator import events as ev
from tests.coordinator import world as world_lib

# Ways to choose what completes next.
PACES = ("any", "newest", "oldest", "tail", "slow_trainer", "fast_trainer")
# What can happen, and cost nothing that was generated to its end.
HARMLESS = ("lose", "join", "pause", "resume", "tick", "report")
FAULTS = (*HARMLESS, "lose_version", "skip")


def choose(world: world_lib.World, rng, pace: str) -> int:
  """Picks one of the things that are under way and not held back.

  Args:
    world: with something under way.
    rng: a random.Random.
    pace: "any"; "newest" or "oldest" of the orders first; "tail": one request
      in six outlasts many others; "slow_trainer" and "fast_trainer": a step
      takes longer than all rollout meanwhile, or no time.
  """
  free = world.free()
  steps = [i for i in free if isinstance(world.pending[i], ev.StepDone)]
  others = [i for i in free if i not in steps]
  match pace:
    case "newest":
      return free[-1]
    case "oldest":
      return free[0]
    case "tail" if rng.random() < 0.97:
      quick = [i for i in free if not _is_long(world.pending[i])]
      return rng.choice(quick or free)
    case "slow_trainer" if others and rng.random() < 0.99:
      return rng.choice(others)
    case "fast_trainer" if steps:
      return steps[0]
  return rng.choice(free)


def _is_long(thing) -> bool:
  if not isinstance(thing, world_lib.Finish):
    return False
  return world_lib.length(thing.group_id, thing.member) > 19


def roomy(rng, **changes) -> world_lib.World:
  """A world under `dora` in which live requests are moved more often than not.

  Its slots are filled, several versions are alive, and each generator has few
  slots: stragglers sit scattered when a new version wants generators.
  """
  num_generators, num_slots = rng.randint(4, 8), rng.randint(3, 5)
  group_size = rng.randint(1, 2)
  total = num_generators * num_slots // group_size
  arguments = {
    "max_staleness": rng.randint(2, 4),
    "prompts_per_batch": max(1, total // 2),
    "group_size": group_size,
    "num_steps": rng.randint(4, 8),
    "slots": [num_slots] * num_generators,
    "rollout_groups": total,
  }
  return world_lib.World(**{**arguments, **changes})


def drive(
  world: world_lib.World,
  rng,
  pace: str = "any",
  *,
  fault_rate: float = 0.0,
  faults: tuple[str, ...] = FAULTS,
  limit: int = 20_000,
) -> None:
  """Completes things until the run stops; fails where none are under way.

  Args:
    world: to drive.
    rng: a random.Random.
    pace: see `choose`.
    fault_rate: probability that something happens before one completes.
    faults: what can happen.
    limit: things to complete before giving up.
  """
  for _ in range(limit):
    if world.stop is None and rng.random() < fault_rate:
      disturb(world, rng, faults)
    if world.stop is not None:
      return
    assert world.pending, f"deadlock: {world.coordinator.snapshot()}"
    world.step(choose(world, rng, pace))
  raise AssertionError("the run does not end")


def disturb(
  world: world_lib.World, rng, faults: tuple[str, ...] = FAULTS
) -> None:
  """Lets one of the things happen that no command asks for."""
  serving = sorted(world.serving)
  match rng.choice(faults):
    case "lose" if len(serving) > 1:
      world.lose(rng.choice(serving))
    case "lose_version" if len(serving) > 1:
      world.lose(rng.choice(serving), takes_version=True)
    case "join":
      generator_id = len(world.slots)
      world.slots[generator_id] = rng.randint(1, 4)
      world.join(generator_id)
    case "pause" if serving:
      world.paused.add(rng.choice(serving))
    case "resume":
      world.paused.clear()
    case "skip":
      world.skip_step()
    case "report" if serving:
      world.report(rng.choice(serving), rng.choice((0.2, 0.9)))
    case _:
      world.send(ev.Tick())
