"""A server that answers like Prometheus, with series that the test gives."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

Labels = Mapping[str, str]


@dataclass
class Answers:
    """What is said of every expression that contains a text; of others nothing."""

    url: str = ""
    jobs: tuple[str, ...] = ("walk",)
    series: dict[str, list[tuple[Labels, str]]] = field(default_factory=dict)
    """Text in the expression -> labels, and the value at every moment."""
    scrape_s: float = 15.0
    raw: bytes | None = None
    """Said instead of everything."""
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, bytes]:
        if self.raw is not None:
            return 200, self.raw
        if path.startswith("/api/v1/label/"):
            return _success(list(self.jobs))
        if path.endswith("targets"):
            targets = [{"lastError": "401 Unauthorized"}, {"lastError": ""}]
            return _success({"activeTargets": targets})
        (expr,) = query["query"]
        self.asked.append(expr)
        if "refused" in expr:
            return 400, json.dumps({"status": "error", "error": "parse error"}).encode()
        found = [one for text, given in self.series.items() if text in expr for one in given]
        if path.endswith("query_range"):
            start, end, step = (float(query[name][0]) for name in ("start", "end", "step"))
            moments = [start + number * step for number in range(int((end - start) / step) + 1)]
            return _success(
                {"result": [{"metric": m, "values": [[t, v] for t in moments]} for m, v in found]}
            )
        now = float(query["time"][0])
        if expr.endswith("]"):
            past = [now - self.scrape_s * number for number in range(9, -1, -1)]
            return _success(
                {"result": [{"metric": m, "values": [[t, v] for t in past]} for m, v in found]}
            )
        return _success({"result": [{"metric": m, "value": [now, v]} for m, v in found]})


def _success(data: object) -> tuple[int, bytes]:
    return 200, json.dumps({"status": "success", "data": data}).encode()


@contextmanager
def prometheus_server() -> Iterator[Answers]:
    """One that runs to the end of the block."""
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            code, body = answers.answer(parts.path, parse_qs(parts.query))
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    answers.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
