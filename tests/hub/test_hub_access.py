"""What goes wrong between here and the hub, what is said, and what is never sent anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from modelquirks.planner import CheckpointError
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.origin import HubOrigin
from modelquirks.planner.hub.words import HubError
from modelquirks.planner.opening import HubOptions, open_checkpoint

if TYPE_CHECKING:
    from hub_server import HubServer

Put = Callable[..., None]
Weights = Callable[..., bytes]
NAME = "org/name"
SINGLE = "model.safetensors"
LARGE = 64 << 20


def messages(manifest: Manifest, code: str) -> list[str]:
    return [finding.message for finding in manifest.findings if finding.code == code]


@pytest.fixture
def large(put: Put, hub_server: Any, weights: Weights) -> None:
    """Put one file of 64 MiB whose tensor is far larger than what should move."""
    raw = weights(a=(2, 3))
    text = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    text = text.replace(
        b'"shape":[2,3],"data_offsets":[0,24]', b'"shape":[4096,4096],"data_offsets":[0,67108864]'
    )
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    put({SINGLE: hub_server.Blob(head, len(head) + LARGE, lfs=True)})


def test_a_server_without_ranges_does_not_make_us_download_the_file(
    hub: HubServer, large: None
) -> None:
    hub.faults["/blobs/"] = ["whole"] * 9
    manifest = open_checkpoint(NAME)
    assert manifest.tensors["a"].shape == (4096, 4096)
    # what the server has written is in the buffers of the two sockets by then
    assert hub.body_bytes < LARGE / 4


def test_a_server_without_ranges_cannot_give_the_end_of_a_file(
    hub: HubServer, put: Put, hub_server: Any
) -> None:
    put({"pytorch_model.bin": hub_server.Blob(b"PK\x03\x04", LARGE, lfs=True)})
    hub.faults["/blobs/"] = ["whole"] * 9
    with pytest.raises(HubError, match=r"gives no ranges of a file.*download the files first"):
        open_checkpoint(NAME)
    assert hub.body_bytes < LARGE / 4


def test_a_range_that_was_not_asked_for_is_refused(hub: HubServer, large: None) -> None:
    hub.faults["/blobs/"] = ["shift"]
    with pytest.raises(HubError, match=r"'org/name': the answer for bytes 0 to 65,535 of .* is of"):
        open_checkpoint(NAME)


@pytest.mark.parametrize("fault", ["cut:20", "short:20"])
def test_a_connection_that_ends_early_is_gone_on_with(
    hub: HubServer, large: None, fault: str
) -> None:
    hub.faults["/blobs/"] = [fault, fault]
    assert open_checkpoint(NAME).tensors["a"].shape == (4096, 4096)
    asked = [one.range for one in hub.seen if "/blobs/" in one.path]
    assert asked == ["bytes=0-65535", "bytes=20-65535", "bytes=40-65535"]


@pytest.mark.parametrize("fault", ["cut:0", "503"])
def test_trouble_that_does_not_pass_is_said(hub: HubServer, large: None, fault: str) -> None:
    hub.faults["/blobs/"] = [fault] * 9
    with pytest.raises(HubError) as caught:
        open_checkpoint(NAME)
    assert "HF_HUB_OFFLINE=1 what is cached is used" in str(caught.value)
    assert len([one for one in hub.seen if "/blobs/" in one.path]) == 5


@pytest.mark.parametrize("part", ["/api/models", "/resolve/", "/blobs/"])
@pytest.mark.parametrize("status", ["429", "503", "500"])
def test_trouble_that_passes_is_waited_for(
    hub: HubServer, large: None, part: str, status: str
) -> None:
    hub.faults[part] = [status, status]
    assert open_checkpoint(NAME).tensors["a"].shape == (4096, 4096)
    assert [one.status for one in hub.seen].count(int(status)) == 2


def test_too_many_requests_are_said_to_be_that(hub: HubServer, large: None) -> None:
    hub.faults["/blobs/"] = ["429"] * 9
    with pytest.raises(HubError, match=r"too many requests from here.*wait some minutes"):
        open_checkpoint(NAME)


def test_a_redirect_that_has_expired_is_asked_for_again(
    hub: HubServer, put: Put, hub_server: Any
) -> None:
    """The hub signs the addresses of large files for an hour."""
    text = b'{"' + b"n" * 100_000 + b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    head = len(text).to_bytes(8, "little") + text
    put({SINGLE: hub_server.Blob(head, len(head) + 1, lfs=True)})
    hub.faults["/blobs/"] = ["", "403"]
    assert len(open_checkpoint(NAME).tensors) == 1
    asked = [(one.path.split("/")[1], one.status) for one in hub.seen if one.range]
    assert asked == [("org", 302), ("blobs", 206), ("blobs", 403), ("org", 302), ("blobs", 206)]


def test_a_token_goes_to_the_hub_alone(hub: HubServer, large: None) -> None:
    hub.repos[NAME].gated = True
    open_checkpoint(NAME, hub=HubOptions(token=hub.token))
    at_hub = [one for one in hub.seen if hub.url.endswith(one.host)]
    elsewhere = [one for one in hub.seen if hub.files_url.endswith(one.host)]
    assert elsewhere
    assert {one.token for one in elsewhere} == {None}
    assert all(one.token == f"Bearer {hub.token}" for one in at_hub if NAME in one.path)


def test_the_token_of_the_environment_is_used_and_can_be_kept_back(
    hub: HubServer, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME].private = True
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert [*open_checkpoint(NAME).tensors] == ["a"]
    with pytest.raises(HubError, match="no repository 'org/name'"):
        open_checkpoint(NAME, hub=HubOptions(revision="0" * 40, token=False))


def test_a_gated_repository_says_what_to_do(hub: HubServer, put: Put, weights: Weights) -> None:
    put({SINGLE: weights(a=(2,)), "config.json": b"{}"}, gated=True)
    with pytest.raises(HubError) as caught:
        open_checkpoint(NAME)
    assert str(caught.value) == (
        "'org/name' is gated: its files go only to people who have accepted its terms. Do so at "
        f"{hub.url}/org/name, then log in with `hf auth login`, or give a token (HF_TOKEN, --token)"
    )
    with pytest.raises(HubError, match=r"\(the token that was sent does not open it\)"):
        open_checkpoint(NAME, hub=HubOptions(token="hf_other"))
    assert [*open_checkpoint(NAME, hub=HubOptions(token=hub.token)).tensors] == ["a"]


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_that_may_not_be_read_is_as_one_that_is_not_there(
    hub: HubServer, put: Put, weights: Weights, private: bool
) -> None:
    """The hub answers both alike, so that nobody learns which private ones there are."""
    if private:
        put({SINGLE: weights(a=(2,))}, private=True)
    for token in (None, "hf_other"):
        with pytest.raises(HubError) as caught:
            open_checkpoint(NAME, hub=HubOptions(token=token))
        assert f"there is no repository 'org/name' on {hub.url} that you may read" in str(
            caught.value
        )
        assert "nor a file or folder of that name here; check the spelling" in str(caught.value)


def test_a_refusal_is_told_in_the_hubs_words(hub: HubServer, large: None) -> None:
    hub.faults["/resolve/"] = ["403"]
    with pytest.raises(HubError, match=r"the hub forbids to read 'org/name' \(.*ordered by the t"):
        open_checkpoint(NAME)


def test_a_revision_that_is_not_there_lists_those_that_are(
    hub: HubServer, put: Put, weights: Weights
) -> None:
    put({SINGLE: weights(a=(2,))})
    hub.repos[NAME].commit({SINGLE: weights(b=(2,))}, "v1.0")
    for revision in ("v2.0", "1" * 40):
        with pytest.raises(HubError) as caught:
            open_checkpoint(NAME, hub=HubOptions(revision=revision))
        assert str(caught.value) == (
            f"'org/name' has no revision {revision!r}; a branch, a tag or a commit was expected: "
            "it has 'main', 'v1.0'"
        )


def test_a_file_that_is_listed_and_not_given_is_named(
    hub: HubServer, put: Put, weights: Weights
) -> None:
    put({SINGLE: weights(a=(2,))})
    manifest = open_checkpoint(NAME)
    files = hub.repos[NAME].commits[str(manifest.origin and manifest.origin.commit)]
    del files[SINGLE]
    hub.faults["/api/models"] = []
    hub.repos[NAME].commit({"other.json": b"{}", SINGLE: weights(c=(2,))})
    hub.faults[SINGLE] = ["404"]
    with pytest.raises(HubError, match="404"):
        open_checkpoint(NAME)


def test_a_commit_that_would_lead_out_of_the_cache_is_refused(
    hub: HubServer, put: Put, weights: Weights
) -> None:
    put({SINGLE: weights(a=(2,))})
    (files,) = hub.repos[NAME].commits.values()
    hub.repos[NAME].commits = {"../../evil": files}
    hub.repos[NAME].refs = {"main": "../../evil"}
    with pytest.raises(HubError, match=r"the hub gives '../../evil' as a commit; 40 hex"):
        open_checkpoint(NAME)


def test_a_renamed_repository_is_followed_and_the_new_name_told(
    hub: HubServer, put: Put, large: None
) -> None:
    put({}, name="old/name", renamed=NAME)
    manifest = open_checkpoint("old/name")
    assert [*manifest.tensors] == ["a"]
    assert manifest.origin is not None
    assert manifest.origin.repository == NAME
    assert messages(manifest, "repository-renamed") == [
        "'old/name' is called 'org/name' on the hub now; write that, for the old name may be given "
        "to something else"
    ]
    hub.forget()
    again = open_checkpoint("old/name")
    assert messages(again, "repository-renamed")
    assert [one.method for one in hub.seen] == ["HEAD"]


def test_a_repository_without_weights_says_what_is_in_it(hub: HubServer, put: Put) -> None:
    put({"README.md": b"", ".gitattributes": b""})
    with pytest.raises(CheckpointError, match=r"'org/name' holds no checkpoint: 2 files, none of"):
        open_checkpoint(NAME)


def test_formats_of_plugins_must_be_here(hub: HubServer, put: Put) -> None:
    put({".metadata": b"\x80\x04.", "__0_0.distcp": b""})
    with pytest.raises(CheckpointError, match="`hf download org/name --local-dir DIR`"):
        open_checkpoint(NAME)


def test_offline_what_was_read_is_enough(
    hub: HubServer, large: None, offline: Callable[[], None]
) -> None:
    online = open_checkpoint(NAME)
    hub.forget()
    offline()
    manifest = open_checkpoint(NAME)
    assert hub.seen == []
    assert (manifest.tensors, manifest.origin) == (online.tensors, online.origin)
    assert messages(manifest, "hub-not-cached") == []


def test_offline_without_anything_says_how_to_get_it(
    hub: HubServer, large: None, offline: Callable[[], None]
) -> None:
    offline()
    with pytest.raises(HubError) as caught:
        open_checkpoint(NAME, hub=HubOptions(revision="v1"))
    assert str(caught.value) == (
        "nothing of 'org/name' is cached, and huggingface_hub is in offline mode (HF_HUB_OFFLINE); "
        "run it once without, or fetch the files where there is a network: hf download org/name "
        "--revision v1"
    )
    assert hub.seen == []


def test_offline_what_others_have_downloaded_is_read(
    hub: HubServer, put: Put, weights: Weights, offline: Callable[[], None]
) -> None:
    """As by ``hf download`` or transformers: nothing of it is known to us."""
    from huggingface_hub import snapshot_download

    put({SINGLE: weights(a=(2,)), "config.json": b'{"model_type": "x"}'})
    snapshot_download(NAME)
    offline()
    manifest = open_checkpoint(NAME)
    assert ([*manifest.tensors], manifest.config["model_type"]) == (["a"], "x")
    assert messages(manifest, "hub-download") == []


def test_offline_files_of_which_nothing_is_cached_are_named(
    hub: HubServer, put: Put, weights: Weights, offline: Callable[[], None], tmp_path: Path
) -> None:
    index = (
        b'{"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    files = {"model-1.safetensors": weights(a=(2,)), "model-2.safetensors": weights(b=(2,))}
    put({**files, f"{SINGLE}.index.json": index})
    open_checkpoint(NAME)
    (part,) = (tmp_path / "hf" / "assets").rglob("model-2*.part")
    part.unlink()
    offline()
    manifest = open_checkpoint(NAME)
    assert messages(manifest, "hub-not-cached") == [
        "without a network only what is cached can be read; of 1 files nothing is: "
        "'model-2.safetensors'. They are taken as if they were not there"
    ]
    assert messages(manifest, "shard-missing")


def test_a_hub_that_is_down_is_no_hindrance_to_what_is_cached(
    hub: HubServer, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = open_checkpoint(NAME)
    hub.faults["/resolve/"] = ["503"] * 9
    manifest = open_checkpoint(NAME)
    assert manifest.tensors == online.tensors
    (told,) = messages(manifest, "hub-unreachable")
    assert "is in trouble (HTTP 503" in told
    assert f"the state that was last seen was taken, commit {str(online.origin)[-8:]}" in told


def test_a_hub_that_is_not_there_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127.0.0.1:9 cannot be reached for 'org/name': "):
        open_checkpoint(NAME)


def test_what_is_here_is_never_asked_for(
    hub: HubServer, large: None, weights: Weights, tmp_path: Path
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / SINGLE).write_bytes(weights(local=(2,)))
    assert [*open_checkpoint(NAME).tensors] == ["local"]
    assert [*open_checkpoint(Path(NAME)).tensors] == ["local"]
    assert hub.seen == []
    assert [*open_checkpoint(f"hf://{NAME}").tensors] == ["a"]


@pytest.mark.parametrize(
    "text",
    [
        *("name", "./org/name", "../org/name", "/org/name", "org/name/", "a/b/c", "org\\name"),
        *("org/model.safetensors", "org/model.safetensors.index.json", "out/config.json", "a/.b"),
        *("org/..", "", "org/a--b", "org/na me", "https://huggingface.co/org/name", "~/org"),
    ],
)
def test_what_is_no_repository_is_never_asked_for(hub: HubServer, text: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(text)
    assert hub.seen == []


def test_a_path_object_is_a_path(hub: HubServer, large: None) -> None:
    with pytest.raises(CheckpointError, match="is not a file or folder that exists"):
        open_checkpoint(Path(NAME))
    assert hub.seen == []


def test_a_broken_link_of_that_name_is_a_path(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    os.symlink("nowhere", tmp_path / "org" / "name")
    with pytest.raises(CheckpointError, match="a link to something that is not there"):
        open_checkpoint(NAME)
    assert hub.seen == []


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://a/b/../c",
        "hf://a b/c",
        "hf:///a",
        "hf://a/b//c",
        "hf://a/b/c//d",
        "hf://a/b@/c",
    ],
)
def test_a_wrong_address_says_how_to_write_one(hub: HubServer, text: str) -> None:
    with pytest.raises(CheckpointError, match="names no repository; write hf://org/name"):
        open_checkpoint(text)
    assert hub.seen == []


def test_options_for_the_hub_are_refused_with_a_path(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path), hub=HubOptions(revision="v1", token="t"))
    assert str(caught.value) == (
        f"{str(tmp_path)!r} is here, so revision and token mean nothing: leave that out, or write "
        "hf://org/name for the repository of that name on the hub"
    )
    with pytest.raises(CheckpointError, match="says the revision already; leave 'v2' out"):
        open_checkpoint("hf://a/b@v1", hub=HubOptions(revision="v2"))


def test_an_origin_never_tells_its_token() -> None:
    origin = HubOrigin("org/name", "main", "0" * 40, token="hf_secret")
    assert "secret" not in repr(origin) + str(origin) + str(origin.to_json())
    assert "secret" not in repr(HubOptions(token="hf_secret"))
    assert HubOrigin.from_json(origin.to_json()) == origin
