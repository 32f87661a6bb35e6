"""The recorder's stand-in for NIXL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from exact.pd_network import WIRE, Agent, Handshakes, Network

if TYPE_CHECKING:
    from concurrent.futures import Future


def network(fail: dict[str, Any] | None = None, **wire: Any) -> Network:
    return Network({**WIRE, **wire}, fail or {})


def read(agent: Agent, name: str, blocks: int = 1) -> int:
    """Post a transfer and return its handle."""
    handle = agent.make_prepped_xfer("READ", 0, range(blocks), 0, range(blocks), f"{name}:1".encode())
    agent.transfer(handle)
    return handle


@pytest.mark.parametrize(("link", "done"), [("parallel", [4, 3]), ("fifo", [4, 5])])
def test_transfers_take_turns_on_a_fifo_link_only(link: str, done: list[int]) -> None:
    agent = Agent("d", network(link=link, latency=1, blocks_per_tick=2))
    read(agent, "a", blocks=5)
    read(agent, "b", blocks=3 if link == "parallel" else 2)
    assert [posted["done"] for posted in agent.posted] == done


def test_the_peer_is_notified_when_a_transfer_is_done() -> None:
    net = network(latency=2)
    p, d = Agent("p", net), Agent("d", net)
    handle = read(d, "a")
    d.send_notif("p", b"HB:a")
    assert (d.check_xfer_state(handle), p.get_new_notifs()) == ("PROC", {"d": [b"HB:a"]})
    net.tick = 2
    assert (d.check_xfer_state(handle), p.get_new_notifs()) == ("DONE", {"d": [b"a:1"]})
    assert p.received == ["a"]


def test_a_failed_transfer_notifies_no_peer() -> None:
    net = network({"a": "read", "b": "setup"})
    p, d = Agent("p", net), Agent("d", net)
    assert d.check_xfer_state(read(d, "a")) == "ERR"
    with pytest.raises(RuntimeError, match="fails when it is posted"):
        read(d, "b")
    assert [posted["req"] for posted in d.posted] == ["a"]
    assert p.get_new_notifs() == {"d": []}


def test_the_first_handshake_fails_if_the_scenario_says_so() -> None:
    net = network({"handshake": True}, handshake=3)
    handshakes = Handshakes(net)
    ended: list[Future[Any]] = [handshakes.submit(lambda: 1)]
    net.tick = 2
    handshakes.end_due()
    assert not ended[0].done()
    net.tick = 3
    handshakes.end_due()
    assert isinstance(ended[0].exception(), RuntimeError)
    ended.append(handshakes.submit(lambda: 2))
    net.tick = 6
    handshakes.end_due()
    assert ended[1].result() == 2
