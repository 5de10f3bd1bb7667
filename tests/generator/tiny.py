"""A tiny model, workers for it, and the slow way to do what they do."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import types
from dora_jax.generator import lane, sampling, worker
from dora_jax.generator.attention import xla
from dora_jax.model import attention, transformer
from dora_jax.parallel import axes

STOP_IDS = (3, 17)
MAX_LENGTH = 100
SEED = 11
CONFIG = transformer.ModelConfig(
  vocab_size=40,
  width=32,
  mlp_width=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_width=8,
  rope_theta=1e4,
  norm_eps=1e-6,
  qk_norm=True,
  qkv_bias=True,
  tied_head=False,
  max_positions=128,
)


def make_mesh(tensor: int = 1, first: int = 0) -> jax.sharding.Mesh:
  devices = np.array(jax.devices()[first : first + tensor])
  return jax.sharding.Mesh(devices, ("tensor",))


@jax.jit
def _init_params(key):
  params = transformer.init_params(CONFIG, key=key, dtype=jnp.float32)
  return params | {"head": 2.0 * params["head"]}


@functools.cache
def make_params(version: int, tensor: int = 1, first: int = 0):
  """Params of a version, on the generator mesh; logits of deviation ~2."""
  params = _init_params(jax.random.key(100 + version))
  where = axes.shardings(
    transformer.logical_axes(CONFIG), make_mesh(tensor, first), axes.DECODE
  )
  return jax.device_put(params, where)


def make_worker(**changes) -> worker.MeshWorker:
  tensor, first = changes.pop("tensor", 1), changes.pop("first", 0)
  settings = {
    "mesh": make_mesh(tensor, first),
    "config": CONFIG,
    "paged": xla.XlaAttention(),
    "lanes": [(0, 4)],
    "page_size": 4,
    "max_length": MAX_LENGTH,
    "prefill_chunk": 512,
    "chunk_steps": 3,
    "chunks_ahead": 0,
    "stop_ids": STOP_IDS,
    "decode_text": decode_text,
    "seed": SEED,
    "dtype": jnp.float32,
  }
  return worker.MeshWorker(**(settings | changes))


def make_lane(version: int = 0, **changes) -> lane.Lane:
  (a_lane, *_) = make_lanes(version, **changes)
  return a_lane


def make_lanes(version: int = 0, **changes) -> list[lane.Lane]:
  """The lanes of one worker, all of which serve one version."""
  lanes = make_worker(**changes).lanes
  where = changes.get("tensor", 1), changes.get("first", 0)
  for a_lane in lanes:
    a_lane.load(version, make_params(version, *where))
  return lanes


def make_prompt(group_id: int, length: int) -> np.ndarray:
  rng = np.random.default_rng((5, group_id, length))
  return rng.integers(4, CONFIG.vocab_size, length).astype(np.int32)


def decode_text(token_ids) -> str:
  """Token 4 is "A", 5 is "B" and so on; stop tokens leave no trace."""
  return "".join(chr(61 + i) for i in token_ids if i not in STOP_IDS)


def make_request(group_id: int, member: int = 0, **changes) -> types.Request:
  """A request; `changes` are fields of it, of its sampling or its stopping."""
  for name, record in (
    ("sampling", types.Sampling),
    ("stopping", types.Stopping),
  ):
    fields = {field.name for field in dataclasses.fields(record)}
    given = {field: changes.pop(field) for field in fields & changes.keys()}
    changes[name] = record(**given)
  length = changes.pop("length", 7)
  settings = {
    "version": 0,
    "prompt": make_prompt(group_id, length),
    "max_new_tokens": 10,
  }
  settings |= changes
  return types.Request(group_id=group_id, member=member, **settings)


def run(a_lane: lane.Lane, requests=()) -> list[types.Trajectory]:
  """Submits the requests and steps until nothing is live."""
  a_lane.submit(requests)
  finished = []
  for _ in range(1000):
    if not a_lane.num_live():
      return finished
    finished += a_lane.step()
  raise AssertionError(f"{a_lane.num_live()} requests never finish")


def by_request(trajectories) -> dict:
  """What was sampled for each request, as comparable values."""
  return {
    (t.group_id, t.member): (
      t.finish_reason,
      t.completion.tolist(),
      t.behavior_logprobs.tolist(),
      t.token_versions.tolist(),
      t.kept_mass.tolist(),
    )
    for t in trajectories
  }


@jax.jit
def full_logits(params, tokens_T):
  """Logits after each token of one sequence; padding may follow it."""
  hidden_BTD, _ = transformer.forward(
    params,
    CONFIG,
    tokens_T[None],
    jnp.arange(tokens_T.shape[0])[None],
    attend=attention.causal_attention(),
  )
  return transformer.unembed(params, CONFIG, hidden_BTD[0])


def make_rules(settings: Sequence[types.Sampling]) -> sampling.Rules:
  """The rules of some rows."""
  column = lambda name: np.array([getattr(row, name) for row in settings])
  return sampling.Rules(
    temperature_B=column("temperature").astype(np.float32),
    top_k_B=column("top_k").astype(np.int32),
    top_p_B=column("top_p").astype(np.float32),
    min_p_B=column("min_p").astype(np.float32),
  )


@jax.jit
def _draw_next(params, tokens_T, length, draw, rules):
  """The token after the first `length`, from a full forward pass."""
  logits_BV = full_logits(params, tokens_T)[length - 1][None]
  stream, group_id, member = draw
  seed_key = jax.random.key(SEED)
  key = sampling.draw_key(seed_key, stream, group_id, member, length)
  return sampling.sample(logits_BV, key[None], rules, jnp.ones(1, bool))


def pad(tokens) -> np.ndarray:
  """Pads tokens to the one length that the reference is compiled for."""
  padded_T = np.zeros(MAX_LENGTH, np.int32)
  padded_T[: len(tokens)] = tokens
  return padded_T


def generate_slowly(request: types.Request) -> types.Trajectory:
  """Recomputes the whole sequence for each token that it samples."""
  params = make_params(request.version)
  tokens = request.prompt.tolist()
  logprobs, kept_mass = [], []
  draw = (request.stream, request.group_id, request.member)
  draw = tuple(jnp.int32(counter) for counter in draw)
  rules = make_rules([request.sampling])
  reason = None
  while reason is None:
    drawn = _draw_next(params, pad(tokens), np.int32(len(tokens)), draw, rules)
    tokens.append(int(drawn.token_B[0]))
    logprobs.append(float(drawn.logprob_B[0]))
    kept_mass.append(float(drawn.kept_mass_B[0]))
    reason = _end_slowly(request, tokens[len(request.prompt) :])
  completion = np.array(tokens[len(request.prompt) :], np.int32)
  return types.Trajectory(
    group_id=request.group_id,
    member=request.member,
    version=request.version,
    token_versions=np.full(len(completion), request.version),
    prompt=request.prompt,
    completion=completion,
    behavior_logprobs=np.array(logprobs, np.float32),
    kept_mass=np.array(kept_mass, np.float32),
    finish_reason=reason,
  )


def _end_slowly(
  request: types.Request, completion: list[int]
) -> types.FinishReason | None:
  """Why a completion ends with its last token, from all of its tokens."""
  stopping = request.stopping
  text = decode_text(completion)
  if completion[-1] in (*STOP_IDS, *stopping.stop_ids) or any(
    string in text for string in stopping.stop_strings
  ):
    return "stop"
  for length in range(1, stopping.repeated_tokens + 1):
    run = completion[-length:] * stopping.repetitions
    if completion[-len(run) :] == run:
      return "repetition"
  return "length" if len(completion) == request.max_new_tokens else None


def assert_close(fast, slow) -> None:
  """Same requests, same tokens, log-probabilities within 1e-5."""
  fast, slow = by_request(fast), by_request(slow)
  assert fast.keys() == slow.keys()
  for name, (reason, tokens, logprobs, versions, kept_mass) in fast.items():
    assert (reason, tokens, versions) == (*slow[name][:2], slow[name][3]), name
    np.testing.assert_allclose(logprobs, slow[name][2], atol=1e-5, rtol=0)
    np.testing.assert_allclose(kept_mass, slow[name][4], atol=1e-5, rtol=0)
