"""What to say when the hub does not give something, and what to do about it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.planner.finding import shown
from modelquirks.planner.hub.address import Address
from modelquirks.planner.hub.client import HTTP_ERROR, Client
from modelquirks.planner.hub.failure import HubFailure

__all__ = ["HubError", "is_unreachable", "worded", "words"]

_LOG_IN = "log in with `hf auth login`, or give a token (HF_TOKEN, --token)"


class HubError(CheckpointError):
    """The hub does not give what was asked for; the message says what to do."""


def words(error: BaseException, address: Address, client: Client) -> str:
    """Return the sentence for *error*: what was asked for, what came, what to do."""
    name = repr(address.repository)
    match _told(error):
        case GatedRepoError():
            page = f"{client.endpoint}/{address.repository}"
            return (
                f"{name} is gated: its files go only to people who have accepted its terms. Do so "
                f"at {page}, then {_LOG_IN}{_sent(client)}"
            )
        case RevisionNotFoundError():
            known = client.revisions(address.repository)
            those = f"it has {shown(known)}" if known else "its page lists those that there are"
            return (
                f"{name} has no revision {address.revision!r}; a branch, a tag or a commit was "
                f"expected: {those}"
            )
        case RemoteEntryNotFoundError() as missing:
            return f"{name} lists a file that it does not give: {_first_line(missing)}"
        case RepositoryNotFoundError():
            return (
                f"there is no repository {name} on {client.endpoint} that you may read, nor a file "
                f"or folder of that name here; check the spelling. If it is private, {_LOG_IN}"
                f"{_sent(client)}"
            )
        case HfHubHTTPError() as refused:
            return _refused(refused, address, client)
        case OfflineModeIsEnabled():
            return _offline(address)
        case OSError() as local if not isinstance(local, HTTP_ERROR | ConnectionError):
            return f"{name} cannot be read: {local}"
        case other:
            return (
                f"{client.endpoint} cannot be reached for {name}: {_first_line(other)}. With "
                "HF_HUB_OFFLINE=1 what is cached is used"
            )


def is_unreachable(error: BaseException) -> bool:
    """Tell whether the trouble is with the way to the hub, not with what was asked for."""
    told = _told(error)
    if isinstance(told, HfHubHTTPError):
        return told.response.status_code >= 500
    return isinstance(told, HTTP_ERROR | OfflineModeIsEnabled)


def _refused(error: HfHubHTTPError, address: Address, client: Client) -> str:
    status, name = error.response.status_code, repr(address.repository)
    said = error.server_message or _first_line(error)
    if status == 401:
        return f"the hub does not accept the token that was sent for {name} ({said}); {_LOG_IN}"
    if status == 403:
        return (
            f"the hub forbids to read {name} ({said}); ask its owner for access, or {_LOG_IN} that "
            f"has it{_sent(client)}"
        )
    if status == 429:
        return (
            f"{client.endpoint} has had too many requests from here ({said}): wait some minutes; "
            "who is logged in may ask more often (`hf auth login`)"
        )
    if status >= 500:
        return (
            f"{client.endpoint} is in trouble (HTTP {status}: {said}) over {name}, also after "
            "several tries; try again later. With HF_HUB_OFFLINE=1 what is cached is used"
        )
    return f"{client.endpoint} answers HTTP {status} for {name}: {said}"


def _offline(address: Address) -> str:
    revision = "" if address.revision is None else f" --revision {address.revision}"
    return (
        f"nothing of {address.repository!r} is cached, and huggingface_hub is in offline mode "
        "(HF_HUB_OFFLINE); run it once without, or fetch the files where there is a network: "
        f"hf download {address.repository}{revision}"
    )


def _told(error: BaseException) -> BaseException:
    """Return what was behind *error*: huggingface_hub wraps it where a file is not cached."""
    while not isinstance(error, HTTP_ERROR | OfflineModeIsEnabled) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _sent(client: Client) -> str:
    return " (the token that was sent does not open it)" if client.has_token else ""


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


@contextmanager
def worded(address: Address, client: Client) -> Generator[None, None, None]:
    """Turn what went wrong on the way into a :class:`HubError` that says what to do."""
    try:
        yield
    except HubFailure as failure:
        cause = failure.__cause__
        text = f"{address.repository!r}: {failure}" if cause is None else ""
        raise HubError(text or words(cause or failure, address, client)) from failure
    except (OSError, HTTP_ERROR) as error:
        raise HubError(words(error, address, client)) from error
