"""The corpus of SearchQA: invented entities, typed relations, short documents, and a BM25 index over them.

Everything is generated from one fixed seed, once per process and only when first needed, and never changes
afterwards: it is shared by all envs and is no part of any snapshot. All words come from a closed vocabulary
(`names`, `relations`, `plain_words`), so that a small model can have one token for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from agentgym import seeding
from agentgym.seeding import Rng

# kind of entity -> relation -> kind of its value. A relation belongs to one kind and has one value per entity.
SCHEMA: Mapping[str, Mapping[str, str]] = {
    "person": {"mentor": "person", "birthplace": "city", "employer": "company", "debut": "book"},
    "city": {"mayor": "person", "river": "river", "sponsor": "company"},
    "company": {"founder": "person", "seat": "city", "bestseller": "book"},
    "book": {"author": "person", "publisher": "company", "setting": "city"},
    "river": {"explorer": "person", "source": "city", "tributary": "river"},
}
_PER_KIND = 120
# Facts that no question asks for.
_TRAITS: Mapping[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "white"),
    "weather": ("mild", "cold", "windy", "dry"),
    "music": ("loud", "slow", "solemn", "merry"),
    "food": ("bread", "fish", "soup", "honey"),
    "season": ("spring", "summer", "autumn", "winter"),
    "animal": ("horse", "goose", "otter", "hare"),
}
# Kinds of documents that talk about a relation and do not know its value.
_RUMOURS = ("letters", "gossip")
_STOP = frozenset({"is", "not", "named", "of", "people", "ask", "for"})
_WORD = re.compile(r"[a-z]+")
_SEED = 20_240


@dataclass(frozen=True, slots=True)
class Document:
    """A document.

    Attributes:
        entity: the entity that it is about.
        title: the entity, then the relations or traits that it states.
        text: sentences of the form `ENTITY RELATION is VALUE.`
        facts: relation -> value for the relations (not the traits) that it states.
    """

    entity: str
    title: str
    text: str
    facts: Mapping[str, str]


class Corpus:
    """Entities, facts, documents, and the search over them. Immutable; get the shared one from `corpus`."""

    def __init__(self) -> None:
        self.kinds = {name: tuple(SCHEMA)[i // _PER_KIND] for i, name in enumerate(names())}
        self.facts = _make_facts(self.kinds, seeding.rng(_SEED, "facts"))

    @cached_property
    def documents(self) -> tuple[Document, ...]:
        """All documents; a document's number is its position."""
        rng = seeding.rng(_SEED, "documents")
        return tuple(document for entity in self.facts for document in _documents(entity, self.facts[entity], rng))

    @cached_property
    def home(self) -> Mapping[tuple[str, str], int]:
        """(entity, relation) -> number of the one document that states the value."""
        return {(d.entity, relation): number for number, d in enumerate(self.documents) for relation in d.facts}

    def terms(self, query: str) -> list[str]:
        """Return the different indexed words of a query as they are spelt in the corpus, in order."""
        known = self._spelling
        return list(dict.fromkeys(known[word] for word in _WORD.findall(query.lower()) if word in known))

    def search(self, terms: Sequence[str], count: int) -> list[int]:
        """Return the numbers of the best `count` documents (fewer when fewer match), best first.

        BM25 (Lucene variant, k1 1.5, b 0.75) of title and text. Scores are compared to four decimals and ties
        go to the lower number, so that the order is the same on every machine.

        Args:
            terms: words as `terms` returns them.
            count: most results.
        """
        if not terms:
            return []
        scores = np.round(self._index.get_scores(list(terms)), 4)
        matching = np.flatnonzero(scores > 0)
        best = np.argsort(-scores[matching], kind="stable")[:count]
        return [int(number) for number in matching[best]]

    @cached_property
    def _spelling(self) -> Mapping[str, str]:
        return {term.lower(): term for document in self.documents for term in _indexed(document)}

    @cached_property
    def _index(self) -> Any:
        import bm25s

        index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, backend="numpy")
        index.index([_indexed(document) for document in self.documents], show_progress=False)
        return index


@cache
def corpus() -> Corpus:
    """Return the corpus shared by all envs of this process."""
    return Corpus()


@cache
def names() -> tuple[str, ...]:
    """Return the names of all entities: six letters each, so that none is a part of another."""
    rng = seeding.rng(_SEED, "names")
    taken: dict[str, None] = {}
    parts = ("BDFGKLMNPRSTVZ", "aeiou", "lmnrs", "bdgkmptvz", "aeiou", "knrsx")
    while len(taken) < _PER_KIND * len(SCHEMA):
        name = "".join(letters[rng.integers(len(letters))] for letters in parts)
        if not any(word in name.lower() for word in relations()):
            taken[name] = None
    return tuple(taken)


@cache
def relations() -> tuple[str, ...]:
    """Return the names of all relations."""
    return tuple(relation for values in SCHEMA.values() for relation in values)


@cache
def plain_words() -> tuple[str, ...]:
    """Return every other word of the documents."""
    traits = [word for trait, values in _TRAITS.items() for word in (trait, *values)]
    return (*traits, *_RUMOURS, *sorted(_STOP), "People")


def _make_facts(kinds: Mapping[str, str], rng: Rng) -> dict[str, dict[str, str]]:
    members = {kind: [name for name in kinds if kinds[name] == kind] for kind in SCHEMA}

    def value(entity: str, kind: str) -> str:
        others = [name for name in members[kind] if name != entity]
        return others[rng.integers(len(others))]

    return {entity: {rel: value(entity, to) for rel, to in SCHEMA[kind].items()} for entity, kind in kinds.items()}


def _documents(entity: str, facts: Mapping[str, str], rng: Rng) -> Iterator[Document]:
    """Yield six documents about an entity: two that state relations, two traits, two rumours, in random order."""
    order = [list(facts)[i] for i in rng.permutation(len(facts))]
    traits = [list(_TRAITS)[i] for i in rng.permutation(len(_TRAITS))]
    filler = traits.pop()
    made = [
        _statement(entity, order[:2], facts, rng),
        _statement(entity, order[2:] if len(order) > 3 else [*order[2:], filler], facts, rng),
        _statement(entity, traits[:2], facts, rng),
        _statement(entity, traits[2:4], facts, rng),
        *(_rumour(entity, kind, list(facts), rng) for kind in _RUMOURS),
    ]
    yield from (made[i] for i in rng.permutation(len(made)))


def _statement(entity: str, topics: Sequence[str], facts: Mapping[str, str], rng: Rng) -> Document:
    values = {topic: facts.get(topic) or _TRAITS[topic][rng.integers(len(_TRAITS[topic]))] for topic in topics}
    text = " ".join(f"{entity} {topic} is {value}." for topic, value in values.items())
    stated = {topic: value for topic, value in values.items() if topic in facts}
    return Document(entity, " ".join([entity, *topics]), text, stated)


def _rumour(entity: str, kind: str, topics: Sequence[str], rng: Rng) -> Document:
    """Make a document that names one relation of the entity often and does not state its value."""
    topic = topics[int(rng.integers(len(topics)))]
    text = f"People ask for {entity} {topic}. {entity} {topic} is not named."
    return Document(entity, f"{entity} {kind}", text, {})


def _indexed(document: Document) -> list[str]:
    words = re.findall(r"[A-Za-z]+", f"{document.title} {document.text}")
    return [word for word in words if word.lower() not in _STOP]
