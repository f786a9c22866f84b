"""Answers of a hub, or of something between, that are not what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import constants

from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.planner.hub.store import cached_commit
from modelquirks.planner.hub.words import HubError
from modelquirks.planner.model.build import without_network
from modelquirks.planner.opening import open_checkpoint

if TYPE_CHECKING:
    from hub_server import HubServer

Put = Callable[..., None]
Weights = Callable[..., bytes]

NAME = "org/name"
SINGLE = "model.safetensors"


@pytest.fixture
def long_header(put: Put, hub_server: Any) -> None:
    """Give the repository a file whose header takes two requests."""
    text = b'{"' + b"n" * 100_000 + b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    head = len(text).to_bytes(8, "little") + text
    put({SINGLE: hub_server.Blob(head, len(head) + 1, lfs=True)})


def test_a_file_that_changes_while_it_is_read_is_refused(hub: HubServer, long_header: None) -> None:
    hub.faults["/blobs/"] = ["", "etag"]
    with pytest.raises(HubError, match="changed while it was read"):
        open_checkpoint(NAME)


def test_a_body_that_does_not_end_is_not_read_to_its_end(hub: HubServer, long_header: None) -> None:
    hub.faults["/blobs/"] = ["endless", "endless"]
    assert [f for f in open_checkpoint(NAME).findings if f.severity == "error"]
    assert hub.body_bytes < 1 << 26  # what the buffers of sockets hold


def test_a_page_in_the_place_of_a_listing_is_an_error_in_a_sentence(
    hub: HubServer, put: Put, weights: Weights
) -> None:
    put({SINGLE: weights(a=(2, 2))})
    hub.faults["/api/models"] = ["html"] * 9
    with pytest.raises((HubError, CheckpointError), match="org/name"):
        open_checkpoint(NAME)


def test_a_page_in_the_place_of_a_config_is_told_as_one(put: Put, weights: Weights) -> None:
    put({SINGLE: weights(a=(2, 2)), "config.json": b"<!doctype html><script>alert(1)</script>"})
    manifest = open_checkpoint(NAME)
    (finding,) = (f for f in manifest.findings if f.code == "config-unreadable")
    assert "web page" in finding.message
    assert manifest.config == {}


@pytest.mark.parametrize("revision", ["../../../../etc/hostname", "/etc/hostname", "..", "a\0b"])
def test_a_revision_is_no_way_to_another_file(hub: HubServer, revision: str) -> None:
    """The cache keeps the commit of a revision in a file of that name."""
    assert cached_commit(NAME, revision) is None


def test_a_commit_in_the_cache_that_is_a_path_is_not_followed(
    hub: HubServer, tmp_path: Path
) -> None:
    refs = tmp_path / "hf" / "hub" / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("../../../../secret")
    assert cached_commit(NAME, "main") is None


def test_nothing_is_fetched_while_a_library_builds_a_model(hub: HubServer) -> None:
    """Also if several build at once; afterwards all is as before."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    with without_network():
        with without_network(), pytest.raises(OfflineModeIsEnabled):
            HfApi(endpoint=hub.url).model_info(NAME)
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    assert hub.seen == []
