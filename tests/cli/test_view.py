"""The HTML page of a run: its data are those of the trees, and nothing in them can become markup."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import agentgym as ag
from agentgym.rollout import viewer
from agentgym.rollout.policies.scripted import ScriptedPolicy
from agentgym.rollout.renderers.bytes import BytesRenderer
from agentgym.rollout.types import Status
from agentgym.rollout.views import Forest

HOSTILE = "</script><script>document.title = 'owned'</script><!-- <img src=x onerror=alert(1)> & \u2028 <b>"


class Page(HTMLParser):
    """Collects elements, attributes and the content of scripts and styles, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.contents: list[tuple[str, str]] = []
        self.within: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag in ("script", "style"):
            self.within = tag
            self.contents.append((tag, ""))

    def handle_endtag(self, tag):
        self.within = None

    def handle_data(self, data):
        if self.within:
            tag, before = self.contents[-1]
            self.contents[-1] = (tag, before + data)

    @property
    def data(self):
        return json.loads(self.contents[1][1])


class Parrot(ag.ToolEnv):
    """Repeats what it is told, and is hostile."""

    tasks = ag.TaskSet.from_rows({"train": [{}] * 4})
    instructions = f"System {HOSTILE}"
    calls = "inline"

    def begin(self, task, rng):
        self.state = 0
        return f"Begin {HOSTILE}"

    @ag.tool
    def repeat(self, text: str) -> str:
        """Repeat a text.

        Args:
            text: the text.
        """
        self.state += 1
        if self.state == 3:
            self.finish()
        return text

    def judge(self):
        return ag.Outcome(success=bool(self.np_random.integers(2)), reward={HOSTILE: 1.0})


@pytest.fixture
def hostile_run():
    """A run folder whose every free text is hostile."""

    def say(situation):
        return f"I say {HOSTILE}" if situation.turn == 1 else ag.call("repeat", text=HOSTILE)

    renderer = BytesRenderer()
    ag.register("test/Parrot-v0", Parrot)
    try:
        policy = ScriptedPolicy(say, renderer, logprob=-0.25)
        ag.rollout(
            "test/Parrot-v0",
            policy=policy,
            renderer=renderer,
            allocator="random-tree",
            tasks=3,
            budget=18,
            max_tokens=2000,
            out="hostile",
        )
    finally:
        ag.registry.registry.pop("test/Parrot-v0")
    return "hostile"


@pytest.fixture
def page(cli, hostile_run):
    done = cli("view", hostile_run)
    assert (done.code, done.out, done.err) == (0, "hostile/view.html\n", "")
    return Path("hostile/view.html").read_text(encoding="utf-8")


def test_the_data_are_those_of_the_trees(page, hostile_run):
    data, forest = Page(page).data, Forest.load(hostile_run)
    assert data["run"] == "hostile"
    assert data["config"] == forest.manifest["config"]
    assert data["summary"]["leaves"] == forest.n_leaves == 18
    assert len(data["trees"]) == len(forest.trees) == 3
    for shown, tree in zip(data["trees"], forest.trees, strict=True):
        order = list(tree.walk(failed=True))
        assert (shown["group"], shown["task"], shown["level"]) == (tree.group, tree.task_id, tree.level)
        assert shown["messages"] == tree.messages
        assert shown["tools"] == ["repeat"]
        assert len(shown["nodes"]) == tree.n_nodes
        for entry, node in zip(shown["nodes"], order, strict=True):
            assert entry["path"] == tree.path_key(node)
            assert entry["ids"] == tree.sampled_ids(node).tolist()
            assert entry["reply"] == tree.reply_ids(node).tolist()
            assert np.array_equal(np.array(entry["lp"], np.float32), tree.logprobs(node))
            assert entry.get("text", "") == tree.text(node)
            assert entry.get("answer", []) == tree.replies(node)
            assert entry.get("reward", 0.0) == tree.reward[node]
            assert entry.get("terms") == tree.reward_terms.get(node)
            assert (entry.get("stop"), entry["success"]) == (tree.stop[node], tree.success[node])
            assert (entry["status"] == "leaf") == tree.is_leaf(node)
            if node:
                assert order[entry["parent"]] == tree.parent[node]
                assert order[entry["origin"]] == tree.origin[node]
                assert entry["parent"] < order.index(node)


def test_every_token_has_its_piece(page):
    data, renderer = Page(page).data, BytesRenderer()
    used = {token for tree in data["trees"] for node in tree["nodes"] for token in node["ids"] + node["reply"]}
    assert {int(token): piece for token, piece in data["pieces"].items()} == {t: renderer.decode_piece(t) for t in used}


