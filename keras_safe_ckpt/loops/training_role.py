"""The role of this process in a loop of somebody's own, which hands us neither model nor fit."""

from __future__ import annotations

import os
from typing import Any

from keras_safe_ckpt.cluster.coordination import is_coordinated
from keras_safe_ckpt.cluster.roles import Role, role_by, role_from_environment, role_under
from keras_safe_ckpt.errors import ClusterConfigError
from keras_safe_ckpt.loops.trackables import strategy_in


def role_in_loop(resolver: Any, checkpoint: Any) -> Role:
    """By the cluster resolver if there is one, else by the strategy that made the variables."""
    if resolver is not None:
        role = role_by(resolver, os.environ, is_coordinated())
        if resolver.cluster_spec() and "ps" in resolver.cluster_spec().as_dict():
            raise ClusterConfigError(
                "cluster_resolver",
                "expected workers that train together (MultiWorkerMirroredStrategy), received a "
                "cluster with parameter servers",
            )
        return role
    strategy = strategy_in(checkpoint)
    if strategy is not None:
        return role_under(strategy, os.environ)
    return role_from_environment(os.environ, synchronous=is_coordinated())
