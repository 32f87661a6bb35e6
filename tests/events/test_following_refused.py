"""Addresses and settings of publishers and subscribers: what is valid, and what is refused."""

from __future__ import annotations

import pytest
import zmq

from events.following import publisher, reachable, stored
from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.events.dialects import Dialect
from understudy.events.endpoints import rank_endpoint
from understudy.events.publisher import Publisher
from understudy.events.subscriber import Subscriber


def test_a_replay_request_of_another_shape_is_refused() -> None:
    with publisher() as source, zmq.Context() as context:
        source.publish([stored(1)])
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(reachable(source.replay))
            for request in ([b"\x00" * 8], [b"", b"\x00" * 8, b""], [b"", b"\x00" * 7], [b""]):
                dealer.send_multipart(request)
            dealer.send_multipart([b"", b"\x00" * 8])
            assert dealer.poll(5000)
            assert dealer.recv_multipart()[-2] == b"\x00" * 8
            assert source.refused_requests == 4


@pytest.mark.parametrize(
    ("endpoint", "rank", "address"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://kv", 2, "inproc://kv_dp2"),
        ("inproc://kv", 0, "inproc://kv"),
    ],
)
def test_a_rank_has_an_address_of_its_own(endpoint: str, rank: int, address: str) -> None:
    assert rank_endpoint(endpoint, rank) == address


@pytest.mark.parametrize(
    ("endpoint", "rank", "message"),
    [
        ("tcp://*:65535", 1, "exceeds 65535"),
        ("tcp://host", 0, "tcp://HOST:PORT"),
        ("udp://*:1", 0, "tcp://HOST:PORT"),
        ("tcp://*:1", -1, "rank must be at least 0"),
    ],
)
def test_an_address_that_cannot_be_is_refused(endpoint: str, rank: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_endpoint(endpoint, rank)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="buffer_steps"):
        Publisher("tcp://*:0", buffer_steps=0)
    with pytest.raises(ConfigError, match="cannot publish at tcp://no such host"):
        Publisher("tcp://no such host:1")
    with pytest.raises(ConfigError, match="cannot subscribe to nonsense"):
        Subscriber("nonsense")
    source = publisher()
    event = stored(1)
    event.cache_salt = "s"
    with pytest.raises(InvalidArgument, match="has no cache_salt"):
        source.publish([event])
    assert source.next_sequence == 0
    source.close()
    source.close()
    with pytest.raises(WrongState, match="closed"):
        source.publish([])


def test_ranks_of_a_dialect_without_them_share_a_port() -> None:
    first = Publisher("tcp://*:0", dialect="vllm-0.9.0", rank=2)
    assert isinstance(first.dialect, Dialect)
    with first:
        assert first.publish([stored(1, medium=None)]) == 0
