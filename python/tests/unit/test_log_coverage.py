"""Which test stands for which report of users: every row of the project's log of them has one, or a reason.

The log ("LOG") collects what users of tensor RPC suffered from; its rows have numbers. A test that
covers a row says so, in its documentation: ``LOG row 14``. Here is the list of all, so that a test that
is renamed, or removed, takes nobody by surprise. Rust tests are named by their file in the repository,
Python tests by theirs in ``python/tests``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "python/tests"

COVERED = {
    # Hang and shutdown
    1: ["integration/test_programs.py::test_the_example_runs_unmodified"],
    2: [
        "integration/test_reports.py::test_graceful_shutdown_waits_for_work_as_long_as_it_takes",
        "integration/test_waiting.py::test_shutdown_takes_no_longer_than_it_is_told",
    ],
    6: [
        "integration/test_reports.py::test_leaving_at_any_moment_of_a_storm_crashes_nobody",
        "integration/test_exit.py::test_a_process_ends_soon_and_silently_while_functions_run_in_it",
    ],
    7: ["integration/test_reports.py::test_one_of_two_pipelines_can_be_torn_down_alone"],
    9: [
        "integration/test_rrefs.py::test_shutdown_gives_back_what_is_still_in_use",
        "integration/test_rrefs.py::test_many_references_leave_nothing_behind",
        "integration/test_programs.py::test_nothing_grows_over_many_calls",
    ],
    10: [
        "integration/test_reports.py::test_who_stays_is_told_that_the_other_has_left",
        "integration/test_lifecycle.py::test_an_agent_may_be_closed_again_and_makes_no_calls_then",
        "integration/test_exit.py::test_a_process_ends_soon_and_silently_while_functions_run_in_it",
        "integration/test_data_loaders.py::test_a_data_loader_runs_beside_an_agent",
    ],
    11: [
        "integration/test_calls.py::test_thousands_of_calls_in_flight_all_come_back",
        "integration/test_logging.py::test_the_variable_sets_the_level_and_shows_what_it_asks_for",
        "crates/tensorcall/tests/agent.rs::a_call_beyond_the_window_waits_until_another_one_ends",
    ],
    13: [
        "integration/test_reports.py::test_when_init_returns_everybody_can_be_called",
        "integration/test_rendezvous.py::test_a_worker_that_does_not_come_is_named_to_all",
    ],
    # Time-outs
    14: [
        "integration/test_reports.py::test_idle_workers_use_no_processor_and_are_awake_at_once",
        "crates/tensorcall/tests/liveness.rs::a_peer_that_answers_pings_is_alive_however_long_it_takes",
        "integration/test_stillness.py::test_a_pair_that_is_idle_for_long_is_well",
    ],
    15: [
        "integration/test_timeouts.py::test_calls_end_at_their_limit_and_late_replies_do_no_harm",
        "unit/test_rrefs.py::test_a_creation_that_takes_too_long_marks_the_reference",
    ],
    17: ["integration/test_waiting.py::test_every_future_waits_no_longer_than_it_is_told"],
    18: ["integration/test_reports.py::test_when_init_returns_everybody_can_be_called"],
    19: ["integration/test_waiting.py::test_a_time_out_says_how_far_the_call_had_come"],
    20: [
        "crates/tensorcall/tests/liveness.rs::a_worker_that_computes_for_long_is_alive",
        "integration/test_timeouts.py::test_the_default_limit_can_be_changed",
        "integration/test_stillness.py::test_a_worker_that_computes_for_long_and_holds_the_interpreter_lock_is_not_lost",
    ],
    22: [
        "crates/tensorcall/tests/liveness.rs::a_worker_that_only_receives_for_long_is_alive",
        "integration/test_tensors.py::test_a_tensor_of_more_than_two_to_the_31_bytes_arrives",
        "integration/test_stillness.py::test_a_worker_that_computes_for_long_and_holds_the_interpreter_lock_is_not_lost",
    ],
    # Errors
    23: [
        "unit/test_errors.py::test_an_exception_with_other_arguments_keeps_them_and_has_the_text_as_its_cause",
        "unit/test_errors.py::test_attributes_and_notes_survive_a_class_whose_pickle_forgets_them",
    ],
    24: [
        "unit/test_errors.py::test_a_class_that_is_unknown_here_is_replaced_by_its_nearest_known_base",
        "unit/test_errors.py::test_a_class_that_the_caller_cannot_import_still_matches_its_bases",
    ],
    25: [
        "unit/test_errors.py::test_arguments_that_cannot_be_unpickled_are_an_error_that_names_the_node",
        "unit/test_errors.py::test_a_result_that_cannot_be_pickled_is_an_error_with_the_original_text",
    ],
    26: ["unit/test_errors.py::test_an_error_that_nobody_looked_at_is_logged_once"],
    29: [
        "unit/test_errors.py::test_class_and_attributes_are_kept_and_the_text_names_the_worker",
        "unit/test_errors.py::test_the_text_tells_the_cause_too",
    ],
    32: [
        "unit/test_calls.py::test_exceptions_of_the_function_are_raised_here",
        "unit/test_rrefs.py::test_the_exception_of_the_function_is_raised_by_every_use",
    ],
    # A worker dies
    33: [
        "integration/test_loss.py::test_killing_a_worker_fails_its_calls_within_two_seconds_and_harms_nobody_else",
        "integration/test_forks.py::test_a_killed_worker_is_lost_soon_though_it_has_a_live_child",
        "integration/test_stillness.py::test_calls_to_a_stopped_worker_fail_in_time_and_name_it",
        "integration/test_networks.py::test_when_packets_get_lost_pending_calls_fail_in_time",
    ],
    35: [
        "integration/test_coroutines.py::test_a_coroutine_whose_caller_is_lost_is_cancelled",
        "crates/tensorcall/tests/liveness.rs::a_loss_ends_what_the_lost_worker_had_asked_for",
    ],
    37: [
        "crates/tensorcall/tests/liveness.rs::a_connection_that_breaks_fails_its_calls_and_the_next_call_makes_a_new_one",
        "crates/tensorcall/tests/liveness.rs::calls_the_other_way_do_not_notice_a_broken_connection",
    ],
    # Rendezvous and network
    39: [
        "crates/tensorcall/tests/liveness.rs::the_loss_of_a_worker_that_never_listened_tells_of_every_address",
        "unit/test_membership.py::test_workers_listen_where_the_others_meet",
        "integration/test_networks.py::test_hosts_meet_on_the_network_where_the_rendezvous_is",
        "integration/test_networks.py::test_a_host_that_knows_itself_as_loopback_is_reached_by_others",
        "crates/tensorcall/src/transport/host.rs::a_name_that_happens_to_be_loopback_is_listened_for_where_others_can_come",
    ],
    40: [
        "unit/test_doctor.py::test_it_says_which_rule_chose_the_address",
        "crates/tensorcall/src/transport/host.rs::an_address_goes_before_an_interface_and_that_before_the_rendezvous",
        "integration/test_networks.py::test_hosts_meet_on_the_network_where_the_rendezvous_is",
    ],
    43: ["integration/test_reports.py::test_a_process_group_and_rpc_meet_at_one_address"],
    46: ["integration/test_reports.py::test_two_dozen_workers_of_one_thread_each_meet_and_leave"],
    47: ["integration/test_membership.py::test_two_workers_of_one_name_are_told_so"],
    48: ["integration/test_membership.py::test_a_rank_beyond_the_world_is_an_error_on_every_worker"],
    49: ["crates/tensorcall/tests/liveness.rs::an_address_that_does_not_connect_is_passed_over_for_the_next"],
    50: ["crates/tensorcall/tests/liveness.rs::an_address_that_does_not_connect_is_passed_over_for_the_next"],
    52: [
        "integration/test_reports.py::test_two_dozen_workers_of_one_thread_each_meet_and_leave",
        "crates/tensorcall/tests/shutdown.rs::a_hundred_workers_in_memory_meet_call_one_of_them_and_leave_in_twenty_seconds",
        "crates/tensorcall/tests/descriptors.rs::an_agent_without_a_descriptor_for_a_connection_waits_without_noise_and_then_takes_it",
    ],
    # Devices
    53: [
        "unit/test_options.py::test_device_maps_take_numbers_names_and_devices",
        "unit/test_devices.py::test_what_is_wrong_with_maps_is_told",
    ],
    54: ["unit/test_devices.py::test_results_go_back_the_way_that_arguments_came"],
    56: [
        "unit/test_devices.py::test_what_is_wrong_with_maps_is_told",
        "unit/test_devices.py::test_a_device_without_a_place_is_refused_by_name",
    ],
    61: ["integration/test_tensors.py::test_scalars_empty_and_large_tensors_go_in_one_call"],
    # Memory
    62: ["integration/test_programs.py::test_nothing_grows_over_many_calls"],
    63: ["integration/test_reports.py::test_two_hundred_calls_at_once_run_on_the_few_threads_there_are"],
    65: ["integration/test_reports.py::test_a_large_result_is_received_into_its_final_memory"],
    # Tensors
    68: [
        "integration/test_tensors.py::test_every_layout_makes_the_round_trip",
        "integration/test_tensors.py::test_every_kind_makes_the_round_trip",
        "unit/test_pickler.py::test_sparse_tensors_are_sent_by_their_parts",
    ],
    69: [
        "integration/test_tensors.py::test_a_view_travels_without_the_storage_behind_it",
        "integration/test_reports.py::test_a_view_inside_an_object_travels_without_its_storage",
    ],
    71: ["integration/test_reports.py::test_a_view_inside_an_object_travels_without_its_storage"],
    74: ["integration/test_tensors.py::test_requires_grad_and_parameters_arrive_as_they_were"],
    76: ["integration/test_tensors.py::test_every_dtype_makes_the_round_trip_bit_by_bit"],
    # References
    77: [
        "unit/test_rrefs.py::test_without_an_agent_there_are_none",
        "unit/test_rrefs.py::test_after_shutdown_the_owner_still_has_its_value",
    ],
    79: ["integration/test_rrefs.py::test_shutdown_gives_back_what_is_still_in_use"],
    80: ["unit/test_rrefs.py::test_a_field_of_an_object_may_stay_where_it_is_until_somebody_wants_it"],
    # Distributed autograd and remote modules
    81: ["integration/test_autograd.py::test_a_call_may_last_longer_than_its_context"],
    100: [
        "unit/test_remote_module.py::test_it_travels_as_data_and_not_as_functions",
        "integration/test_remote_modules.py::test_a_module_is_an_argument_like_any_other",
    ],
    118: [
        "unit/test_remote_module.py::test_every_method_of_a_module_works_or_is_refused_by_name",
        "integration/test_remote_modules.py::test_making_a_module_and_using_it_waits_for_nothing",
    ],
    121: [
        "integration/test_training.py::test_an_example_learns",
        "parity/test_training.py::test_the_gradients_of_an_example_are_those_of_torch",
    ],
    # Threads
    85: [
        "integration/test_nesting.py::test_one_thread_each_is_enough_to_nest_fifty_deep",
        "integration/test_nesting.py::test_at_the_cap_of_threads_a_call_fails_clearly_and_later_calls_work",
    ],
    86: ["integration/test_coroutines.py::test_a_coroutine_that_waits_holds_no_thread"],
    87: ["integration/test_reports.py::test_other_threads_run_during_every_wait"],
    89: ["integration/test_reports.py::test_idle_workers_use_no_processor_and_are_awake_at_once"],
    # Pickling
    99: ["unit/test_calls.py::test_local_functions_fail_at_once_and_by_name"],
    103: [
        "crates/tensorcall-proto/tests/golden.rs::frame_of_a_small_call",
        "parity/test_received_tensors.py::test_every_use_comes_to_what_it_comes_to_with_torch",
    ],
    # Groups that change
    111: [
        "integration/test_dynamic.py::test_workers_come_one_after_the_other_and_call_each_other",
        "integration/test_dynamic.py::test_a_worker_that_left_is_unknown_and_may_come_back",
        "integration/test_dynamic.py::test_a_worker_that_was_killed_comes_back_under_its_name",
        "integration/test_rust_stores.py::test_workers_of_both_languages_come_and_go",
    ],
    112: [
        "integration/test_dynamic.py::test_members_join_after_the_first_one_has_left_or_died",
        "integration/test_dynamic.py::test_who_stops_while_joining_is_passed_over",
        "integration/test_dynamic.py::test_without_the_store_members_go_on_and_leave_and_nobody_joins",
        "integration/test_rust_stores.py::test_workers_of_both_languages_come_and_go",
    ],
    # Use
    116: [
        "unit/test_pages.py::test_a_program_of_a_page_prints_what_the_page_says",
        "integration/test_logging.py::test_a_normal_run_prints_nothing_and_passes_with_warnings_as_errors",
    ],
}

LATER = {
    8: [92, 93, 94, 95, 96, 98],
}
"""Rows that other issues bring: speed."""

NO_TEST = {
    8: "streams of GPUs: torch's own tests of them, by `cargo xtask gpu-check`",
    57: "no transport over InfiniBand is there",
    58: "as 8",
    60: "as 57",
    82: "as 8; gradients on GPUs are among those tests",
    104: "the job's secret: integration/test_strangers.py; an allow-list of functions is not there",
    105: "as 104",
    107: "as 104; encryption is not there",
    108: "fuzz targets, and their corpora as tests: fuzz/, crates/tensorcall-proto/tests/corpus.rs",
    113: "a wish: calls go to workers by name or rank, a role is not one of them",
    117: "who maintains it is no matter for a test",
    119: "a wish: methods of a remote tensor are called by `rref.rpc_sync()`, in words that are seen",
    122: "another system",
    123: "other devices",
    124: "every test runs without a GPU",
}

MENTION = re.compile(r"LOG rows? (\d+(?:(?:, | and )\d+)*)")


def path_of(test: str) -> tuple[Path, str]:
    """The file of a test, and the name of its function."""
    file, _, name = test.partition("::")
    return (ROOT if file.startswith("crates/") else TESTS) / file, name


def rows_of(test: str) -> set[int] | None:
    """The rows that a test names; nothing if there is no such test."""
    path, name = path_of(test)
    if not path.exists():
        return None
    text = path.read_text()
    if path.suffix == ".rs":
        found = re.search(rf"((?:^ *///[^\n]*\n)*)(?:^ *#\[[^\n]*\n)*^ *fn {name}\b", text, re.MULTILINE)
    else:
        found = re.search(
            rf'^(?:async )?def {name}\(.*?\).*?:\n    ("""[^"]*""")?', text, re.MULTILINE | re.DOTALL
        )
    return None if found is None else mentioned(found[1] or "")


