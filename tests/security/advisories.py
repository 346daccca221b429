"""Published holes of servers like this one, by class, and the tests that show ours does not have them.

Each test attacks, sees the right refusal, and most ask for something ordinary right after.
"""

from __future__ import annotations

from dataclasses import dataclass

E2E, UNIT, HERE = "tests/e2e", "tests/unit", "tests/security"


@dataclass(frozen=True, slots=True)
class Advisory:
    """A class of holes: where it was found, what went wrong there, and the node ids of our tests."""

    found: tuple[str, ...]
    cause: str
    tests: tuple[str, ...]


def _row(found: str, cause: str, *tests: str) -> Advisory:
    return Advisory(tuple(found.split()), cause, tests)


REQUESTS = (
    _row(
        "CVE-2024-8768",
        "an empty prompt ends the server",
        f"{HERE}/test_clients.py::test_a_prompt_of_nothing_is_refused_alone_and_among_others",
    ),
    _row(
        "CVE-2024-8939",
        "best_of takes everything",
        f"{HERE}/test_bombs.py::test_lists_and_numbers",
    ),
    _row(
        "CVE-2026-34756 GHSA-3mwp-wvh9-7528",
        "n choices are made on the event loop until memory is gone",
        f"{HERE}/test_bombs.py::test_no_number_of_choices_takes_memory",
    ),
    _row(
        "CVE-2026-5497",
        "a list fans out into requests without a limit",
        f"{HERE}/test_bombs.py::test_lists_and_numbers",
        f"{E2E}/test_errors.py::test_what_no_queue_could_hold_is_400",
    ),
    _row(
        "CVE-2026-44223 GHSA-83vm-p52w-f9pw",
        "a penalty beside drafts ends the engine",
        f"{E2E}/test_every_field.py::test_it_shows_and_speculation_changes_nothing",
    ),
    _row(
        "vllm#50021",
        "no accepted draft becomes an index of -1",
        f"{E2E}/test_drafter_faults.py::test_absurd_answers",
        "tests/property/test_verification_match.py::test_any_drafts_leave_the_text_as_it_is",
    ),
    _row(
        "CVE-2026-44222 GHSA-hpv8-x276-m59f",
        "text that spells special tokens is taken for structure and breaks it",
        f"{UNIT}/text/test_tokenizer.py::test_text_that_spells_a_special_token_becomes_it",
        f"{HERE}/test_bombs.py::test_texts",
    ),
    _row(
        "CVE-2025-62426 GHSA-69j4-grxj-j64p CVE-2025-61620",
        "a request brings its own template, or arguments for it",
        f"{UNIT}/server/api/test_protocol.py::test_chat_knows_the_field",
        f"{E2E}/test_every_field.py::test_what_is_out_of_bounds_is_400_and_named",
        f"{HERE}/test_clients.py::test_an_error_gives_nothing_of_the_inside_away",
    ),
    _row(
        "CVE-2025-62164 GHSA-mrw7-hf4f-83pf CVE-2025-62372",
        "embeddings in a request are unpickled, or have a wrong shape",
        f"{E2E}/test_every_field.py::test_what_is_out_of_bounds_is_400_and_named",
        f"{HERE}/test_supply.py::test_nothing_turns_bytes_into_code",
    ),
    _row(
        "CVE-2025-48942 CVE-2025-48943 CVE-2025-48944 GHSA-vrq3-r879-7m65",
        "a bad schema, expression or tool ends a worker",
        f"{E2E}/test_structured_output.py::test_bad_sources_are_400_and_leave_nothing",
        f"{E2E}/test_tools.py::test_what_is_refused_is_named",
    ),
    _row(
        "CVE-2025-32381 CVE-2025-57809 llama.cpp#26600 llama.cpp#25283 llama.cpp#18988",
        "grammars are kept without a limit, or nested until the stack ends",
        f"{UNIT}/text/test_source_limits.py::test_bombs_cost_little_to_compile_and_to_follow",
        f"{UNIT}/text/test_source_limits.py::test_grammars_are_compiled_once_and_the_oldest_are_forgotten",
        f"{HERE}/test_bombs.py::test_forms",
        f"{HERE}/test_bombs_slow.py::test_ten_thousand_schemas_leave_no_more_memory_than_a_few",
    ),
    _row(
        "CVE-2025-48887 CVE-2025-46560",
        "an expression backtracks, or text is replaced in quadratic time",
        f"{UNIT}/text/test_stop_strings.py::test_the_worst_text_costs_time_linear_in_its_length",
        f"{UNIT}/text/test_tool_formats.py::test_nothing_a_model_writes_raises_or_depends_on_its_split",
        f"{HERE}/test_supply.py::test_expressions_over_texts_of_clients_do_not_backtrack",
    ),
    _row(
        "tiktoken#195 tokenizers#1449 transformers#28629 harmony#79",
        "one long word takes quadratic time, on the event loop",
        f"{UNIT}/text/test_tokenizer.py::test_one_long_word_does_not_take_quadratic_time",
        f"{UNIT}/text/test_tokenizer.py::test_other_threads_run_while_a_long_text_is_encoded",
        f"{HERE}/test_bombs.py::test_texts",
    ),
    _row(
        "vllm#24910",
        "a body of megabytes is parsed on the event loop",
        f"{HERE}/test_bombs.py::test_lists_and_numbers",
        f"{HERE}/test_bombs_slow.py::test_health_answers_in_time_while_bombs_fall",
    ),
    _row(
        "CVE-2026-21869",
        "a negative number becomes an index",
        f"{E2E}/test_every_field.py::test_what_is_out_of_bounds_is_400_and_named",
        f"{UNIT}/server/api/test_protocol.py::test_any_value_in_any_field_is_taken_or_refused",
    ),
    _row(
        "vllm#16529 vllm#54195 vllm#55164 vllm#4529 vllm#55750",
        "a value out of bounds reaches the step and ends the engine",
        f"{E2E}/test_every_field.py::test_what_is_out_of_bounds_is_400_and_named",
        f"{E2E}/test_openapi.py::test_nothing_that_follows_it_or_nearly_makes_a_fault",
    ),
    _row(
        "GHSA-7rxv-5jhh-j6xx",
        "the size of a prompt overflows",
        f"{E2E}/test_errors.py::test_a_body_over_the_cap_is_413",
        f"{E2E}/test_real_loop.py::test_a_prompt_too_long_for_the_engine_is_refused_before_it_is_read",
    ),
    _row(
        "CVE-2026-9540",
        "what a failed request holds is never given back",
        f"{E2E}/test_real_loop.py::test_clients_that_leave_at_any_moment_leave_nothing_behind",
        f"{E2E}/test_structured_output.py::test_bad_sources_are_400_and_leave_nothing",
    ),
    _row(
        "CVE-2026-22778",
        "an error's text tells an address in memory",
        f"{HERE}/test_clients.py::test_an_error_gives_nothing_of_the_inside_away",
        f"{UNIT}/server/http/test_shapes.py::test_what_nobody_foresaw_is_logged_and_not_told",
    ),
    _row(
        "vllm#15041",
        "the same request id twice ends the engine",
        f"{E2E}/test_endpoints.py::test_the_same_request_id_twice_is_two_requests",
    ),
)