def test_hostile_content_is_inert(page):
    found = Page(page)
    assert HOSTILE in json.dumps(found.data, ensure_ascii=False)
    assert [tag for tag, _ in found.contents] == ["style", "script", "script"]
    assert not {"img", "b", "iframe", "link"} & set(found.tags)
    assert page.count("</script>") == 2
    assert "<!--" not in page
    assert not {"\u2028", "\u2029"} & set(page)
    assert not {"src", "href", "onerror", "onclick"} & {name for name, _ in found.attributes}


def test_hostile_pieces_and_names_are_inert():
    class Renderer(BytesRenderer):
        def decode_piece(self, token_id):
            return HOSTILE

    tree = ag.rollout(
        "agentgym/Countdown-v0", policy="scripted", tasks=1, budget=1, allocator_options={"n": 1}, max_tokens=8
    )
    found = Page(viewer.page({**viewer.data(tree, HOSTILE, Renderer()), "config": {HOSTILE: HOSTILE}}))
    assert [tag for tag, _ in found.contents] == ["style", "script", "script"]
    assert found.data["run"] == HOSTILE
    assert set(found.data["pieces"].values()) == {HOSTILE}


def test_the_policy_of_the_page_allows_its_own_script_and_no_network(page):
    found = Page(page)
    [policy] = [value for _, value in found.attributes if value and value.startswith("default-src")]
    sources = dict(part.split(" ", 1) for part in policy.split("; "))
    (_, style), _, (_, script) = found.contents
    for name, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert sources.pop(name) == f"'sha256-{digest}'"
    assert sources == {"default-src": "'none'"}


def test_failed_attempts_are_shown(cli, scripted, fragile):
    cli("rollout", fragile(1), *scripted, "--tasks", 4, "--budget", 4, "-o", "n=1", "--retries", 1, "--out", "x")
    assert cli("view", "x", "--out", "pages/x.html").out == "pages/x.html\n"
    nodes = Page(Path("pages/x.html").read_text()).data["trees"][0]["nodes"]
    assert [node["status"] for node in nodes] == [Status.OPEN, Status.FAILED, Status.FAILED]
    assert nodes[1]["failure"] == "env_error"
    assert "the button fell off" in nodes[1]["error"]


def test_open_starts_the_browser(cli, hostile_run, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli("view", hostile_run, "--open").code == 0
    assert opened == [Path("hostile/view.html").resolve().as_uri()]


def test_out_that_is_a_folder_is_refused(cli, hostile_run):
    Path("taken").mkdir()
    done = cli("view", hostile_run, "--out", "taken")
    assert done.code == 2
    assert done.err == "error: cannot write taken: Is a directory\n"
    assert not list(Path().glob(".*.tmp"))


@pytest.mark.parametrize(
    "manifest",
    [{}, {"renderer": {"name": "other"}}, {"renderer": {"name": "qwen3"}, "config": {"policy": "gone/model"}}],
    ids=["none", "unknown", "model folder is gone"],
)
def test_without_a_renderer_only_ids_are_shown(manifest):
    assert viewer.renderer_of(manifest) is None
    forest = ag.rollout("agentgym/Countdown-v0", policy="scripted", tasks=1, budget=8, max_tokens=8)
    assert viewer.data(forest, "x", None)["pieces"] == {}


def test_a_thousand_leaves_make_a_page(cli, scripted):
    done = cli(
        *("rollout", "agentgym/Countdown-v0", *scripted, "--tasks", 2, "--budget", 1000, "-o", "n=500", "--out", "big")
    )
    assert done.code == 0
    assert cli("view", "big").code == 0
    data = Page(Path("big/view.html").read_text()).data
    assert data["summary"]["leaves"] == 1000


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_the_tree(page, tmp_path):
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    target = Path("hostile/view.html").resolve().as_uri()
    dom = subprocess.run(
        ["chromium", *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"{target}#1/0.0"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    ).stdout
    found = Page(dom)
    assert found.tags.count("title") == 1
    assert "<title>hostile · agentgym</title>" in dom
    assert "owned" not in dom.partition("</head>")[0]
    assert not {"img", "iframe"} & set(found.tags)
    assert ("aria-selected", "true") in found.attributes
    data = found.data["trees"][1]["nodes"]
    assert [value for name, value in found.attributes if name == "class"].count("node") == len(data)
    assert "Turn 0.0" in dom
