"""A proxy that plays the way to the internet, and keeps what it was asked for."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

READS = "http://reads.example.org/few.fasta"
FASTA = b">read1\n" + b"ACGTTGCATGCCATTGACCA" * 20 + b"\n"


class Proxy(ThreadingHTTPServer):
    """A proxy that knows one file of another machine, and keeps what it was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ProxyRequest)
        self.requests: list[str] = []

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that name this proxy."""
        names = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy")
        address = f"http://127.0.0.1:{self.server_port}"
        return dict.fromkeys(names, address) | {name.upper(): address for name in names}


class ProxyRequest(BaseHTTPRequestHandler):
    """One connection to the proxy."""

    server: Proxy

    def do_GET(self) -> None:
        """Send the file."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(FASTA)))
        self.end_headers()
        self.wfile.write(FASTA)

    def parse_request(self) -> bool:
        """Keep the first line of any request, also of those that are refused."""
        self.server.requests.append(self.raw_requestline.decode(errors="replace").strip())
        return super().parse_request()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""
