"""PyTorch's own tests: a selection, one of every kind. All of them: `python -m tests.collectives.suite`."""

from __future__ import annotations

import pytest

from tests.collectives.ranks import program
from tests.collectives.suite import EXCEPTIONS

_SOME = [
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_product",
    "test_all_reduce_sum_async",
    "test_all_to_all_full_group",
    "test_all_to_all_single_unequal_split_complex",
    "test_barrier",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather_checks",
    "test_get_future",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo_subgroup",
    "test_reduce_full_group_max",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


# The engine across hosts has its own code paths.
_ACROSS = [
    "test_all_gather_object_subgroup",
    "test_all_to_all_single_unequal_split_complex",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_create_graph",
    "test_reduce_full_group_max",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
]


@pytest.mark.parametrize(("places", "some"), [("", _SOME), ("aab", _ACROSS)], ids=["here", "across"])
def test_what_gloo_passes_passes(places: str, some: list[str]) -> None:
    output = program("suite", "--backend", "shm", "--verbose", "--places", places, *some)
    assert output.splitlines()[-1] == "as expected"
    assert output.count("passed ") == len(some), output


def test_there_are_no_exceptions_to_the_suite() -> None:
    assert not EXCEPTIONS
