"""Multi-turn tool environments with mid-episode snapshots, feeding rollout trees for LLM reinforcement learning.

    import agentgym as ag

The import registers the env ids with Gymnasium, which since 1.0 looks for none by itself. All else is imported on
first use (PEP 562), so that `import agentgym` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentgym import registry as registry

if TYPE_CHECKING:
    from agentgym import errors as errors
    from agentgym.env import Env as Env
    from agentgym.env import Outcome as Outcome
    from agentgym.env import Snapshot as Snapshot
    from agentgym.messages import Message as Message
    from agentgym.messages import ToolCall as ToolCall
    from agentgym.messages import call as call
    from agentgym.registry import env_ids as env_ids
    from agentgym.registry import make as make
    from agentgym.registry import register as register
    from agentgym.rollout.api import rollout as rollout
    from agentgym.stack import fork as fork
    from agentgym.stack import restore as restore
    from agentgym.stack import snapshot as snapshot
    from agentgym.tasks import Task as Task
    from agentgym.tasks import TaskSet as TaskSet
    from agentgym.tool_env import AsyncToolEnv as AsyncToolEnv
    from agentgym.tool_env import ToolEnv as ToolEnv
    from agentgym.tools import ToolSpec as ToolSpec
    from agentgym.tools import tool as tool

    __version__: str

# Exported name -> module that has it; a name equal to its module's last part is the module itself.
_EXPORTS = {
    "AsyncToolEnv": "agentgym.tool_env",
    "Env": "agentgym.env",
    "Message": "agentgym.messages",
    "Outcome": "agentgym.env",
    "Snapshot": "agentgym.env",
    "Task": "agentgym.tasks",
    "TaskSet": "agentgym.tasks",
    "ToolCall": "agentgym.messages",
    "ToolEnv": "agentgym.tool_env",
    "ToolSpec": "agentgym.tools",
    "call": "agentgym.messages",
    "env_ids": "agentgym.registry",
    "errors": "agentgym.errors",
    "fork": "agentgym.stack",
    "make": "agentgym.registry",
    "register": "agentgym.registry",
    "restore": "agentgym.stack",
    "rollout": "agentgym.rollout",  # the package: calling it runs `agentgym.rollout.api.rollout`
    "snapshot": "agentgym.stack",
    "tool": "agentgym.tools",
}
__all__ = [*_EXPORTS, "__version__"]


def _load(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("agentgym-trees")
    elif name in _EXPORTS:
        module = importlib.import_module(_EXPORTS[name])
        value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    else:
        raise AttributeError(_unknown(name), name=name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a `__getattr__` that type checkers see makes every misspelt name valid
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, __all__, n=1)
    return f"module 'agentgym' has no attribute {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
