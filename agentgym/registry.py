"""Env ids. Registration goes through Gymnasium's registry; this module adds what it lacks for our envs.

Importing it registers the envs that ship with agentgym and those of installed packages, all by name: no env
module is imported before it is made.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import registry

from agentgym.errors import BadInput, UnknownName

if TYPE_CHECKING:
    from agentgym.env import Env
    from agentgym.stack import AnyEnv

ENTRY_POINT_GROUP = "agentgym.envs"
_ID = re.compile(r"^[\w:-]+/[\w:.-]+-v\d+$")
_BUILTIN = {
    "agentgym/Countdown-v0": "agentgym.envs.countdown:Countdown",
    "agentgym/Blocksworld-v0": "agentgym.envs.blocksworld:Blocksworld",
    "agentgym/SearchQA-v0": "agentgym.envs.searchqa:SearchQA",
}
_ours: set[str] = set()


def register(env_id: str, entry_point: type[Env] | Callable[..., Env] | str, **kwargs: Any) -> None:
    """Register an env, so that `agentgym.make(env_id)` and `gymnasium.make(env_id)` find it.

    A package makes its envs known without being imported by entry points in the group `agentgym.envs`:
    `"shop/Till-v0" = "shop.till:Till"`.

    Args:
        env_id: `namespace/Name-vN`.
        entry_point: the env class, a function that makes one, or `"module:attribute"`, imported on first use.
        kwargs: constructor arguments, e.g. `max_turns=12`.

    Raises:
        BadInput: the id has another form.
    """
    if not _ID.match(env_id):
        raise BadInput(f"env id {env_id!r} is not of the form namespace/Name-vN, e.g. 'shop/Till-v0'")
    registry.pop(env_id, None)
    creator: Any = entry_point
    gymnasium.register(env_id, creator, order_enforce=False, disable_env_checker=True, kwargs=kwargs)
    _ours.add(env_id)


def env_ids() -> list[str]:
    """Ids of all registered agentgym envs, ours and third parties'."""
    return sorted(_ours & registry.keys())


def make(env_id: str, **kwargs: Any) -> AnyEnv:
    """Make an env, like `gymnasium.make`, with errors that name the nearest valid id, level or split.

    Args:
        env_id: a registered id.
        kwargs: constructor arguments (`split`, `level`, `max_turns` ...), and those of `gymnasium.make`.

    Raises:
        UnknownName: no env has this id.
        BadInput: the constructor refuses an argument.
    """
    check_id(env_id)
    try:
        return gymnasium.make(env_id, **kwargs)
    except TypeError as error:
        raise BadInput(f"{env_id} does not take these arguments ({', '.join(kwargs)}): {error}") from error


def check_id(env_id: str) -> None:
    """Raise `UnknownName` unless `env_id` is registered (with us or directly with Gymnasium)."""
    if env_id not in registry:
        raise UnknownName.of("env", env_id, env_ids())


def env_class(env_id: str) -> type[Env]:
    """Return the class (or function) behind an id, importing its module."""
    check_id(env_id)
    target: Any = registry[env_id].entry_point
    if isinstance(target, str):
        module, _, name = target.partition(":")
        target = getattr(importlib.import_module(module), name)
    return target  # type: ignore[no-any-return]


def _register_installed() -> None:
    for env_id, target in _BUILTIN.items():
        register(env_id, target)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(point.name, point.value)
        except BadInput as error:
            warnings.warn(f"entry point {point.name!r} of {ENTRY_POINT_GROUP} is ignored: {error}", stacklevel=2)


_register_installed()
