"""Exact match and token F1 of short answers, with the normalisation of SQuAD.

Source: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), evaluation script
v1.1. Deviation: `f1_score` of two answers that are both empty after normalisation is 1, as in SQuAD 2.0.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower the case, drop ASCII punctuation and English articles, and squeeze white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truth: str) -> bool:
    """Whether both are equal after normalisation."""
    return normalize_answer(answer) == normalize_answer(truth)


def f1_score(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall over the multisets of normalised tokens, in `[0, 1]`."""
    given, wanted = normalize_answer(answer).split(), normalize_answer(truth).split()
    if not given or not wanted:
        return float(given == wanted)
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted))
