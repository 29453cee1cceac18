"""SearchQA: questions over linked entities, answered by searching and reading documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentgym.env import CallMode, Outcome
from agentgym.envs._corpus import corpus
from agentgym.envs._qa_metrics import exact_match, f1_score
from agentgym.envs._restate import restate
from agentgym.errors import EpisodeOver, ToolError
from agentgym.messages import ChatMessage, Message, call
from agentgym.seeding import Rng
from agentgym.tasks import Task, TaskSet
from agentgym.tool_env import ToolEnv
from agentgym.tools import tool

HOPS: Mapping[str, int] = {"h1": 1, "h2": 2, "h3": 3, "h4": 4, "h5": 5}
MIX: Mapping[str, float] = {"h1": 0.1, "h2": 0.2, "h3": 0.3, "h4": 0.2, "h5": 0.2}
RESULTS = 4
SUCCESS_F1 = 0.3
_F1_WEIGHT = _HOPS_WEIGHT = 0.1
_MAX_QUERY_CHARS = 200
_SHOWN_TERMS = 8


@dataclass(slots=True)
class SearchState:
    """What changes during an episode.

    Attributes:
        terms: the indexed words of the last search.
        results: document numbers of the last search, best first.
        entities: the question's entity and those named by documents read so far, in order, without repeats.
        hops: indices of the question's hops whose fact has been read.
        answer: the given answer.
    """

    terms: tuple[str, ...]
    results: tuple[int, ...]
    entities: tuple[str, ...]
    hops: frozenset[int]
    answer: str | None = None


def make_task(rng: Rng, level: str) -> dict[str, Any]:
    """Draw a question: a chain of different relations along different entities.

    Args:
        rng: the only source of randomness.
        level: `h1` to `h5`, the number of hops.

    Returns:
        `question`, `relations` (innermost first), `start`, `path` (start and every value, hops + 1 names) and
        `answer` (the last of `path`).
    """
    while True:
        path, chain = _walk(rng, HOPS[level])
        if len(chain) == HOPS[level]:
            break
    question = " ".join([*(f"{relation} of" for relation in reversed(chain)), path[0], "?"])
    return {"question": question, "relations": chain, "start": path[0], "path": path, "answer": path[-1]}


def _walk(rng: Rng, hops: int) -> tuple[list[str], list[str]]:
    """Follow random unused relations to new entities, for `hops` hops or to a dead end; return entities, relations."""
    world = corpus().facts
    entities = tuple(world)
    path, chain = [entities[rng.integers(len(entities))]], list[str]()
    for _ in range(hops):
        options = [(r, value) for r, value in world[path[-1]].items() if r not in chain and value not in path]
        if not options:
            break
        relation, value = options[rng.integers(len(options))]
        chain.append(relation)
        path.append(value)
    return path, chain


class SearchQA(ToolEnv):
    """Answer a question such as `mayor of birthplace of author of Kelvox ?` by search and reading.

    A search shows the titles of the best four documents; reading one of them shows its facts. Each hop needs a
    search and a read, so `h` hops take `2h + 1` turns when each turn is right; the limit is `3h + 2`.

    Success: exact match, or token F1 of at least 0.3, after SQuAD normalisation. Reward: 1 for success, plus
    0.1 times F1, plus 0.1 times the share of the hops whose fact was read.
    """

    tasks: ClassVar[TaskSet] = TaskSet.generated(
        make_task, sizes={"train": 8000, "validation": 1000, "test": 1000}, mix=MIX
    )
    instructions: ClassVar[str] = "Answer the question with one name. Search for facts, read results, then answer."
    calls: ClassVar[CallMode] = "inline"
    state: SearchState

    def turn_limit(self, task: Task) -> int:
        """Return `3h + 2` for a question of `h` hops."""
        return 3 * len(task.data["relations"]) + 2

    def begin(self, task: Task, rng: Rng) -> str:
        """Return the question."""
        self.state = SearchState((), (), (task.data["start"],), frozenset())
        return self._status()

    def respond(self, message: Message) -> str | Sequence[ChatMessage]:
        """Execute the calls; while the episode goes on, the last reply ends with the question and the last search."""
        reply = super().respond(message)
        return reply if self.state.answer is not None else restate(reply, self._status())

    def judge(self) -> Outcome:
        """Compare the answer, if one was given, with the truth."""
        data = self._data
        answer = self.state.answer
        f1 = 0.0 if answer is None else f1_score(answer, data["answer"])
        success = answer is not None and (f1 >= SUCCESS_F1 or exact_match(answer, data["answer"]))
        share = len(self.state.hops) / len(data["relations"])
        return Outcome(success, {"success": float(success), "f1": _F1_WEIGHT * f1, "hops": _HOPS_WEIGHT * share})

    @tool
    def search(self, query: str) -> str:
        """Search documents.

        Args:
            query: a name and a relation
        """
        if len(query) > _MAX_QUERY_CHARS:
            raise ToolError(f"the query has {len(query)} characters; the limit is {_MAX_QUERY_CHARS}.")
        terms = corpus().terms(query)
        if not terms:
            raise ToolError("no document has any word of this query. Use a name and a relation.")
        self.state.terms = tuple(terms[:_SHOWN_TERMS])
        self.state.results = tuple(corpus().search(terms, RESULTS))
        documents = corpus().documents
        return "\n".join(f"{rank} {documents[n].title}" for rank, n in enumerate(self.state.results, 1))

    @tool
    def read(self, result: int) -> str:
        """Read a result of the last search.

        Args:
            result: its number
        """
        results = self.state.results
        if not results:
            raise ToolError("there is no result to read. Search first.")
        if not 1 <= result <= len(results):
            raise ToolError(f"there is no such result. Valid: 1 to {len(results)}.")
        document = corpus().documents[results[result - 1]]
        path, chain = self._data["path"], self._data["relations"]
        found = {i for i, relation in enumerate(chain) if document.entity == path[i] and relation in document.facts}
        self.state.hops |= found
        self.state.entities = tuple(dict.fromkeys([*self.state.entities, document.entity, *document.facts.values()]))
        return document.text

    @tool
    def answer(self, text: str) -> str:
        """Answer the question.

        Args:
            text: a name
        """
        self.state.answer = text
        self.finish()
        return "Answered."

    def expert(self, rng: Rng) -> Message:
        """Return the next step of the shortest way from here: search or read for the first unread hop, or answer."""
        path, chain = self._data["path"], self._data["relations"]
        hop = next((i for i in range(len(chain)) if i not in self.state.hops), None)
        if hop is None:
            return call("answer", text=path[-1])
        wanted = corpus().home[path[hop], chain[hop]]
        if wanted in self.state.results:
            return call("read", result=self.state.results.index(wanted) + 1)
        return call("search", query=f"{path[hop]} {chain[hop]}")

    def random_valid(self, rng: Rng) -> Message:
        """Return a call of a tool drawn uniformly from those that make sense now, with uniform arguments.

        `search` takes a known entity (the question's, or one named by a document read) and a relation of the
        question; `read` takes any result, once there are some; `answer` takes a known entity other than the
        question's, once there is one.
        """
        chain = self._data["relations"]
        state = self.state
        tools = ["search"] + ["read"] * bool(state.results) + ["answer"] * (len(state.entities) > 1)
        name = tools[rng.integers(len(tools))]
        if name == "read":
            return call("read", result=int(rng.integers(len(state.results))) + 1)
        if name == "answer":
            return call("answer", text=state.entities[1 + rng.integers(len(state.entities) - 1)])
        entity = state.entities[rng.integers(len(state.entities))]
        return call("search", query=f"{entity} {chain[rng.integers(len(chain))]}")

    @property
    def _data(self) -> Mapping[str, Any]:
        if self.task is None or self._episode is None:
            raise EpisodeOver("no episode is running: call reset first")
        return self.task.data

    def _status(self) -> str:
        return f"Question: {self._data['question']}\nLast search: {' '.join(self.state.terms) or 'none'}"