HTTP = (
    _row(
        "CVE-2026-48746 GHSA-94f4-hr76-p5j6 CVE-2026-48710",
        "who may ask is decided on a path made from the Host header",
        f"{E2E}/test_hostile_peers.py::test_no_spelling_of_a_path_or_host_does_without_the_key",
        f"{E2E}/test_endpoints.py::test_the_host_header_opens_no_path",
    ),
    _row(
        "CVE-2025-59425 GHSA-wr9h-g72x-mwhm",
        "keys are compared letter by letter",
        f"{UNIT}/server/http/test_shapes.py::test_keys_are_compared_in_constant_time_as_digests",
        f"{HERE}/test_clients.py::test_keys_that_are_no_ascii_are_wrong_and_no_fault",
    ),
    _row(
        "vllm-security-guide",
        "a key guards only some paths",
        f"{E2E}/test_endpoints.py::test_keys_guard_all_but_the_open_paths",
        f"{E2E}/test_requests.py::test_only_the_key_that_made_a_request_may_touch_it",
    ),
    _row(
        "CVE-2025-48956 GHSA-rxc4-3w6r-4v47",
        "headers of any size are kept",
        f"{E2E}/test_hostile_peers.py::test_a_flood_ends_in_4xx_and_leaves_no_memory_behind",
        f"{E2E}/test_errors.py::test_headers_over_the_cap_are_431",
    ),
    _row(
        "CVE-2025-43859",
        "a request can be read in two ways",
        f"{E2E}/test_hostile_peers.py::test_what_can_be_read_in_two_ways_or_in_none_is_4xx_and_the_end",
    ),
    _row(
        "CVE-2020-7694 CVE-2020-7695",
        "a client writes lines into the log, or headers into a reply",
        f"{E2E}/test_log_secrecy.py::test_no_client_can_write_a_line",
        f"{E2E}/test_endpoints.py::test_a_request_id_is_kept_if_it_is_short_and_plain",
    ),
    _row(
        "CVE-2023-30798 CVE-2024-24762 CVE-2024-47874 CVE-2025-54121 CVE-2026-24486 CVE-2026-40347",
        "forms are parsed in memory, by expressions, without bounds",
        f"{E2E}/test_errors.py::test_what_does_not_call_itself_json_is_415",
        f"{HERE}/test_clients.py::test_no_route_has_its_form_parsed_for_it",
        f"{HERE}/test_clients.py::test_there_is_no_route_that_takes_models_or_other_forms_than_uploads",
    ),
    _row(
        "CVE-2025-62727 CVE-2023-29159",
        "files are served: ranges, paths that lead out",
        f"{HERE}/test_clients.py::test_there_is_no_route_that_takes_models_or_other_forms_than_uploads",
    ),
    _row(
        "CVE-2024-27454 CVE-2025-67221 CVE-2020-10735",
        "nesting or digits without an end",
        f"{HERE}/test_bombs.py::test_lists_and_numbers",
        f"{E2E}/test_errors.py::test_what_is_not_json_is_400",
    ),
    _row(
        "CVE-2024-28224",
        "a name that points to this machine by now lets another site read what is served here",
        f"{HERE}/test_sites.py::test_a_server_on_loopback_answers_no_name_that_could_be_rebound",
        f"{HERE}/test_sites.py::test_nothing_is_given_to_a_page_that_only_reads",
    ),
    _row(
        "CVE-2021-32677",
        "a page of another site changes something by a request that no browser asks about",
        f"{HERE}/test_sites.py::test_a_page_of_another_origin_changes_nothing",
        f"{HERE}/test_sites.py::test_no_post_that_a_page_may_send_unasked_is_served",
    ),
    _row(
        "prometheus-labels",
        "a client's text becomes a label, each a series for ever",
        f"{E2E}/test_endpoints.py::test_strangers_add_no_series",
    ),
)

