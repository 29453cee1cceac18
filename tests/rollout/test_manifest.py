"""The manifest: what is written, when a folder may be used, what may change on resume."""

from __future__ import annotations

import json

import pytest

from agentgym.errors import BadInput, ConfigMismatch, JournalError
from agentgym.rollout import journal, manifest

CONFIG = {"env": "agentgym/X-v0", "seed": 0, "concurrency": 8, "limits": {"max_context": 100, "stops": ("a", "b")}}


def build(policy=None, tasks="abc", **config):
    return manifest.build(
        CONFIG | config,
        env_id="agentgym/X-v0",
        task_digest=tasks,
        policy=policy or {"name": "scripted", "device": "cpu"},
        renderer={"name": "chatml"},
    )


def test_a_new_run_makes_its_folder(tmp_path):
    folder = tmp_path / "runs" / "a"
    manifest.open_run(folder, build())
    assert [path.name for path in folder.iterdir()] == [manifest.FILE]
    read = manifest.read(folder)
    assert read["format"] == manifest.FORMAT
    assert read["config"]["limits"] == {"max_context": 100, "stops": ["a", "b"]}
    assert set(read["versions"]) == {"agentgym", "python", "numpy", "gymnasium"}
    assert set(read) == {"format", "created", "config", "env", "policy", "renderer", "versions"}


def test_an_empty_folder_is_used(tmp_path):
    manifest.open_run(tmp_path, build())
    manifest.open_run(tmp_path, build(), resume=True)


@pytest.mark.parametrize("name", [manifest.FILE, journal.FILE])
def test_a_folder_with_a_run_is_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(BadInput, match="--resume, or choose another folder"):
        manifest.open_run(tmp_path, build())
    assert (tmp_path / name).read_text() == "{}"


def test_resume_needs_a_manifest(tmp_path):
    with pytest.raises(BadInput, match="is no run folder"):
        manifest.open_run(tmp_path / "none", build(), resume=True)
    assert not (tmp_path / "none").exists()


def test_resume_names_every_differing_key_with_both_values(tmp_path):
    manifest.open_run(tmp_path, build())
    changed = build(seed=1, limits={"max_context": 50, "stops": ["a", "b"]}, extra=True)
    with pytest.raises(ConfigMismatch) as caught:
        manifest.open_run(tmp_path, changed, resume=True)
    message = str(caught.value)
    assert "config.seed: 0 in the folder, 1 now" in message
    assert "config.limits.max_context: 100 in the folder, 50 now" in message
    assert "config.extra: '(absent)' in the folder, True now" in message
    assert "stops" not in message


@pytest.mark.parametrize("change", [{"policy": {"name": "scripted", "digest": "x"}}, {"tasks": "other"}])
def test_resume_refuses_another_model_and_other_tasks(tmp_path, change):
    manifest.open_run(tmp_path, build(policy={"name": "scripted", "digest": "y"}))
    with pytest.raises(ConfigMismatch, match=r"policy\.digest|env\.tasks"):
        manifest.open_run(tmp_path, build(**{"policy": {"name": "scripted", "digest": "y"}, **change}), resume=True)


@pytest.mark.parametrize("change", [{"concurrency": 64}, {"env_deadline": 5.0}, {"policy": {"name": "scripted"}}])
def test_what_may_change_on_resume(tmp_path, change):
    manifest.open_run(tmp_path, build())
    manifest.open_run(tmp_path, build(**change), resume=True)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", JournalError, "not valid JSON"),
        ("[]", BadInput, "not the manifest"),
        ('{"format": 999}', BadInput, "format 999"),
    ],
)
def test_a_manifest_that_cannot_be_read(tmp_path, text, error, message):
    (tmp_path / manifest.FILE).write_text(text)
    with pytest.raises(error, match=message):
        manifest.read(tmp_path)


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write the run folder"):
        manifest.open_run(tmp_path / "file" / "run", build())


def test_writing_is_atomic(tmp_path, monkeypatch):
    manifest.write(tmp_path, build())
    before = (tmp_path / manifest.FILE).read_text()

    def torn(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", torn)
    with pytest.raises(OSError, match="No space"):
        manifest.write(tmp_path, build(seed=5))
    assert (tmp_path / manifest.FILE).read_text() == before
    assert json.loads(before)["config"]["seed"] == 0
