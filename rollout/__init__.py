"""Rollout trees: policies, allocators, the runner, the tree, the journal, and what is derived from it.

`agentgym.rollout` is this package and also the function that runs rollouts: `agentgym.rollout("shop/Till-v0", ...)`
calls `agentgym.rollout.api.rollout`. A module can be called when its class can.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `agentgym.rollout.api.rollout`."""
        from agentgym.rollout.api import rollout

        return rollout(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