SUPPLY = (
    _row(
        "CVE-2024-11041 CVE-2025-30165 CVE-2025-32444 CVE-2025-47277 CVE-2025-30202 "
        "CVE-2026-3059 CVE-2026-3060 CVE-2026-3989 CVE-2026-7301",
        "pickles are read from sockets that anybody can reach",
        f"{HERE}/test_supply.py::test_nothing_turns_bytes_into_code",
        f"{HERE}/test_supply.py::test_a_server_has_one_listener_and_asks_nobody_anything",
    ),
    _row(
        "CVE-2026-5760 VU#915947",
        "a model's chat template runs as code, or for ever",
        f"{UNIT}/text/test_template_sandbox.py::test_nothing_gets_out",
        f"{UNIT}/text/test_template_sandbox.py::test_a_bomb_is_stopped",
        f"{UNIT}/text/test_chat_template.py::test_a_hostile_template_stops_the_start",
        f"{UNIT}/text/test_chat_template.py::test_messages_are_data_and_never_template_code",
    ),
    _row(
        "CVE-2025-24357 CVE-2025-32434 CVE-2026-24747 CVE-2024-3568 CVE-2026-1839",
        "weights are pickles",
        f"{UNIT}/compute/loading/test_loader_files.py::test_pickled_weights_are_refused",
        f"{HERE}/test_supply.py::test_nothing_turns_bytes_into_code",
        f"{HERE}/test_clients.py::test_versions_with_known_holes_are_not_taken",
    ),
    _row(
        "CVE-2025-66448 CVE-2026-22807 GHSA-2pc9-4j83-qjmr CVE-2026-27893 GHSA-7972-pg2x-xr59 CVE-2026-4372",
        "code beside the weights runs although nobody trusts it",
        f"{UNIT}/compute/loading/test_loader_files.py::test_code_beside_a_known_architecture_is_never_looked_at",
        f"{HERE}/test_hostile_models.py::test_a_hostile_model_is_one_line_and_exit_code_2",
        f"{HERE}/test_clients.py::test_versions_with_known_holes_are_not_taken",
    ),
    _row(
        "CVE-2026-0599 CVE-2026-33626 CVE-2025-6242",
        "the server fetches what a client names",
        f"{HERE}/test_supply.py::test_a_server_has_one_listener_and_asks_nobody_anything",
        f"{HERE}/test_clients.py::test_an_error_gives_nothing_of_the_inside_away",
    ),
    _row(
        "CVE-2024-37032 CVE-2024-45436 CVE-2025-44779 CVE-2026-7020 CVE-2026-7482",
        "models are uploaded, or a damaged one ends the server",
        f"{HERE}/test_clients.py::test_there_is_no_route_that_takes_models_or_other_forms_than_uploads",
        f"{HERE}/test_hostile_models.py::test_a_hostile_model_is_one_line_and_exit_code_2",
        f"{UNIT}/compute/loading/test_source_gguf.py::test_a_number_that_lies_is_refused_in_one_line",
    ),
    _row(
        "CVE-2025-25183 GHSA-rm76-4mrf-v9r8 CVE-2025-46570 vllm#16016 vllm#17045",
        "another's cached prefix is hit by a planned collision, or seen by its time",
        f"{UNIT}/plan/kv/test_prefix_cache.py::test_a_block_is_named_by_its_parent_and_its_tokens",
        f"{UNIT}/plan/kv/test_prefix_cache.py::test_a_salt_separates",
        f"{HERE}/test_clients.py::test_nobody_learns_from_the_cache_what_was_asked_under_another_salt",
        f"{HERE}/test_clients.py::test_a_tenant_finds_only_its_own_prefixes_unless_they_are_shared",
    ),
    _row(
        "CVE-2026-3108",
        "what is drafted for one request shows in another",
        f"{HERE}/test_clients.py::test_two_tenants_with_the_same_prefix_get_what_each_gets_alone",
        "tests/integration/test_speculation.py::test_text_is_the_same_whoever_drafts",
    ),
    _row(
        "secrets",
        "keys and texts in logs, error texts and pages",
        f"{E2E}/test_log_secrecy.py::test_keys_are_shown_nowhere",
        f"{E2E}/test_log_secrecy.py::test_no_text_of_a_prompt_or_a_reply_is_logged",
        f"{E2E}/test_tokens.py::test_nothing_about_keys_is_told",
    ),
)

ADVISORIES = (*REQUESTS, *HTTP, *SUPPLY)
