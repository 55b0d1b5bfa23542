"""The process that follows cameras, with 127.0.0.1 as the internet.

Arguments: the port of all URLs, and the file of a trusted certificate."""

import ssl
import sys
from pathlib import Path

from tests.unit.api.http.urls.test_fetch import Resolver, is_ours
from vlm_server.api.http.urls.camera_child import main
from vlm_server.api.http.urls.fetch import Fetcher

if __name__ == "__main__":
    port, certificate = sys.argv[1:]
    context = ssl.create_default_context(cadata=Path(certificate).read_text())
    main(Fetcher(("*",), int(port), Resolver(), is_ours, context))
