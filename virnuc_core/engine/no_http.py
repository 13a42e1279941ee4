"""Keep Dask from starting an HTTP server in the process that imports this module.

Every Dask scheduler and worker starts an HTTP server on all addresses of its machine. Without a
dashboard it has fewer pages, but it still listens, and no setting of Dask turns it off.

Dask imports this module by its option `--preload`, before it would start the server. So this is the
one module whose import changes something. On the nodes of a batch system a copy of this file is
used, therefore it must import nothing of virnuc.
"""

from typing import Any

from distributed.node import ServerNode


def start_no_server(*_: Any, **__: Any) -> None:
    """Take the place of `ServerNode.start_http_server`, and open no socket."""


ServerNode.start_http_server = start_no_server
