# ruff: noqa: E501  (names of tests are as long as what they say)
"""Faults that users of other toolkits reported: a named test for each that this code could have.

Rows are those of the two lists of complaints, `c` for the first and `p` for the second, by number. A row is tested
here, or in the file that `COVERED` names, or it belongs to code that `LATER` names by its issue.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import lab
import orjson
import pytest

import agentgym as ag
from agentgym.env import Outcome
from agentgym.rollout import api, journal, report
from agentgym.rollout.allocators import allocator_names, describe
from agentgym.rollout.config import RunConfig
from agentgym.rollout.policies.base import FinishReason
from agentgym.rollout.renderers.bytes import BytesRenderer
from agentgym.rollout.types import Failure, StopReason

TESTS = Path(__file__).resolve().parents[1]

COVERED = {
    "c1-verl-3960-reencoded": "rollout/test_episode.py::test_sampled_ids_are_kept_even_where_their_text_would_encode_differently",
    "c4-verl-6854-dropped-thinking": "rollout/test_episode.py::test_where_the_template_changes_earlier_turns_each_row_is_what_the_engine_saw",
    "c5-verl-6501-separator": "renderers/test_chatml.py::test_complaint_5_separator_after_the_stop_token_is_rendered",
    "c6-verl-6500-illegal-probes": "renderers/test_qwen3.py::test_prompt_equals_the_chat_template",
    "c7-slime-2263-parallel-results": "renderers/test_chatml.py::test_complaint_7_parallel_results_share_one_user_turn",
    "c9-transformers-29279-forged-turns": "renderers/test_qwen3.py::test_complaint_9_control_tokens_in_observations_stay_text",
    "c10-prime-rl-1315-third-turn": "rollout/test_tree.py::test_complaint_10_the_prefix_is_the_whole_path",
    "c11-prime-rl-2634-longest-prefix": "policies/test_kv_cache.py::test_finds_the_longest_inserted_prefix",
    "c14-trl-5144-alignment": "rollout/test_tree.py::test_complaint_14_columns_of_different_length_are_refused",
    "c15-RAGEN-71-inverted-mask": "rollout/test_views.py::test_complaint_15_the_mask_is_on_what_was_sampled",
    "c16-SkyRL-710-scaffold-mask": "rollout/test_views.py::test_complaint_16_the_scaffold_is_not_trained_and_complaint_17_the_end_token_is",
    "c17-RAGEN-59-end-token": "renderers/test_chatml.py::test_complaints_16_17_mask_arithmetic",
    "c20-OpenRLHF-1252-lengths": "rollout/test_views.py::test_complaint_20_three_lengths_are_three_numbers",
    "c26-verl-6476-empty-response": "rollout/test_export.py::test_complaint_26_no_row_without_a_sampled_token",
    "c28-rllm-776-singleton": "rollout/test_report.py::test_complaint_28_groups_without_signal_are_counted",
    "c30-NeMo-RL-3882-identity": "rollout/test_export.py::test_complaint_30_groups_go_by_identity_not_by_prompt",
    "c33-verl-6348-near-constant": "rollout/test_report.py::test_complaint_33_equal_float32_rewards_are_equal",
    "c35-ms-swift-8123-nan-reward": "rollout/test_episode.py::test_whatever_an_env_does_its_siblings_finish",
    "c40-AReaL-1661-edges": "rollout/test_views.py::test_complaint_40_a_reward_reaches_its_own_branch_only",
    "c48-verl-tool-86-no-room": "rollout/test_episode.py::test_complaint_48_no_request_is_sent_when_the_context_is_full",
    "c49-verl-4918-units": "core/test_complaints_core.py::test_complaints_49_output_caps_name_their_unit_and_mark_the_cut",
    "c51-trl-4159-tempered": "policies/test_sampler.py::test_draws_follow_the_exact_distribution",
    "c57-verl-3126-one-seed": "rollout/test_determinism.py::test_concurrency_and_completion_order_change_nothing",
    "c59-labs-molt-124-versions": "rollout/test_views.py::test_complaint_59_versions_are_those_of_each_turn",
    "c62-SkyRL-1986-siblings-finish": "rollout/test_episode.py::test_complaint_62_one_rollout_fails_and_seven_are_complete",
    "c65-xtuner-1945-empty-is-empty": "rollout/test_export.py::test_complaint_65_nothing_scored_is_an_empty_file",
    "c68-hive-4948-deadlines": "rollout/test_episode.py::test_complaint_68_a_turn_that_hangs_is_a_timeout_and_its_slot_is_free_again",
    "c70-localharness-77-half-a-call": "rollout/test_episode.py::test_complaint_70_a_truncated_message_calls_no_tool",
    "c71-GenericAgent-746-arguments": "core/test_complaints_core.py::test_complaints_71_bad_arguments_get_one_bounded_reply_and_run_nothing",
    "c73-oumi-2571-sync-in-async": "rollout/test_hosts.py::test_complaint_73_each_way_of_calling_runs_under_eight_concurrent_rollouts",
    "c74-ray-31421-linear": "rollout/test_tree.py::test_complaint_74_bytes_grow_linearly_with_turns",
    "c75-gym-1638-time-limit": "rollout/test_episode.py::test_complaint_75_a_time_limit_wrapper_ends_episodes_and_is_restored_with_them",
    "c78-WhitzardOS-6-siblings": "rollout/test_episode.py::test_a_continuation_sees_its_own_path_and_nothing_of_its_siblings",
    "c79-open-range-205-coverage": "core/test_complaints_core.py::test_complaints_79_a_snapshot_never_approximates",
    "c84-arrow-11967-null-column": "rollout/test_export.py::test_complaint_84_an_all_null_column_can_be_read_with_another_shard",
    "p1-verl-6719-merges": "renderers/test_qwen3.py::test_complaint_1_sampled_tokens_that_would_merge_are_kept",
    "p2-verl-6501-newline": "renderers/test_qwen3.py::test_growing_by_reply_equals_rendering_anew",
    "p4-verl-3948-system-prompt": "renderers/test_qwen3.py::test_prompt_equals_the_renderers_library",
    "p5-agent-lightning-326-logprobs": "rollout/test_episode.py::test_whatever_an_engine_does_is_a_failed_attempt",
    "p9-verifiers-562-double-encoded": "core/test_complaints_core.py::test_peers_9_double_encoded_arguments_are_recovered",
    "p10-verifiers-1763-malformed": "core/test_complaints_core.py::test_peers_10_malformed_json_is_the_calls_result",
    "p11-miles-2689-no-object": "core/test_complaints_core.py::test_peers_11_arguments_that_are_no_object_are_a_tool_error_and_the_other_calls_run",
    "p12-verifiers-275-schemas": "core/test_complaints_core.py::test_peers_12_schemas_from_hints",
    "p14-verifiers-2041-order": "core/test_complaints_core.py::test_peers_14_calls_of_one_turn_run_in_order",
    "p16-verifiers-unknown-tool": "core/test_complaints_core.py::test_peers_16_unknown_tool_lists_valid_ones",
    "p18-OpenEnv-1102-seed": "core/test_complaints_core.py::test_peers_18_equal_seeds_give_equal_episodes",
    "p19-TextArena-99-seed": "core/test_complaints_core.py::test_peers_19_the_choice_of_the_word_is_seeded",
    "p20-GEM-global-generators": "core/test_complaints_core.py::test_peers_20_the_generator_is_private_and_part_of_the_snapshot",
    "p21-GEM-zero": "core/test_complaints_core.py::test_peers_21_zero_is_a_value_and_a_step_after_the_end_raises",
    "p23-DeepEyes-118-one-reason": "rollout/test_episode.py::test_of_limits_that_are_reached_together_the_first_of_the_list_is_the_reason",
    "p25-inspect-2605-hard-deadline": "rollout/test_hosts.py::test_complaint_25_a_call_past_its_deadline_is_abandoned_and_its_env_closed_once_it_returns",
    "p27-UniRL-214-no-trajectory": "core/test_complaints_core.py::test_peers_27_an_infrastructure_failure_is_no_episode_end",
    "p29-verl-3525-tool-rewards": "core/test_complaints_core.py::test_peers_29_rewards_of_tools_reach_the_result",
    "p31-NeMo-Gym-2363-retry": "rollout/test_episode.py::test_peer_31_a_fault_that_passes_is_retried_in_a_fresh_env",
    "p33-verifiers-579-resume": "rollout/test_resume.py::test_peer_33_a_run_cut_at_any_byte_is_completed_as_if_it_had_not_been",
    "p34-verifiers-1376-torn-tail": "rollout/test_journal.py::test_peer_34_a_torn_tail_is_repaired_before_the_next_append",
    "p36-verifiers-547-mixed-columns": "rollout/test_export.py::test_peer_36_free_form_content_is_a_json_string",
    "p38-nan-on-disk": "rollout/test_export.py::test_peer_38_unknown_is_null_and_nan_is_never_written",
    "p39-verifiers-1964-sft": "rollout/test_export.py::test_peer_39_sft_rows_keep_messages_and_tools",
    "p41-slime-1450-overlong": "rollout/test_export.py::test_peer_41_overlong_rows_are_dropped_or_truncated_and_counted",
    "p46-agent-lightning-438-memory": "rollout/test_runner.py::test_peer_46_memory_does_not_grow_with_the_number_of_runs",
    "p49-ares-53-mid-episode": "core/test_complaints_core.py::test_peers_49_snapshots_in_the_middle_of_an_episode",
    "p53-OpenRLHF-1270-no-variance": "rollout/test_report.py::test_peer_53_unscored_members_are_in_no_statistic",
    "p56-OpenEnv-274-docs-run": "docs/test_docs.py::test_every_block_runs",
}  # fmt: skip

LATER = {
    3: ["p26-rocketride-1920", "p43-OpenEnv-1005", "p44-SkyRL-1194", "p48-GEM-unsandboxed", "p50-e2b-3424"],
    5: [
        "c21-trl-4976",
        "c31-miles-2378",
        "c34-std",
        "c41-TreeRL-2",
        "c42-verl-7561",
        "c43-verl-593",
        "c44-trl-3021",
        "c46-padding",
        "c53-trl-4772",
        "c58-SkyRL-1315",
        "c64-tinker-497",
        "p52-AReaL-1666",
    ],
    6: ["c45-rllm-506"],
    7: ["c2-sglang-26555", "c3-vllm-22587", "c52-trl-6789", "c54-vllm-42019", "c61-NeMo-RL-3590"],
}
"""Number of the issue -> rows that concern its code."""

ROWS = {
    "c": "1 2 3 4 5 6 7 9 10 11 12 14 15 16 17 19 20 21 23 26 28 29 30 31 33 34 35 38 40 41 42 43 44 45 46 48 49 51 52 53 "
    "54 56 57 58 59 61 62 63 64 65 67 68 70 71 73 74 75 78 79 80 83 84",
    "p": "1 2 4 5 6 9 10 11 12 14 16 18 19 20 21 23 25 26 27 29 31 32 33 34 36 38 39 41 43 44 46 48 49 50 51 52 53 56",
}
"""All rows of both lists."""


@pytest.mark.parametrize(("row", "where"), COVERED.items(), ids=COVERED)
def test_a_row_that_is_tested_elsewhere_is_tested_there(row, where):
    path, _, name = where.partition("::")
    assert re.search(rf"^def {name}\(", (TESTS / path).read_text(), re.MULTILINE), f"{row}: no {where}"


def test_every_row_of_both_lists_is_somewhere_and_only_once():
    here = re.findall(r"^def test_([cp]\d+)_", Path(__file__).read_text(), re.MULTILINE)
    elsewhere = [row.partition("-")[0] for row in [*COVERED, *(row for rows in LATER.values() for row in rows)]]
    wanted = [f"{part}{number}" for part, numbers in ROWS.items() for number in numbers.split()]
    assert sorted(here + elsewhere) == sorted(wanted)


# --- rows that are tested here ------------------------------------------------------------------------------------


class Four(lab.Chatter):
    tasks = lab.lengths(4)


@pytest.mark.parametrize(("thinking", "rows"), [("none", 1), ("empty", 1), ("full", 4)])
def test_c12_trl_6250_rows_of_a_rollout(thinking, rows):
    """Append-only where the template allows it: one row; else one row for each prompt that was rendered anew."""

    class Asks(Four):
        def respond(self, message):
            super().respond(message)
            return "go on"

    policy = lab.Around(renderer=BytesRenderer(thinking=thinking))
    forest = lab.run(Asks, policy=policy, tasks=1, budget=8)
    assert [len(leaf.rows) for leaf in forest.leaves] == [rows] * 8


@pytest.mark.parametrize("stop_id", BytesRenderer().stop_ids)
def test_c19_SkyRL_1319_any_stop_token_is_an_end(stop_id):
    """`<|im_end|>` and `<|endoftext|>` both end a message: it is not truncated, and its call is executed."""

    async def say(count, prompt_ids, sampling):
        text = ag.messages.format_message(ag.call("say", number=7))
        return lab.completion([*BytesRenderer().message(text)[:-1], stop_id])

    leaf = next(lab.run(Four, policy=lab.Around(say), tasks=1, budget=8).leaves)
    assert leaf.stop is StopReason.TERMINATED
    assert all(leaf.tree.finish[node] is FinishReason.STOP for node in leaf.nodes[1:])
    assert "<|" not in leaf.tree.text(leaf.leaf)


def test_c23_slime_1440_a_retry_keeps_nothing_of_the_failed_attempt():
    class Once(Four):
        failing = True

        def hook(self, turn):
            if turn == 2 and type(self).failing:
                type(self).failing = False
                raise ConnectionError

    policy = lab.Around()
    (leaf,) = lab.run(Once, policy=policy, tasks=1, budget=1, allocator_options={"n": 1}).leaves
    tree = leaf.tree
    (failed,) = tree.failed
    retried = leaf.nodes[2]
    assert (tree.attempt[failed], tree.attempt[retried]) == (0, 1)
    assert tree.sampled_ids(failed).tolist() != tree.sampled_ids(retried).tolist()
    assert policy.prompts[1] == policy.prompts[2] == tree.context(leaf.nodes[1])
    assert len(leaf.token_ids) == len(leaf.logprobs) == len(leaf.sampled_mask)
    assert leaf.n_sampled == sum(tree.n_sampled[node] for node in leaf.nodes)


def test_c29_rllm_776_repeats_of_one_task_are_one_group():
    (tree,) = lab.run(Four, tasks=1, budget=4, allocator_options={"n": 4}).trees
    assert len(tree.leaves) == 4
    assert tree.group == "0.0"


def test_c38_trl_3857_groups_without_signal_are_reported():
    class Lost(Four):
        def judge(self):
            return Outcome(False)

    summary = report.summarise(lab.run(Lost))
    assert summary["zero_advantage_groups"] == summary["trees"] == 4
    assert summary["effective_ratio"] == 0


def test_c56_vllm_3333_siblings_have_their_own_seeds_and_the_same_ones_again():
    def seeds(concurrency):
        asked = []

        def script(situation):
            asked.append(situation.seed)
            return lab.talk(situation)

        lab.run(Four, policy=lab.Around(lab.dawdle, script=script), allocator="random-tree", concurrency=concurrency)
        return asked

    first, again = seeds(1), seeds(64)
    assert len(set(first)) == len(first)
    assert first != again
    assert sorted(first) == sorted(again)


class Lossy(Four):
    """One of the eight rollouts of each task fails for ever."""

    def hook(self, turn):
        if self.state["deep"]["thrown"][0] % 7 == 0:
            raise ConnectionError("lost")


def test_c63_verl_6437_a_shortfall_is_visible():
    forest = lab.run(Lossy, allow_failed=1.0)
    summary = report.summarise(forest)
    assert summary["leaves"] < 32
    assert summary["failures"] == {"env_error": 3 * (32 - summary["leaves"])}


def test_p32_NeMo_RL_2305_no_results_is_an_error():
    class Nothing(Four):
        def hook(self, turn):
            raise ConnectionError("worker lost")

    with pytest.raises(ag.errors.SystemicFailure, match=r"rollouts failed: .* x env_error: ConnectionError: worker"):
        lab.run(Nothing)


def test_c67_verl_a_scorer_that_takes_too_long_is_no_score():
    class Slow(Four):
        calls = "thread"

        def judge(self):
            if self.state["deep"]["thrown"][0] % 2:
                time.sleep(0.5)
            return Outcome(True)

    forest = lab.run(Slow, tasks=1, budget=8, env_deadline=0.1, retries=0)
    assert set(lab.kinds(forest)) == {Failure.ENV_TIMEOUT}
    assert forest.n_failed + forest.n_leaves == 8
    assert [leaf.reward for leaf in forest.leaves] == [1.0] * forest.n_leaves
    assert report.summarise(forest)["success"] == 1.0


def test_c80_trl_6067_the_first_observation_is_in_the_prompt_whichever_front_end_runs_it():
    env_id = lab.name(Four)
    keys = {"policy": "scripted", "tasks": 2, "budget": 16, "max_tokens": 400}
    prompts = [
        [tree.prompt_ids.tolist() for tree in forest.trees]
        for forest in (ag.rollout(env_id, **keys), api.rollout(RunConfig(env=env_id, **keys)), lab.run(Four, tasks=2))
    ]
    assert prompts[0] == prompts[1] == prompts[2]
    assert b"Talk for 4 turns." in bytes(token for token in prompts[0][0] if token < 256)


@pytest.mark.parametrize("name", allocator_names())
def test_c83_ARPO_30_an_allocator_says_what_it_implements_and_where_it_differs(name):
    facts = describe(name)
    assert "arXiv" in facts["source"]
    assert facts["equations"]


def test_p6_agent_lightning_44_a_rollout_without_a_message_has_no_reward():
    """No token was sampled: it is a failure and neither a 0 nor a row."""

    async def silent(count, prompt_ids, sampling):
        return lab.completion([]) if count < 3 else None

    forest = lab.run(Four, policy=lab.Around(silent), concurrency=1)
    assert lab.kinds(forest) == [Failure.POLICY_ERROR] * 3
    assert forest.n_leaves == 31
    assert all(leaf.reward is not None and leaf.n_sampled for leaf in forest.leaves)


def test_p51_ms_swift_6634_a_branch_that_ends_early_gives_its_share_to_others():
    class Mixed(lab.Chatter):
        tasks = lab.lengths(1, 6)

    trace = {"tasks": 2, "budget": 24, "allocator": "trace", "allocator_options": {"predictor": "constant"}}
    assert lab.run(Mixed, **trace).n_leaves == 24


def test_the_shortfall_is_stated_where_nothing_can_be_continued(tmp_path):
    class Short(lab.Chatter):
        tasks = lab.lengths(1)

    keys = {"tasks": 2, "budget": 24, "allocator": "trace", "allocator_options": {"predictor": "constant"}}
    forest = lab.run(Short, out=tmp_path / "run", **keys)
    assert forest.n_leaves == 8
    last = orjson.loads((tmp_path / "run" / journal.FILE).read_bytes().splitlines()[-1])
    assert last["leaves"] == 8
    assert forest.manifest["config"]["budget"] == 24
