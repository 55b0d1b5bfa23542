"""The process for media URLs, with 127.0.0.1 as the internet.

Arguments: its memory limit, the port of all URLs, and the file of a trusted certificate."""

import ssl
import sys
from pathlib import Path

from tests.unit.api.http.urls.test_fetch import Resolver, is_ours
from vlm_server.api.http.urls.fetch import Fetcher
from vlm_server.api.http.urls.media_url_child import main

if __name__ == "__main__":
    memory_bytes, port, certificate = sys.argv[1:]
    context = ssl.create_default_context(cadata=Path(certificate).read_text())
    main(
        int(memory_bytes),
        lambda job: Fetcher(job.hosts, int(port), Resolver(), is_ours, context),
    )
