"""Partial rollout: live requests go on under each new version.

Source: Kimi k1.5 (https://arxiv.org/abs/2501.12599); AReaL
(https://arxiv.org/abs/2505.24298). No generator ever waits or idles, but each
update computes the KV of all live requests anew, and a trajectory holds tokens
of several versions, so it needs the decoupled loss.

The version of a trajectory is that of its first token, which rules R1 and R2
bound as they do under `dora`.
"""

from dora_jax.coordinator.schedules import dora


class PartialRollout(dora.Dora):
  """Admits and trains as `dora` does, but mixes versions."""

  name = "partial_rollout"
  balances = False
  mixes_versions = True
