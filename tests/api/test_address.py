import asyncio
import os
import socket

import pytest

from server.api import address


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("127.0.0.1", 80, "http://127.0.0.1:80"),
        ("0.0.0.0", 80, "http://127.0.0.1:80"),
        ("::", 80, "http://[::1]:80"),
        ("10.1.2.3", 80, "http://10.1.2.3:80"),
    ],
)
def test_an_address_is_shown_as_a_client_here_reaches_it(host, port, url):
    assert address._url(host, port) == url


def test_only_listening_sockets_count_and_none_is_touched():
    before = os.listdir(address.DESCRIPTORS)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert listener.getsockname() in address._listening()
        assert client.getsockname() not in address._listening()
        client.sendall(b"x")
        accepted, _ = listener.accept()
        assert accepted.recv(1) == b"x"
        accepted.close()
    assert len(os.listdir(address.DESCRIPTORS)) == len(before)


def test_the_admin_port_is_not_shown_to_clients():
    with socket.create_server(("127.0.0.1", 0)) as admin, socket.create_server(("127.0.0.1", 0)) as main:
        admin_port, port = admin.getsockname()[1], main.getsockname()[1]
        ports = {found for _, found in address._listening()}
        assert {admin_port, port} <= ports
        for hidden in (admin_port, port):
            assert not asyncio.run(address.listening_url(hidden)).endswith(f":{hidden}")
