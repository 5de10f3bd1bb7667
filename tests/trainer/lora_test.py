"""Adapters: at first nothing, then what the chain rule says, and no more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import device_batch, gradients, lora
from dora_jax.trainer.attention import xla
from tests.trainer import tiny

_SETTINGS = lora.Settings(
  rank=2, alpha=6.0, targets=("query", "output", "down"), seed=0
)
_ADAPTERS = lora.Adapters(tiny.CONFIG, _SETTINGS)


def _assert_trees(found, expected, **tolerance):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, **tolerance),
    jax.device_get(found),
    jax.device_get(expected),
  )


def _noise(tree, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree
  )


def test_at_first_the_policy_is_the_base():
  whole = gradients.make_whole(_ADAPTERS, tiny.make_mesh())
  found = whole(_ADAPTERS.start(), tiny.make_params())
  _assert_trees(found, tiny.make_params(), rtol=0, atol=0)


def test_what_is_merged_by_hand():
  # scale = 6 / 2. The heads' outputs, axes K, G and H, are summed over.
  whole = gradients.make_whole(_ADAPTERS, tiny.make_mesh())
  params, base = _noise(_ADAPTERS.shapes()), tiny.make_params()
  found = whole(params, base)["blocks"]
  pair = params["blocks"]["output"]
  added = np.einsum("LKGHR,LRD->LKGHD", pair["a"], pair["b"])
  expected = base["blocks"]["output"] + 3.0 * added
  np.testing.assert_allclose(found["output"], expected, atol=1e-4)
  pair = params["blocks"]["query"]
  added = np.einsum("LDR,LRKGH->LDKGH", pair["a"], pair["b"])
  expected = base["blocks"]["query"] + 3.0 * added
  np.testing.assert_allclose(found["query"], expected, atol=1e-4)


def test_gradients_are_those_through_the_merged_weights():
  settings = gradients.LossSettings(
    config=tiny.CONFIG,
    objective=tiny.OBJECTIVE,
    temperature=1.0,
    attention=xla.XlaAttention(),
    compute_dtype=jnp.float32,
    logprob_chunk=8,
    remat=False,
    unrolls=False,
    hidden_sharding=None,
  )
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  (packed,) = tiny.pack(tiny.make_groups(), row_length=32, rows_per_batch=8)
  batch = device_batch.put(packed, device)
  base = tiny.make_params()
  params = jax.tree.map(lambda x: 0.1 * x, _noise(_ADAPTERS.shapes()))
  loss = functools.partial(
    gradients.policy_loss,
    batch=batch,
    denominator=np.float32(20.0),
    settings=settings,
  )
  by_adapters = jax.jit(
    jax.value_and_grad(lambda p: loss(_ADAPTERS.whole(p, base))[0])
  )
  by_weights = jax.jit(jax.value_and_grad(lambda p: loss(p)[0]))
  merged = gradients.make_whole(_ADAPTERS, tiny.make_mesh())(params, base)
  value, found = by_adapters(params)
  expected_value, of_weights = by_weights(merged)
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  # W = W0 + 3 A B, so dL/dA = 3 dL/dW B' and dL/dB = 3 A' dL/dW.
  for name in _SETTINGS.targets:
    pair, gradient = params["blocks"][name], of_weights["blocks"][name]
    shape = (1, -1, 2), (1, 2, -1)
    a_LIR, b_LRE = pair["a"].reshape(shape[0]), pair["b"].reshape(shape[1])
    gradient_LIE = gradient.reshape(1, a_LIR.shape[1], -1)
    _assert_trees(
      found["blocks"][name]["a"].reshape(a_LIR.shape),
      3.0 * np.einsum("LIE,LRE->LIR", gradient_LIE, b_LRE),
      atol=1e-5,
    )
    _assert_trees(
      found["blocks"][name]["b"].reshape(b_LRE.shape),
      3.0 * np.einsum("LIR,LIE->LRE", a_LIR, gradient_LIE),
      atol=1e-5,
    )


def test_training_moves_adapters_alone():
  trainer = tiny.make_trainer(adapters=_SETTINGS)
  trainer.train(tiny.make_groups())
  state = trainer.state()
  _assert_trees(state.frozen, tiny.make_params(), rtol=0, atol=0)
  num_trained = sum(x.size for x in jax.tree.leaves(state.params))
  # Two moments of each adapter, and two counts.
  num_kept = sum(x.size for x in jax.tree.leaves(state.opt_state))
  assert num_kept == 2 * num_trained + 2
  found, before = trainer.params(), tiny.make_params()
  for name, weight in found["blocks"].items():
    has_moved = not np.array_equal(weight, before["blocks"][name])
    assert has_moved == (name in _SETTINGS.targets)
  np.testing.assert_array_equal(found["embed"], before["embed"])
  # What is restored goes on as what was saved.
  other = tiny.make_trainer(
    adapters=_SETTINGS,
    params=tiny.make_params(seed=9),
  )
  other.restore(jax.tree.map(jnp.copy, state), version=1)
  groups = tiny.make_groups(seed=1, version=1)
  assert other.train(groups) == trainer.train(groups)
  _assert_trees(other.params(), trainer.params(), rtol=0, atol=0)


def test_targets_that_are_not_there_are_refused():
  settings = lora.Settings(rank=2, alpha=1.0, targets=("embed",), seed=0)
  with pytest.raises(ValueError, match=r"lora_targets is \('embed',\).*'gate'"):
    lora.check(settings)
