# SPDX-License-Identifier: Apache-2.0
"""The relay passes every byte on, and while it is cut nothing passes and nothing is lost."""

import socket

import pytest

from megascale_ops.chaos.relay import Relay


def test_a_cut_relay_holds_back_and_a_mended_one_delivers() -> None:
    """What was sent during the cut arrives after it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", relay.port), timeout=5) as near:
            far, _ = server.accept()
            with far:
                far.settimeout(5)
                near.sendall(b"before")
                assert far.recv(100) == b"before"

                relay.cut()
                near.sendall(b"during")
                far.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    far.recv(100)

                relay.mend()
                far.settimeout(5)
                assert far.recv(100) == b"during"
        relay.close()
