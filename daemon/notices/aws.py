"""AWS: the spot instance's action and the rebalance recommendation, by IMDSv2.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

import time
from datetime import datetime
from typing import Final, TypeVar

import msgspec

from rallypoint.daemon.notices.http import Answer, ask
from rallypoint.daemon.notices.notice import MetadataError, Notice

EVERY_S: Final = 5.0
"""AWS recommends to look every five seconds."""
GIVEN_S: Final = 120.0
"""A notice comes two minutes before, at best."""
_TOKEN_S: Final = 21600
_TOKENS: Final = "/latest/api/token"
_ACTION: Final = "/latest/meta-data/spot/instance-action"
_REBALANCE: Final = "/latest/meta-data/events/recommendations/rebalance"

T = TypeVar("T")


class _Action(msgspec.Struct):
    """Body of ``instance-action``."""

    action: str
    time: str = ""


class _Rebalance(msgspec.Struct):
    """Body of ``rebalance``."""

    noticeTime: str


class AwsWatcher:
    """``base`` is the address of the metadata service."""

    name: Final = "aws"
    every_s: Final = EVERY_S

    def __init__(self, base: str, token_s: int = _TOKEN_S) -> None:
        """``token_s``: the life that is asked for a token."""
        self._base = base
        self._token_s = token_s
        self._token = ""
        self._renew_at_s = 0.0

    async def look(self) -> tuple[Notice, ...]:
        """Both are 404 while there is nothing. Raises `MetadataError`."""
        action = await self._get(_ACTION)
        rebalance = await self._get(_REBALANCE)
        found = []
        if action is not None:
            found.append(_of_action(action))
        if rebalance is not None:
            at = _decode(rebalance, _Rebalance, _REBALANCE).noticeTime
            text = f"AWS recommends to rebalance (noticed at {at})"
            found.append(Notice("aws", f"aws rebalance {at}", None, text))
        return tuple(found)

    async def left(self) -> None:
        """AWS does not ask for an answer."""

    async def _get(self, path: str) -> Answer | None:
        """The answer; None for 404. A token that is refused is asked for again, once."""
        for _ in range(2):
            if time.monotonic() >= self._renew_at_s:
                await self._take_token()
            answer = await ask(self._base, path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._renew_at_s = 0.0
        if answer.status == 404:
            return None
        answer.expect_ok(path)
        return answer

    async def _take_token(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._token_s)}
        answer = await ask(self._base, _TOKENS, headers, method="PUT")
        answer.expect_ok(_TOKENS)
        self._token = answer.text.strip()
        self._renew_at_s = time.monotonic() + 0.9 * self._token_s


def _of_action(answer: Answer) -> Notice:
    """An action whose time cannot be read is one all the same."""
    body = _decode(answer, _Action, _ACTION)
    what = f"AWS will {body.action} this instance"
    try:
        at_s = datetime.fromisoformat(body.time).timestamp()
    except ValueError:
        text = f"{what} at a time that cannot be read ({body.time[:40]!r})"
        return Notice("aws", f"aws {body.action}", GIVEN_S, text, lasts=True)
    left_s = min(GIVEN_S, at_s - answer.now_unix_s)
    return Notice("aws", f"aws {body.action} {body.time}", left_s, f"{what} at {body.time}")


def _decode(answer: Answer, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(answer.text, type=kind)
    except msgspec.MsgspecError as error:
        raise MetadataError(f"{path}: {error} in {answer.text.strip()[:120]!r}") from error
