"""The page of runs over HTTP, made anew from their files, and shown again by the browser every few seconds.

It is bound to 127.0.0.1 and asks for a token, which the printed address holds: other users of the machine can reach the
port, too. Requests whose `Host` is another one are refused, so that no page of the web can read it through a name that
resolves to this machine. Over ssh: `ssh -L 8090:127.0.0.1:8090 HOST`.
"""

import http.server
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from xgram_dist.errors import UserError

REFRESH_SECONDS = 10
"""Between two looks of the browser; a page is made at most as often."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer:
    def __init__(self, make_page: Callable[[], str], port: int):
        """`port`: 0 for any that is free."""
        self.token = secrets.token_urlsafe(24)
        self._make, self._page, self._made = make_page, "", float("-inf")
        self._lock = threading.Lock()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 30

            def do_GET(self) -> None:
                address = urlsplit(self.path)
                given = parse_qs(address.query).get("token", [""])[0]
                if self.headers.get("Host", "") not in server.hosts or address.path != "/":
                    self._answer(404, "text/plain", "not found")
                elif not secrets.compare_digest(given.encode(), server.token.encode()):
                    self._answer(403, "text/plain", "the address printed by `xgram-dist report --serve` has the token")
                else:
                    try:
                        self._answer(200, "text/html", server.page())
                    except UserError as error:  # shown again when the file can be read
                        self._answer(503, "text/plain", str(error))

            def _answer(self, code: int, kind: str, text: str) -> None:
                body = text.encode("utf-8")
                self.send_response(code)
                headers = {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
                if code in (200, 503):
                    headers["Refresh"] = str(REFRESH_SECONDS)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """The address, which a log would show, holds the token."""

        try:
            self.http = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--serve {port}: cannot listen on 127.0.0.1:{port}: {error}; choose another port"
            ) from None
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.hosts = {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def page(self) -> str:
        with self._lock:
            if time.monotonic() - self._made >= REFRESH_SECONDS / 2:
                self._page, self._made = self._make(), time.monotonic()
            return self._page

    def serve(self) -> None:
        """Until Ctrl-C."""
        with self.http:
            self.http.serve_forever(poll_interval=0.1)
