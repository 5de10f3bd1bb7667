"""A tiny model, workers for it, and the slow way to do what they do."""

import functools

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
    "stop_ids": STOP_IDS,
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


def make_request(group_id: int, member: int = 0, **changes) -> types.Request:
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


@jax.jit
def _draw_next(params, tokens_T, length, draw, temperature):
  """The token after the first `length`, from a full forward pass."""
  logits_BV = full_logits(params, tokens_T)[length - 1][None]
  stream, group_id, member = draw
  seed_key = jax.random.key(SEED)
  key = sampling.draw_key(seed_key, stream, group_id, member, length)
  token_B, logprob_B = sampling.sample(logits_BV, key[None], temperature[None])
  return token_B[0], logprob_B[0]


def pad(tokens) -> np.ndarray:
  """Pads tokens to the one length that the reference is compiled for."""
  padded_T = np.zeros(MAX_LENGTH, np.int32)
  padded_T[: len(tokens)] = tokens
  return padded_T


def generate_slowly(request: types.Request) -> types.Trajectory:
  """Recomputes the whole sequence for each token that it samples."""
  params = make_params(request.version)
  tokens = request.prompt.tolist()
  logprobs = []
  draw = (request.stream, request.group_id, request.member)
  draw = tuple(jnp.int32(counter) for counter in draw)
  temperature = jnp.float32(request.temperature)
  while len(tokens) < len(request.prompt) + request.max_new_tokens:
    token, logprob = _draw_next(
      params, pad(tokens), np.int32(len(tokens)), draw, temperature
    )
    tokens.append(int(token))
    logprobs.append(float(logprob))
    if tokens[-1] in STOP_IDS:
      break
  completion = np.array(tokens[len(request.prompt) :], np.int32)
  return types.Trajectory(
    group_id=request.group_id,
    member=request.member,
    version=request.version,
    token_versions=np.full(len(completion), request.version),
    prompt=request.prompt,
    completion=completion,
    behavior_logprobs=np.array(logprobs, np.float32),
    finish_reason="stop" if tokens[-1] in STOP_IDS else "length",
  )


def assert_close(fast, slow) -> None:
  """Same requests, same tokens, log-probabilities within 1e-5."""
  fast, slow = by_request(fast), by_request(slow)
  assert fast.keys() == slow.keys()
  for name, (reason, tokens, logprobs, versions) in fast.items():
    assert (reason, tokens, versions) == (*slow[name][:2], slow[name][3]), name
    np.testing.assert_allclose(logprobs, slow[name][2], atol=1e-5, rtol=0)
