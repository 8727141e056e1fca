"""A wire with a meter: passes TCP connections on to a server and counts the bytes each way, whatever they mean."""

from __future__ import annotations

import contextlib
import socket
import threading


class CountingProxy:
    """Listens on a free port of the loopback; `sent` counts what clients sent, `received` what they got."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.sent = self.received = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> CountingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                for source, sink, name in ((client, server, "sent"), (server, client, "received")):
                    threading.Thread(target=self._pass_on, args=(source, sink, name), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(2**16):
                sink.sendall(content)
                with self._lock:
                    setattr(self, name, getattr(self, name) + len(content))
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