def mentioned(text: str) -> set[int]:
    """The rows that a text names."""
    return {int(row) for found in MENTION.findall(text) for row in re.findall(r"\d+", found)}


@pytest.mark.parametrize("row", COVERED)
def test_the_tests_of_a_row_exist_and_name_it(row: int) -> None:
    for test in COVERED[row]:
        named = rows_of(test)
        assert named is not None, f"there is no test {test}"
        assert row in named, f"{test} does not name row {row}"


def test_every_mention_of_a_row_is_in_the_list() -> None:
    listed: dict[Path, set[int]] = defaultdict(set)
    for row, tests in COVERED.items():
        for test in tests:
            listed[path_of(test)[0]].add(row)
    files = [
        *TESTS.rglob("test_*.py"),
        *ROOT.glob("crates/*/tests/**/*.rs"),
        *ROOT.glob("crates/*/src/**/*.rs"),
    ]

    missing = {
        str(file.relative_to(ROOT)): sorted(rows)
        for file in files
        if file != Path(__file__) and (rows := mentioned(file.read_text()) - listed[file])
    }

    assert missing == {}


def test_no_row_has_two_fates() -> None:
    later = [row for rows in LATER.values() for row in rows]

    assert len(later) == len(set(later))
    assert not set(later) & set(COVERED)
    assert not set(NO_TEST) & (set(later) | set(COVERED))
