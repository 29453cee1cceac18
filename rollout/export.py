"""Data sets from a run folder: token rows for RL (`jsonl`, `parquet`), texts for `sft` and preference `pairs`.

The journal is the truth; every export can be made again from it. Free-form content is stored as JSON strings, so that
no row can change a column's type, and Parquet files have one explicit schema, so that all shards can be read together.
NaN is never written: what is unknown is null.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import orjson

from agentgym.errors import BadInput, UnknownName
from agentgym.rollout import dialogues
from agentgym.rollout.tree import Tree
from agentgym.rollout.views import Branch, Forest, Row

if TYPE_CHECKING:
    import pyarrow

Record: TypeAlias = dict[str, Any]
OVERLONG = ("drop", "truncate")
BATCH_ROWS, BATCH_TOKENS = 1024, 1 << 20
"""Rows and tokens that are held at most before they are written."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is exported, and the counts of what is not.

    Attributes:
        run: name of the run.
        max_tokens: longest row in tokens, prompt included; `None` for no limit.
        overlong: what happens to longer ones: `drop`, or `truncate` after the last sampled token that fits.
        counts: what happened: `rows`, `leaves`, `failed` ...
    """

    run: str
    max_tokens: int | None = None
    overlong: str = "drop"
    counts: Counter[str] = field(default_factory=Counter)

    def fits(self, tokens: int) -> bool:
        """Whether a row of that many tokens is short enough."""
        return self.max_tokens is None or tokens <= self.max_tokens


def export(
    folder: str | Path,
    format: str,
    out: str | Path,
    *,
    max_tokens: int | None = None,
    overlong: str = "drop",
) -> dict[str, int]:
    """Write a data set and return counts.

    | format | one row for |
    |---|---|
    | `jsonl` | each row of each leaf (a leaf has one, and one more for each reset of its context), see `schema` |
    | `parquet` | the same |
    | `sft` | each successful leaf: `messages` and `tools` |
    | `pairs` | each pair of a successful and an unsuccessful continuation of one node: `prompt`, `chosen`, `rejected` |

    Failed attempts are in no row. The file appears whole or not at all.

    Args:
        folder: the run folder.
        format: `jsonl`, `parquet`, `sft` or `pairs`.
        out: the file to write. It is replaced.
        max_tokens: longest row in tokens, prompt included; `None` for no limit.
        overlong: what happens to longer rows: `drop` or (`jsonl` and `parquet` only) `truncate`.

    Returns:
        `rows` (written), `leaves`, `failed` (attempts), `empty` (rows without a sampled token, not written),
        `overlong_dropped`, `overlong_truncated`; for `sft` and `pairs` also `unsuccessful` leaves.

    Raises:
        UnknownName: an unknown format or policy for long rows.
        BadInput: no run folder, no texts in it where they are needed, a bad limit, an `out` that is a folder.
        JournalError: the journal is damaged.
    """
    if format not in FORMATS:
        raise UnknownName.of("format", format, FORMATS)
    if overlong not in OVERLONG:
        raise UnknownName.of("policy for overlong rows", overlong, OVERLONG)
    if max_tokens is not None and max_tokens < 1:
        raise BadInput(f"max_tokens must be >= 1, got {max_tokens}")
    rows, write = FORMATS[format]
    if overlong == "truncate" and rows is not token_rows:
        raise BadInput(f"the format {format!r} cannot truncate, only drop: a conversation has no half turns")
    target = Path(out)
    if target.is_dir():
        raise BadInput(f"{target} is a folder; name a file")
    forest = Forest.load(folder)
    chosen = Selection(Path(folder).resolve().name, max_tokens, overlong)
    chosen.counts.update({"rows": 0, "leaves": forest.n_leaves, "failed": forest.n_failed})
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(draft, _batches(rows(forest, chosen), chosen))
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return dict(chosen.counts)


def token_rows(forest: Forest, chosen: Selection) -> Iterator[Record]:
    """Yield one record for each row of each leaf, with the columns of `schema`."""
    for key in ("empty", "overlong_dropped", "overlong_truncated"):
        chosen.counts[key] += 0
    for tree in forest.trees:
        # Numbers in path order do not depend on what finished first.
        numbers = np.zeros(tree.n_nodes, np.int32)
        for number, node in enumerate(tree.walk()):
            numbers[node] = number
        for leaf in tree.leaves:
            branch = Branch(tree, leaf)
            for index, row in enumerate(branch.rows):
                kept = _cut(row, chosen)
                if kept is not None:
                    yield _record(chosen.run, branch, index, kept, numbers)


def schema() -> pyarrow.Schema:
    """The columns of `jsonl` and `parquet`.

    `response_mask` is 1 on sampled tokens; `logprobs` is 0 and `versions` -1 elsewhere. `node_ids` number the turns of
    a tree in path order, 0 being the root. `reward` is null for a leaf without outcome. `reward_terms` and `sampling`
    (one object for each distinct set of parameters on the path) are JSON strings.
    """
    import pyarrow as pa

    texts = [(name, pa.string()) for name in ("run", "group", "task", "level")]
    numbers = [("step", pa.int32()), ("tree", pa.int32())]
    tokens = [
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("node_ids", pa.list_(pa.int32())),
    ]
    outcome = [
        ("reward", pa.float64()),
        ("reward_terms", pa.string()),
        ("success", pa.bool_()),
        ("stop_reason", pa.string()),
        ("propensity", pa.float64()),
        ("n_turns", pa.int32()),
        ("sampling", pa.string()),
    ]
    place = [("leaf", pa.string()), ("row", pa.int32()), ("rows", pa.int32())]
    return pa.schema([*texts, *numbers, *place, *tokens, *outcome])


def _cut(row: Row, chosen: Selection) -> Row | None:
    """Apply the limits to a row; `None` drops it."""
    if not row.n_sampled:
        chosen.counts["empty"] += 1
        return None
    if chosen.max_tokens is None or chosen.fits(row.n_total):
        return row
    sampled = np.flatnonzero(row.sampled_mask[: chosen.max_tokens])
    if chosen.overlong == "drop" or not len(sampled):
        chosen.counts["overlong_dropped"] += 1
        return None
    chosen.counts["overlong_truncated"] += 1
    return row.head(int(sampled[-1]) + 1)


def _record(run: str, branch: Branch, index: int, row: Row, numbers: np.ndarray[Any, np.dtype[np.int32]]) -> Record:
    tree, start = branch.tree, row.n_prompt
    return {
        "run": run,
        "group": tree.group,
        "task": tree.task_id,
        "level": tree.level,
        "step": tree.step,
        "tree": tree.index,
        "leaf": tree.path_key(branch.leaf),
        "row": index,
        "rows": len(branch.rows),
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "response_mask": row.sampled_mask[start:].astype(np.int8),
        "logprobs": row.logprobs[start:],
        "versions": row.versions[start:],
        "node_ids": numbers[row.node_ids[start:]],
        "reward": branch.reward,
        "reward_terms": _json(branch.reward_terms),
        "success": branch.success,
        "stop_reason": str(branch.stop),
        "propensity": tree.propensity[branch.leaf],
        "n_turns": branch.n_turns,
        "sampling": _json(_samplings(tree, branch)),
    }


def _samplings(tree: Tree, branch: Branch) -> list[Any]:
    used = dict.fromkeys(tree.sampling[node] for node in branch.nodes[1:])
    return [tree.samplings[index] for index in used]


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _batches(records: Iterator[Record], chosen: Selection) -> Iterator[list[Record]]:
    """Group records so that neither rows nor tokens in memory exceed a bound by more than one row."""
    batch: list[Record] = []
    tokens = 0
    for record in records:
        chosen.counts["rows"] += 1
        batch.append(record)
        tokens += len(record.get("prompt_ids", ())) + len(record.get("response_ids", ()))
        if len(batch) >= BATCH_ROWS or tokens >= BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _write_jsonl(path: Path, batches: Iterator[list[Record]]) -> None:
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    with path.open("wb") as file:
        for batch in batches:
            file.write(b"".join([orjson.dumps(record, option=option) for record in batch]))


def _write_parquet(path: Path, batches: Iterator[list[Record]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns = schema()
    with parquet.ParquetWriter(path, columns) as writer:
        for batch in batches:
            writer.write_table(pa.Table.from_pylist(batch, schema=columns))


Rows: TypeAlias = Callable[[Forest, Selection], Iterator[Record]]
Writer: TypeAlias = Callable[[Path, Iterator[list[Record]]], None]
FORMATS: dict[str, tuple[Rows, Writer]] = {
    "jsonl": (token_rows, _write_jsonl),
    "parquet": (token_rows, _write_parquet),
    "sft": (dialogues.sft_rows, _write_jsonl),
    "pairs": (dialogues.pair_rows, _write_jsonl),
}
