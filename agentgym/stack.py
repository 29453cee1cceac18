"""`snapshot`, `restore` and `fork` of a whole wrapper stack.

An env made by `gymnasium.make` may be wrapped (`TimeLimit`, a user's own wrappers), and wrappers have state: a
step counter, a running mean, a last observation. These functions capture all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium

from agentgym.env import Env, Snapshot
from agentgym.errors import SnapshotError, UnsupportedSnapshot

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]
_NOT_STATE = frozenset({"env", "_action_space", "_observation_space", "_metadata", "_cached_spec", "_saved_kwargs"})


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """A snapshot of an env and of every wrapper around it, outermost first."""

    layers: tuple[tuple[str, dict[str, Any]], ...]
    core: Snapshot

    @property
    def turn(self) -> int:
        """Number of steps taken in the episode."""
        return self.core.turn


def snapshot(env: AnyEnv) -> StackSnapshot:
    """Capture `env` and its wrappers.

    Raises:
        UnsupportedSnapshot: the innermost env is not an `agentgym.Env`, or a wrapper's attribute cannot be copied.
    """
    layers = tuple((_name(wrapper), _copied(wrapper)) for wrapper in _wrappers(env))
    return StackSnapshot(layers, _core(env).snapshot())


def restore(env: AnyEnv, saved: StackSnapshot, *, reseed: int | None = None) -> None:
    """Put `env` and its wrappers back to `saved`. Raises `SnapshotError` when the stacks differ."""
    wrappers = list(_wrappers(env))
    have, want = [_name(w) for w in wrappers], [name for name, _ in saved.layers]
    if have != want:
        raise SnapshotError(f"the snapshot has the wrappers {want or 'none'}, this env has {have or 'none'}")
    for wrapper, (_, state) in zip(wrappers, saved.layers, strict=True):
        for key in vars(wrapper).keys() - _NOT_STATE - state.keys():
            delattr(wrapper, key)
        vars(wrapper).update(copy.deepcopy(state))
    _core(env).restore(saved.core, reseed=reseed)


def fork(env: AnyEnv, count: int) -> list[AnyEnv]:
    """Return `count` independent copies of the stack in the same state."""
    here = snapshot(env)
    children = [_rebuild(env) for _ in range(count)]
    for child in children:
        restore(child, here)
    return children


def _rebuild(env: AnyEnv) -> AnyEnv:
    """Copy the wrappers around a fresh core env."""
    if not isinstance(env, gymnasium.Wrapper):
        core = _core(env)
        return core._twin()
    twin = copy.copy(env)
    twin.env = _rebuild(env.env)
    return twin


def _wrappers(env: AnyEnv) -> Iterator[gymnasium.Wrapper[Any, Any, Any, Any]]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def _core(env: AnyEnv) -> Env:
    core = env.unwrapped
    if not isinstance(core, Env):
        raise UnsupportedSnapshot(f"{type(core).__name__} is not an agentgym.Env, so it cannot be snapshotted")
    return core


def _copied(wrapper: gymnasium.Wrapper[Any, Any, Any, Any]) -> dict[str, Any]:
    state = {key: value for key, value in vars(wrapper).items() if key not in _NOT_STATE}
    try:
        return copy.deepcopy(state)
    except (TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedSnapshot(f"the wrapper {_name(wrapper)} has state that cannot be copied: {error}") from error


def _name(wrapper: object) -> str:
    return f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
